"""What was computed from files, remembered by what the kernel says of those files.

The environment key needs the digests of the assembler and the linker, what the compiler says of
itself, and more: tens of milliseconds for files that change once a month. The results are kept in
the store's directory, in the file FACTS, each with the identity of its files: device, inode, size,
and the times of the last change of content and of inode. The latter no program can set, so equal
identities mean equal content. Where an image builder wrote it, which shows by whole seconds, the
linker's own hash of a program or a checksum of any other file is part of the identity; and what
changed so recently that another write might not move its time is read again.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagercache.base import private_file

NAME = "FACTS"
_VERSION = 1
_MAX_FACTS = 256
_SECOND = 1_000_000_000
# A file that changed more recently than this may change again without a new time.
_SETTLED = 2 * _SECOND
_SEGMENT = struct.Struct("<IIQQQQQQ")  # a program header
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3


def _identity(path: str | Path, now: int) -> list[Any] | None:
    """What tells this content of ``path`` from any other; None when nothing does."""
    try:
        # Opened, not only looked at: a network file system asks its server then.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        changed = status.st_ctime_ns
        if not stat.S_ISREG(status.st_mode) or not 0 <= changed <= now - _SETTLED:
            return None
        mark = _mark(descriptor, status.st_size) if changed % _SECOND == 0 else ""
    except (OSError, struct.error):
        return None
    finally:
        os.close(descriptor)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, changed, mark]


def _mark(descriptor: int, size: int) -> str:
    """A program's build id, or the checksum of whatever has none."""
    return _build_id(descriptor) or f"crc {zlib.crc32(os.pread(descriptor, size, 0)):08x}"


def _build_id(descriptor: int) -> str:
    """The linker's hash of an ELF file's content (note NT_GNU_BUILD_ID), or an empty text."""
    header = os.pread(descriptor, 64, 0)
    if header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little endian
        return ""
    (table,) = struct.unpack_from("<Q", header, 32)
    entry_size, count = struct.unpack_from("<HH", header, 54)
    if entry_size != _SEGMENT.size or count > 64:
        return ""
    for segment in _SEGMENT.iter_unpack(os.pread(descriptor, entry_size * count, table)):
        kind, _, offset, _, _, length, *_ = segment
        if kind != _PT_NOTE:
            continue
        notes = os.pread(descriptor, min(length, 4096), offset)
        while len(notes) >= 12:
            name_size, value_size, note = struct.unpack_from("<III", notes)
            begin = 12 + (name_size + 3) // 4 * 4
            value = notes[begin : begin + value_size]
            if note == _NT_GNU_BUILD_ID and notes[12:16] == b"GNU\0" and len(value) >= 16:
                return f"build id {value.hex()}"
            notes = notes[begin + (value_size + 3) // 4 * 4 :]
    return ""


class Facts:
    """Remembered results. Without a ``folder``, or in one that others may write, it has none.

    ``folder`` is the store's directory and need not exist. Not thread-safe.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known = _read(folder) if folder is not None else {}
        self._changed = False

    def recall(self, kind: str, files: Sequence[str | Path], compute: Callable[[], Any]) -> Any:
        """``compute()``, which depends on the content of ``files`` alone, or what it gave before.

        Results are what JSON has. An exception of ``compute`` is the caller's.
        """
        if self._folder is None:
            return compute()
        now = time.time_ns()
        identities = [_identity(file, now) for file in files]
        name = "\n".join((kind, *map(str, files)))
        known = self._known.get(name)
        if None not in identities and known is not None and known[0] == identities:
            return known[1]
        result = compute()
        # Read before and after: what changed meanwhile belongs to neither result.
        if None not in identities and [_identity(file, now) for file in files] == identities:
            self._known[name] = [identities, result]
            self._changed = True
        return result

    def save(self) -> None:
        """Writes what is new. Errors are nobody's concern: the next process computes it again."""
        if self._folder is None or not self._changed:
            return
        self._changed = False
        while len(self._known) > _MAX_FACTS:
            del self._known[next(iter(self._known))]
        content = {"version": _VERSION, "facts": self._known}
        private_file.write(self._folder, NAME, content)


def _read(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(TypeError, KeyError, AttributeError):
        content = private_file.read(folder, NAME)
        if content["version"] == _VERSION:
            return {name: entry for name, entry in content["facts"].items() if len(entry) == 2}
    return {}
