"""Small JSON files in the store's directory, believed only where nobody else can have written."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 20
_ABANDONED_SECONDS = 3600


def is_private(folder: Path) -> bool:
    """Whether nobody but this user and root can have written ``folder`` or put it there."""
    try:
        own = folder.lstat()
        above = [path.lstat() for path in Path(os.path.realpath(folder)).parents]
    except OSError:
        return False
    return (
        stat.S_ISDIR(own.st_mode)
        and _is_ours(own)
        and all(_is_ours(s) or (s.st_uid == 0 and s.st_mode & stat.S_ISVTX) for s in above)
    )


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def read(folder: Path, name: str) -> Any:
    """The content of ``folder/name``.

    None where it is missing or damaged, or where others than this user and root may have written.
    """
    if not is_private(folder):
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        with os.fdopen(os.open(folder / name, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                return None
            return json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None


def write(folder: Path, name: str, content: Any) -> None:
    """Puts ``content`` in place at once. Errors are nobody's concern: it can be made again."""
    if not is_private(folder):
        return
    # One name, so that a process that dies here leaves one file, which a later one takes away.
    temporary = folder / f"{name}.new"
    with contextlib.suppress(OSError):
        if time.time() - temporary.lstat().st_mtime > _ABANDONED_SECONDS:
            temporary.unlink()
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file)
        temporary.rename(folder / name)
