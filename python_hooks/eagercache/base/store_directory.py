"""Where the store lives when nobody says so."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Of a store: precompiled headers, Inductor's compiled sources, and requests that were open when
# their program ended.
HEADERS_FOLDER = "HEADERS"
BYTECODE_FOLDER = "PYTHON"
PENDING_FOLDER = "PENDING"

# statfs(2) f_type of file systems that other machines write too: files may vanish or change under a
# mapping, and locks do not hold. Values from linux/magic.h and the file systems' own headers.
_NETWORK_MAGIC = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x517B: "SMB",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x01021997: "9p",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
}


def has_utf8_name(path: Path) -> bool:
    """Whether the name is text, as the core needs it."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return False
    return True


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def network_file_system(path: Path) -> str | None:
    """The name of the network file system that `path` would be on, or None for a local one."""
    import ctypes

    class StatFs(ctypes.Structure):
        _fields_ = [("f_type", ctypes.c_long), ("rest", ctypes.c_char * 512)]

    buffer = StatFs()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(nearest_existing(path)), ctypes.byref(buffer)) != 0:
        return None
    return _NETWORK_MAGIC.get(buffer.f_type & 0xFFFFFFFF)


def candidates(environ: Mapping[str, str], uid: int) -> list[Path]:
    """Directories to try in order. Numeric user ids: a container may have no name for its user."""
    paths: list[Path] = []
    if cache_home := environ.get("XDG_CACHE_HOME"):
        paths.append(Path(cache_home) / "eagercache")
    elif home := environ.get("HOME"):
        paths.append(Path(home) / ".cache" / "eagercache")
    local = [path for path in paths if path.is_absolute() and network_file_system(path) is None]
    local.append(Path(f"/var/tmp/eagercache-{uid}"))
    if temporary := environ.get("TMPDIR"):
        local.append(Path(temporary) / f"eagercache-{uid}")
    return local
