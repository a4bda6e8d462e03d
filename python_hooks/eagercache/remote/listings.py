"""What remotes list, for times when a program asks for many keys at once.

A request for each of hundreds of keys keeps the interpreter's lock from callers now and then, and
keys wait for each other behind a slow remote. So the list of an environment's keys is read once,
and what it lacks counts as a miss without a request. A list is a hint: what was sent a moment ago
may not be there yet, and is compiled here then. Few keys are asked for one by one.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable

from eagercache.remote import catalogue
from eagercache.remote.place import PlaceError
from eagercache.remote.tier import Tier

# From so many keys that wait on, a list is read.
MANY = 8
FRESH_SECONDS = 30.0


class _Lines:
    """Keys in a sorted text of equal lines, which nobody takes apart: that would take a while."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._width = catalogue.KEY_LINE_BYTES

    def __len__(self) -> int:
        return len(self._content) // self._width

    def __getitem__(self, index: int) -> bytes:
        return self._content[index * self._width : (index + 1) * self._width]

    def has(self, key: str) -> bool:
        """Whether it is a line."""
        line = f"{key}\n".encode()
        index = bisect.bisect_left(self, line)
        return index < len(self) and self[index] == line


class Listings:
    """The lists of one environment. Thread-safe."""

    def __init__(self, identity: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._identity = identity
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows; nobody asks a remote with it
        self._read: dict[int, tuple[float, _Lines | None]] = {}  # by `id` of a tier

    def lacks(self, tier: Tier, key: str, waiting: int) -> bool:
        """Whether a list says that the remote does not have a key, where ``waiting`` others are.

        False where nobody knows, as while another thread reads the list.
        """
        with self._lock:
            at, lines = self._read.get(id(tier), (float("-inf"), None))
            now = self._clock()
            fresh = now - at <= FRESH_SECONDS
            if not fresh:
                if waiting < MANY:
                    return False
                self._read[id(tier)] = now, None
        if not fresh:
            lines = self._lines(tier)
            with self._lock:
                self._read[id(tier)] = self._clock(), lines
        return lines is not None and not lines.has(key)

    def _lines(self, tier: Tier) -> _Lines | None:
        try:
            content = catalogue.key_lines(tier, self._identity)
        except PlaceError:
            return None
        return _Lines(content) if len(content) % catalogue.KEY_LINE_BYTES == 0 else None
