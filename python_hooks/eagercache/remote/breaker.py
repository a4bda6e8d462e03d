"""When to stop asking a remote that does not answer, and when to ask again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# So many requests in a row without an answer open it.
FAILURES = 3
FIRST_PAUSE = 30.0
LONGEST_PAUSE = 600.0


class Breaker:
    """Closed while a remote answers. Thread-safe.

    Open for a time after failures in a row; then one request is let through. Its answer closes the
    breaker, and its failure opens it for twice as long.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until: float | None = None  # open till then
        self._trying = False  # one was let through and has not ended

    def allows(self) -> bool:
        """Whether a request may be made. After True, `succeeded` or `failed` has to be called."""
        with self._lock:
            if self._until is None:
                return True
            if self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        """A request was answered."""
        with self._lock:
            self._failures, self._pause = 0, FIRST_PAUSE
            self._until, self._trying = None, False

    def failed(self) -> bool:
        """A request was not answered; whether that has opened the breaker just now."""
        with self._lock:
            self._failures += 1
            if self._trying:
                self._trying = False
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            elif self._until is not None or self._failures < FAILURES:
                return False  # one that was under way when it opened
            self._until = self._clock() + self._pause
            return True
