"""Whether pending requests may use a GPU: only while no program does.

A program that finds a worker of ours on its GPU could run out of memory there. So a worker begins
where nobody computes, and is ended once the driver shows somebody else's context. A program that
asks for nearly all of the memory before that may not get it. Where the driver does not show our own
worker, as in most containers, it would not show another program, either: the first answer ends it
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from eagercache.service.gpu_watch import Use, strangers, use_of

# What was seen counts for so long.
LOOK_SECONDS = 0.1


class IdleGpu:
    """One GPU, by its UUID. ``groups`` are the process groups of our workers on it."""

    def __init__(self, uuid: str, look: Callable[[str], Use | None] | None = None) -> None:
        self._uuid = uuid
        self._look = look or use_of
        self._looked = -LOOK_SECONDS
        self._last: Use | None = None
        self._seen = False  # a worker of ours, by the driver
        self._blind = False

    def could_have(self, wanted: int) -> bool:
        """Whether it may become free with so many bytes at all."""
        use = self._use()
        return not self._blind and use is not None and use.shared and use.total_bytes >= wanted

    def is_free_for(self, wanted: int, groups: Set[int]) -> bool:
        """Whether nobody else is on it, and so many bytes are free."""
        use = self._use()
        if self._blind or use is None or not use.shared or use.free_bytes < wanted:
            return False
        return not strangers(use, groups)

    def is_wanted(self, groups: Set[int]) -> bool:
        """Whether somebody has come, or it is gone."""
        use = self._use()
        if use is None or strangers(use, groups):
            return True
        self._seen = self._seen or bool(use.pids)
        return False

    def cannot_see(self, *, answered: bool) -> bool:
        """Whether a worker that ``answered`` a request on it was never seen there."""
        self._blind = self._blind or (answered and not self._seen)
        return self._blind

    def _use(self) -> Use | None:
        """Of now, or of a moment ago: a look takes the driver up to a millisecond."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._last, self._looked = self._look(self._uuid), now
        return self._last
