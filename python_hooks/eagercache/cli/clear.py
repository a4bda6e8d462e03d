"""`eagercache clear`: removes a cache, and nothing else that may be beside it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from pathlib import Path

import click

from eagercache.base import facts, store_directory
from eagercache.cli.common import (
    Stopped,
    Unusable,
    directory_option,
    json_option,
    print_json,
    size_text,
    store_path,
)

# What a store's folder holds (kernel_cache/FORMAT.md), but for FORMAT, which goes last: until then
# it says that this is a store.
_MARK = "FORMAT"
_FIRST_WORD = b"eagercache-store "
_NAMES = (
    "v1",
    facts.NAME,
    "NATIVE",  # runtime/left_native.py
    "REMOTES",  # remote/sequences.py
    "REMOTES.lock",
    store_directory.HEADERS_FOLDER,
    store_directory.BYTECODE_FOLDER,
    store_directory.PENDING_FOLDER,
)
_CLEARED = ".cleared-"
# No other names: what is not of a cache stays, however it is called.
_CLEARED_NAME = re.compile(rf"(\w+){re.escape(_CLEARED)}[0-9a-f]+")
_ABANDONED = re.compile(rf"({facts.NAME}|NATIVE|REMOTES)\.new[0-9a-f]*")


@click.command("clear")
@directory_option
@json_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear_command(directory: Path | None, as_json: bool, yes: bool) -> None:
    """Removes a cache, of all environments. Programs that use it go on, and fill it again.

    A process that goes on with what ended programs left is ended.

    What is in its folder and is no part of a cache stays.
    """
    from eagercache.service import lingering

    root = store_path(directory)
    _require_store(root)
    found = _parts(root)
    size = sum(_size(path) for path in found)
    if not yes:
        try:
            agreed = click.confirm(f"Remove the cache {root} ({size_text(size)})?", err=True)
        except click.Abort as error:  # nobody is there to answer
            raise Stopped(f"{root} was left: nobody said yes; --yes says it") from error
        if not agreed:
            raise Stopped(f"{root} was left")
    if not lingering.stop(root):
        raise Unusable(f"a process compiles for {root} and does not end; `eagercache stats` has it")
    try:
        for path in found:
            _remove(path)
        (root / _MARK).unlink(missing_ok=True)
    except OSError as error:
        raise Unusable(
            f"{error.filename or root} cannot be removed: {error.strerror}; run it again as the "
            "user whose cache it is"
        ) from error
    left = sorted(path.name for path in root.iterdir())
    if as_json:
        print_json({"path": str(root), "bytes_removed": size, "left": left})
        return
    click.echo(f"removed the cache {root}: {size_text(size)}")
    if left:
        click.echo(f"not of a cache, and left: {', '.join(left)}")


def _require_store(root: Path) -> None:
    """Unusable for any folder that is not a store of this user's."""
    if not os.path.lexists(root):
        raise Unusable(f"there is no cache at {root}; name one with --dir or EAGERCACHE_DIR")
    try:
        status = root.lstat()
        mark = (root / _MARK).lstat()
        is_mark = stat.S_ISREG(mark.st_mode) and (root / _MARK).read_bytes().startswith(_FIRST_WORD)
    except OSError:
        is_mark = False
    if not is_mark:
        raise Unusable(f"{root} is no cache; name one with --dir or EAGERCACHE_DIR")
    if stat.S_ISLNK(status.st_mode):
        raise Unusable(f"{root} is a link; name the folder that it points to, {root.resolve()}")
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise Unusable(f"{root} belongs to user {status.st_uid}, who alone may remove it")


def _parts(root: Path) -> list[Path]:
    names = [*_NAMES]
    for path in root.iterdir():
        abandoned, cleared = _ABANDONED.fullmatch(path.name), _CLEARED_NAME.fullmatch(path.name)
        if abandoned or (cleared and cleared[1] in _NAMES):  # of a run that was ended
            names.append(path.name)
    return [root / name for name in names if os.path.lexists(root / name)]


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += (Path(folder) / name).lstat().st_size
            except OSError:
                continue  # gone meanwhile
    return total


def _remove(path: Path) -> None:
    """Takes the name away first: who opens the store meanwhile finds none, and never a half."""
    if _CLEARED not in path.name:
        path = path.rename(path.with_name(f"{path.name}{_CLEARED}{secrets.token_hex(8)}"))
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
