"""Whether pending requests may use a GPU: only while no program does.

A program that finds a worker of ours on its GPU could run out of memory there. So a worker begins
where nobody has a context, and is ended as soon as somebody else has one. A context takes longer to
be made than it takes to look. Where the driver does not show whose contexts there are, as in most
containers, nothing is begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from eagercache.service.gpu_watch import Use, strangers, use_of

# What was seen counts for so long.
LOOK_SECONDS = 0.1


class IdleGpu:
    """One GPU, by its UUID. ``groups`` gives the process groups of our workers on it."""

    def __init__(
        self,
        uuid: str,
        groups: Callable[[], Iterable[int]],
        look: Callable[[str], Use | None] = use_of,
    ) -> None:
        self._uuid = uuid
        self._groups = groups
        self._look = look
        self._looked = -LOOK_SECONDS
        self._last: Use | None = None
        self._seen = False  # a worker of ours, by the driver
        self._blind = False

    def could_have(self, wanted: int) -> bool:
        """Whether it may become free with so many bytes at all."""
        use = self._use()
        return not self._blind and use is not None and use.shared and use.total_bytes >= wanted

    def is_free_for(self, wanted: int) -> bool:
        """Whether nobody else is on it, and so many bytes are free."""
        use = self._use()
        if self._blind or use is None or not use.shared or use.free_bytes < wanted:
            return False
        return not strangers(use, self._groups())

    def is_wanted(self, *, answered: bool) -> bool:
        """Whether somebody has come, or could not be seen.

        ``answered``: a worker has answered a request on it. If it was never seen there, another
        program would not be, either.
        """
        use = self._use()
        if use is None or strangers(use, self._groups()):
            return True
        self._seen = self._seen or bool(use.pids)
        self._blind = answered and not self._seen
        return self._blind

    def _use(self) -> Use | None:
        """Of now, or of a moment ago: a look takes the driver up to a millisecond."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._last, self._looked = self._look(self._uuid), now
        return self._last
