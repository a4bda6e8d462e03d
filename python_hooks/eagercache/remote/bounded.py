"""Requests that have no deadline of their own, given one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from eagercache.remote.place import PlaceError

_T = TypeVar("_T")

# Requests under way, those that nobody waits for any longer among them.
MOST_AT_ONCE = 8


class Bounded:
    """Runs each request on a daemon thread, and leaves it alone when its time is over.

    While too many of those hang, none is begun.
    """

    def __init__(self, place_error: Callable[[BaseException], PlaceError]) -> None:
        self._place_error = place_error
        self._free = threading.Semaphore(MOST_AT_ONCE)

    def within(self, seconds: float, work: Callable[[], _T]) -> _T:
        """What the work returns, if it does so in time. Raises PlaceError."""
        if not self._free.acquire(blocking=False):
            raise PlaceError(f"{MOST_AT_ONCE} requests to it hang")
        outcome: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            answer: tuple[_T | None, BaseException | None]
            try:
                answer = work(), None
            except BaseException as error:
                answer = None, error
            # Before the answer: who has it may ask again at once.
            self._free.release()
            outcome.put(answer)

        try:
            threading.Thread(target=run, name="eagercache-remote-io", daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            raise PlaceError(f"no thread can be started: {error}") from error
        try:
            value, trouble = outcome.get(timeout=seconds)
        except queue.Empty:
            raise PlaceError(f"no answer within {seconds:g} s") from None
        if isinstance(trouble, PlaceError):
            raise trouble
        if trouble is not None:
            raise self._place_error(trouble) from trouble
        return value  # type: ignore[return-value]
