"""What a program enables before a self-check has passed: it is done once it has, in the same order.

All of it holds the session's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagercache.base import config
from eagercache.base.untried.standing import standing
from eagercache.base.warn import warn_once
from eagercache.runtime import choices
from eagercache.runtime.session import session


@dataclass(eq=False)
class _Step:
    """Something to do later, and how to take back what it did."""

    do: Callable[[], Callable[[], None] | None]
    restore: Callable[[], None] | None = None


class Deferred:
    """The steps that wait for a verdict. Where nothing is checked there are none."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._done = not standing.pending()
        self._doing = False
        if not self._done:
            standing.when_settled(self._take_up)

    def holds(self) -> bool:
        """Whether what is to be enabled has to wait. Does what waited where the verdict is new."""
        if self._done or self._doing:
            return False
        if not standing.pending():
            self._take_up()
        return not self._done

    def settle(self, timeout: float) -> bool:
        """Waits for the verdict, without the lock; whether nothing waits any more."""
        if not standing.wait(timeout):
            return False
        with session.lock:
            return not self.holds()

    def begun(self) -> bool:
        """Whether there is something that waits."""
        return bool(self._steps)

    def add(self, do: Callable[[], Any]) -> Callable[[], None]:
        """Has it done later. ``do`` gives a function that takes it back, or anything else."""
        step = _Step(do)
        self._steps.append(step)

        def restore() -> None:
            with session.lock:
                if step.restore is not None:
                    step.restore()
                elif step in self._steps:
                    del self._steps[self._steps.index(step) :]

        return restore

    def drop(self) -> None:
        """Nothing of what waits is done."""
        self._steps.clear()

    def _take_up(self) -> None:
        with session.lock:
            if self._done or self._doing:
                return
            self._doing = True
            steps, self._steps = self._steps, []
            for step in steps if not standing.problem() else ():
                try:
                    found = step.do()
                except Exception as error:
                    warn_once(f"deferred:{error}", f"it could not be enabled: {error}")
                    continue
                step.restore = found if callable(found) else None
            self._done, self._doing = True, False


deferred = Deferred()


def is_inert(settings: config.Settings, on_miss: str) -> bool:
    """As `choices.is_inert`. Who wants calls to wait for kernels waits for the verdict, too."""
    if not choices.is_inert(settings) and (settings.on_miss or on_miss) == "wait":
        standing.wait()
    return choices.is_inert(settings)
