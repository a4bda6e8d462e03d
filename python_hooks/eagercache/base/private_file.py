"""Small JSON files in the store's directory, believed only where nobody else can have written."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
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
    return is_kept(own, above, _is_ours)


def is_kept(
    own: os.stat_result, above: Iterable[os.stat_result], ours: Callable[[os.stat_result], bool]
) -> bool:
    """Whether a folder is ``ours``, and nobody else can put another into its place.

    So are all those above it, or root's where each may move his own alone (as in /tmp).
    """
    return (
        stat.S_ISDIR(own.st_mode)
        and ours(own)
        and all(ours(s) or (s.st_uid == 0 and s.st_mode & stat.S_ISVTX) for s in above)
    )


def foreign_entry(tree: Path) -> str | None:
    """What others than this user and root may have put into ``tree``, or as ``tree``: one clause.

    None where there is nothing of the kind, or no ``tree``. Folders and regular files alone belong
    there. A store that was open to others once may hold what they left, whatever its mode is now.
    """
    left = [tree]
    try:
        if problem := _foreign(str(tree), tree.lstat()):
            return problem
        while left:
            for path, status in _entries(left.pop()):
                if problem := _foreign(path, status):
                    return problem
                if stat.S_ISDIR(status.st_mode):
                    left.append(Path(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{tree} cannot be read: {error}"
    return None


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """What is in a folder; what is taken away meanwhile is not."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, entry.stat(follow_symlinks=False)


def _foreign(path: str, status: os.stat_result) -> str | None:
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        return f"{path} is neither a file nor a folder"
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {status.st_uid}"
    return None if _is_ours(status) else f"{path} may be written by other users"


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def read(folder: Path, name: str, most_bytes: int = _MAX_BYTES) -> Any:
    """The content of ``folder/name``.

    None where it is missing, damaged or larger than ``most_bytes``, or where others than this user
    and root may have written.
    """
    if not is_private(folder):
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        with os.fdopen(os.open(folder / name, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                return None
            if status.st_size > most_bytes:
                return None
            return json.loads(file.read(most_bytes))
    except (OSError, ValueError, RecursionError):
        return None


def write(folder: Path, name: str, content: Any) -> None:
    """Puts ``content`` in place at once. Errors are nobody's concern: it can be made again."""
    if not is_private(folder):
        return
    remove_abandoned(folder, f"{name}.new")
    with contextlib.suppress(OSError):
        put(folder, name, json.dumps(content))


def put(folder: Path, name: str, text: str) -> None:
    """Puts ``text`` in place at once, in a folder that is known to be private. Raises OSError."""
    # Random: in containers processes that died had the numbers of those that live.
    temporary = folder / f"{name}.new{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.rename(folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Takes away what processes left that died; a clock that was put back dates it ahead."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if abs(time.time() - path.lstat().st_mtime) > _ABANDONED_SECONDS:
                    path.unlink()
