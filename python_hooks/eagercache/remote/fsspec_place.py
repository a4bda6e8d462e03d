"""Remotes that fsspec reads and writes: buckets (s3, gs, az), folders, and memory for tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from eagercache.remote.place import Denied, PlaceError, TooLarge

_T = TypeVar("_T")

# Requests under way, those that nobody waits for any longer among them.
_MOST_AT_ONCE = 8
_RETRY_SECONDS = 0.1


class FsspecPlace:
    """A folder of a file system of fsspec's. See `Place`.

    Such a file system's requests have no deadline that all kinds share. So each runs on a daemon
    thread, and is left alone when its time is over; while too many of these hang, none is begun.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_local = urlsplit(url).scheme == "file"
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._free = threading.Semaphore(_MOST_AT_ONCE)

    def get(self, name: str, most: int, seconds: float) -> bytes | None:
        """As `Place.get`."""

        def read(system: Any, path: str) -> bytes | None:
            try:
                content = system.cat_file(path, start=0, end=most + 1)
            except FileNotFoundError:
                return None
            if len(content) > most:
                raise TooLarge(f"more than {most} bytes")
            return bytes(content)

        return self._within(seconds, name, read)

    def size(self, name: str, seconds: float) -> int | None:
        """As `Place.size`."""

        def ask(system: Any, path: str) -> int | None:
            try:
                return int(system.info(path)["size"])
            except FileNotFoundError:
                return None

        return self._within(seconds, name, ask)

    def put(self, name: str, content: bytes, seconds: float) -> None:
        """As `Place.put`."""

        def write(system: Any, path: str) -> None:
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

        self._within(seconds, name, write)

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

    def _within(self, seconds: float, name: str, work: Callable[[Any, str], _T]) -> _T:
        """What the work returns, if it does so in time. Raises PlaceError."""
        if not self._free.acquire(blocking=False):
            raise PlaceError(f"{_MOST_AT_ONCE} requests to it hang")
        # At most one of the two is put.
        outcome: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                system, root = self._system()
                outcome.put((work(system, f"{root}/{name}"), None))
            except BaseException as error:
                outcome.put((None, error))
            finally:
                self._free.release()

        try:
            threading.Thread(target=run, name="eagercache-remote-io", daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            raise PlaceError(f"no thread can be started: {error}") from error
        try:
            value, trouble = outcome.get(timeout=seconds)
        except queue.Empty:
            raise PlaceError(f"no answer within {seconds:g} s") from None
        if trouble is not None:
            raise _place_error(trouble) from trouble
        return value  # type: ignore[return-value]


def _place_error(error: BaseException) -> PlaceError:
    if isinstance(error, PlaceError):
        return error
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(error, PermissionError):
        return Denied(reason)
    passing = isinstance(error, OSError) and not isinstance(error, FileExistsError)
    return PlaceError(reason, retry_after=_RETRY_SECONDS if passing else None)
