"""Remotes that fsspec reads and writes: buckets (s3, gs, az), folders, and memory for tests."""

from __future__ import annotations

import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from eagercache.remote.bounded import Bounded
from eagercache.remote.place import Denied, PlaceError, TooLarge

_T = TypeVar("_T")

_RETRY_SECONDS = 0.1
# How object stores tell a bucket that is not there from an object that is not.
_NO_BUCKET = re.compile(r"NoSuchBucket|(?:bucket|container) does not exist")


class FsspecPlace:
    """A folder of a file system of fsspec's. See `Place`.

    Such a file system's requests have no deadline that all kinds share: `Bounded` ends them.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_local = urlsplit(url).scheme == "file"
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._bounded = Bounded(_place_error)

    def get(self, name: str, most: int, seconds: float) -> bytes | None:
        """As `Place.get`."""

        def read(system: Any, folder: str) -> bytes | None:
            try:
                content = system.cat_file(f"{folder}/{name}", start=0, end=most + 1)
            except FileNotFoundError:
                return None
            if len(content) > most:
                raise TooLarge(f"more than {most} bytes")
            return bytes(content)

        return self._within(seconds, read)

    def size(self, name: str, seconds: float) -> int | None:
        """As `Place.size`."""

        def ask(system: Any, folder: str) -> int | None:
            try:
                return int(system.info(f"{folder}/{name}")["size"])
            except FileNotFoundError:
                return None

        return self._within(seconds, ask)

    def put(self, name: str, content: bytes, seconds: float) -> None:
        """As `Place.put`."""

        def write(system: Any, folder: str) -> None:
            path = f"{folder}/{name}"
            if self._is_local:
                # Elsewhere an object appears at once; a file is written beside and then renamed.
                file = system.open(path, "wb", autocommit=False)
                try:
                    file.write(content)
                    file.close()
                    file.commit()
                except BaseException:
                    file.close()
                    file.discard()
                    raise
            else:
                system.pipe_file(path, content)

        self._within(seconds, write)

    def missing(self, seconds: float) -> str | None:
        """As `Place.missing`: a folder of this machine's, or a bucket."""

        def look(system: Any, folder: str) -> str | None:
            if self._is_local:
                return _missing_folder(folder)
            try:
                system.cat_file(f"{folder}/v1", start=0, end=1)
            except FileNotFoundError as error:
                if _NO_BUCKET.search(f"{error} {error.__cause__}"):
                    return f"there is no bucket {folder.partition('/')[0]}"
            return None

        return self._within(seconds, look)

    def _system(self) -> tuple[Any, str]:
        """The file system, and the folder in it. Opened by the first request."""
        with self._lock:
            if self._opened is None:
                import fsspec

                options: dict[str, Any] = {"auto_mkdir": True} if self._is_local else {}
                # What was listed before says nothing about what others have written since.
                options["use_listings_cache"] = False
                system, root = fsspec.core.url_to_fs(self._url, **options)
                self._opened = system, root.rstrip("/")
            return self._opened

    def _within(self, seconds: float, work: Callable[[Any, str], _T]) -> _T:
        """What the work returns, given the file system and the folder. Raises PlaceError."""
        return self._bounded.within(seconds, lambda: work(*self._system()))


def _missing_folder(folder: str) -> str | None:
    try:
        mode = Path(folder or "/").stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no folder {folder}"
    return None if stat.S_ISDIR(mode) else f"{folder} is no folder"


def _place_error(error: BaseException) -> PlaceError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(error, PermissionError):
        return Denied(reason)
    passing = isinstance(error, OSError) and not isinstance(error, FileExistsError)
    return PlaceError(reason, retry_after=_RETRY_SECONDS if passing else None)
