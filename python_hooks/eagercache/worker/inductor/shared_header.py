"""Precompiled headers, kept in the store's directory for all workers.

That of bare kernels costs 5 s of CPU time and 120 MB, and each compile without it 2 s; for those of
containers see `container_headers`. In the folder HEADERS there is one folder for a compiler and its
flags, with the header, what the compiler made of it, objects that go with it, and the identity of
every file that they were made from; where one of those has changed it is made anew. What is there
may be deleted at any time.

What the compiler makes of a header is code in every kernel. So it is used only where every folder
and file on the way belongs to this user or root, nobody else may write it, and it has the bytes
that were noted when it was made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from eagercache.base import private_file
from eagercache.base.store_directory import HEADERS_FOLDER

NAME = "bare.h"
_SOURCES = "sources"
_UNUSED_SECONDS = 7 * 24 * 3600.0


def compiled(header: Path) -> Path:
    """What the compiler makes of a header."""
    return header.with_suffix(".h.gch")


class SharedHeader:
    """The header for one compiler and its flags. Not thread-safe; processes may share the folder.

    ``store`` is the store's directory. Where others than this user may write there, nothing is
    shared: `find` and `put` find and put nothing. ``name`` is the header's.
    """

    def __init__(self, store: Path, compiler: str, words: Sequence[str], name: str = NAME) -> None:
        told = hashlib.sha256("\0".join([compiler, *words]).encode()).hexdigest()[:32]
        self._name = name
        self._store = store
        self._folder = store / HEADERS_FOLDER / told

    def find(self) -> Path | None:
        """The header, if it is there and what it was made from is what it was."""
        header = self._folder / self._name
        if not self._is_private():
            return None
        try:
            sources = private_file.read(self._folder, _SOURCES)
            if any(_identity(path) != known for path, known in sources["files"].items()):
                return None
            if any(_digest(self._folder / n) != known for n, known in sources["digests"].items()):
                return None
            # Nothing lies there that nobody knows, which might be linked.
            there = {path.name for path in self._folder.iterdir()} - {_SOURCES}
            if not {header.name, compiled(header).name} <= there == sources["digests"].keys():
                return None
            os.utime(self._folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return header

    def put(
        self, header: Path, dependencies: Sequence[Path], objects: Sequence[Path] = ()
    ) -> Path | None:
        """Moves a header's folder here, with the ``objects`` in it and nothing else.

        ``dependencies`` are the compiler's own lists of what it read (-MF). The header's new place,
        or that of another worker's, who was quicker; None, with the folder where it was, when it
        cannot be moved.
        """
        if not private_file.is_private(self._store):
            return None
        try:
            read = [
                name for rule in dependencies for name in _read_dependencies(rule, header.parent)
            ]
            files = {path: _identity(path) for path in read}
            kept = (header, compiled(header), *objects)
            digests = {path.name: _digest(path) for path in kept}
            for path in set(header.parent.iterdir()) - set(kept):
                path.unlink()
            known = header.parent / _SOURCES
            known.write_text(json.dumps({"digests": digests, "files": files}))
            for path in (known, *kept):
                path.chmod(0o600)
            header.parent.chmod(0o700)
            self._folder.parent.mkdir(mode=0o700, exist_ok=True)
            quicker = self.find()
            if quicker is not None:
                return quicker
            if private_file.foreign_entry(self._folder.parent):
                return None
            self.remove()
            self._remove_unused()
            header.parent.rename(self._folder)
        except (OSError, ValueError):
            return None
        return self._folder / header.name

    @contextlib.contextmanager
    def making(self) -> Iterator[bool]:
        """A block in which this worker makes the header; False where another one does so now.

        Many workers that start at once on an empty store would all make it.
        """
        with contextlib.ExitStack() as held:
            alone = True
            with contextlib.suppress(OSError):
                if private_file.is_private(self._store):
                    self._folder.parent.mkdir(mode=0o700, exist_ok=True)
                    lock = os.open(f"{self._folder}.lock", os.O_CREAT | os.O_RDWR, 0o600)
                    held.callback(os.close, lock)
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        alone = False
            yield alone

    def _is_private(self) -> bool:
        return (
            private_file.is_private(self._store)
            and not self._folder.parent.is_symlink()
            and private_file.foreign_entry(self._folder) is None
            and private_file.is_private(self._folder)
        )

    def remove(self) -> None:
        """Takes the header away: it is stale, or does not work."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _remove_unused(self) -> None:
        for folder in self._folder.parent.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > _UNUSED_SECONDS and folder.is_dir():
                    shutil.rmtree(folder, ignore_errors=True)


def _identity(path: str) -> list[int]:
    status = Path(path).stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _read_dependencies(dependencies: Path, folder: Path) -> list[str]:
    """The files that a rule of make names, but for those in the header's own folder."""
    _, _, files = dependencies.read_text().partition(":")
    named = shlex.split(files.replace("\\\n", " "))
    return [path for path in named if Path(path).parent != folder]
