"""What lists a signer has shown this machine before: none is taken that is older than the newest.

The file is in the store's folder. Where nobody may write there, or somebody else may, only this
process remembers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from eagercache.base import private_file

NAME = "REMOTES"
_MOST = 10_000  # what is remembered; each is a signer of an environment in a remote


class Sequences:
    """The highest sequence by name. Thread-safe, and several processes may write one file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # guards what follows
        self._known = self._read()

    def highest(self, name: str) -> int:
        """The highest that was remembered; 0 where none was."""
        with self._lock:
            return self._known.get(name, 0)

    def remember(self, name: str, sequence: int) -> None:
        """Takes note of one that was shown."""
        with self._lock:
            if sequence <= self._known.get(name, 0):
                return
            self._known[name] = sequence
            with self._alone():
                for other, highest in self._read().items():
                    self._known[other] = max(highest, self._known.get(other, 0))
                newest = sorted(self._known.items(), key=lambda one: -one[1])[:_MOST]
                private_file.write(self._folder, NAME, dict(newest))

    def _read(self) -> dict[str, int]:
        found = private_file.read(self._folder, NAME)
        if not isinstance(found, dict):
            return {}
        return {name: n for name, n in found.items() if isinstance(n, int)}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes from writing meanwhile, as far as the folder lets us."""
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._folder / f"{NAME}.lock", flags, 0o600)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
            return
        yield
