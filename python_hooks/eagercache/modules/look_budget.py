"""How much of a program's time looks at its modules may take.

A look takes milliseconds, tens of them at a language model. A program that changes its modules at
each step (an attribute that goes to and fro), or makes new ones (`copy.deepcopy`), would look at
them at each step, for longer than the forward takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Of each module so many looks are free while it lives: at one that is new, that its first call
# changed, and so on.
FREE_LOOKS = 8
# All others together take at most this part of the time, and what was not taken is kept up to
# so many seconds, which is what a program begins with.
SHARE = 0.02
SECONDS = 0.5


class LookBudget:
    """The time that looks may still take. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: in seconds."""
        self._clock = clock
        self._lock = threading.RLock()  # a module may die in any line
        self._left = SECONDS
        self._at = clock()

    def allows(self) -> bool:
        """Whether there may be a look now."""
        with self._lock:
            self._refill()
            return self._left > 0

    def spend(self, seconds: float) -> None:
        """A look took so long that was not free, or those did at a module that has died."""
        with self._lock:
            self._refill()
            self._left -= seconds

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(SECONDS, self._left + SHARE * (now - self._at))
        self._at = now
