"""One remote with all that keeps it from hindering anybody: deadlines, retries, a breaker."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from eagercache.base.log import event
from eagercache.remote.breaker import Breaker
from eagercache.remote.opening import open_place
from eagercache.remote.place import Denied, Place, PlaceError, TooLarge, shown_url

_T = TypeVar("_T")

# Seconds that one request may take: of a program, whose kernel is compiled meanwhile or instead,
# and of a command that somebody waits for.
PROGRAM_SECONDS = 2.0
COMMAND_SECONDS = 30.0
ATTEMPTS = 3
# Nobody waits longer than this between two attempts, whatever the remote wishes.
LONGEST_DELAY = 1.0

# Its own: the program's random numbers are the program's.
_random = random.Random()


class Tier:
    """A remote. Thread-safe.

    Every method raises PlaceError: at once while the breaker is open, and otherwise once the
    attempts are used up. What hangs is not tried again.
    """

    def __init__(
        self,
        url: str,
        *,
        seconds: float = PROGRAM_SECONDS,
        place: Place | None = None,
        sleep: Callable[[float], object] = time.sleep,
        breaker: Breaker | None = None,
    ) -> None:
        self.shown = shown_url(url)
        self.writable = True  # until it denies it
        self._place = place or open_place(url)
        self._seconds = seconds
        self._sleep = sleep
        self._breaker = breaker or Breaker()
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._bytes_sent = 0
        self._requests = 0
        self._request_seconds = 0.0

    @property
    def requests(self) -> int:
        """Requests that were made, each attempt for itself."""
        return self._requests

    @property
    def request_seconds(self) -> float:
        """What they took together, with those that nobody answered."""
        return self._request_seconds

    @property
    def bytes_read(self) -> int:
        """Bytes that were got from it."""
        return self._bytes_read

    @property
    def bytes_sent(self) -> int:
        """Bytes that were put there."""
        return self._bytes_sent

    def get(self, name: str, most: int) -> bytes | None:
        """What is under a name, None where nothing is; `TooLarge` beyond ``most`` bytes."""
        content = self._try(lambda: self._place.get(name, most, self._seconds))
        with self._lock:
            self._bytes_read += len(content or b"")
        return content

    def size(self, name: str) -> int | None:
        """How many bytes are under a name; None where nothing is."""
        return self._try(lambda: self._place.size(name, self._seconds))

    def put(self, name: str, content: bytes) -> None:
        """Puts bytes under a name. Where that is denied, `writable` is False from then on."""
        try:
            self._try(lambda: self._place.put(name, content, self._seconds))
        except Denied as error:
            self.writable = False
            event(logging.INFO, "remote_read_only", remote=self.shown, reason=error)
            raise
        with self._lock:
            self._bytes_sent += len(content)

    def missing(self) -> str | None:
        """In words what the place would need and has not; None where nothing is known to lack."""
        return self._try(lambda: self._place.missing(self._seconds))

    def _try(self, ask: Callable[[], _T]) -> _T:
        if not self._breaker.allows():
            raise PlaceError("it did not answer before, and is not asked for a while")
        for attempt in range(ATTEMPTS):
            try:
                answer = self._timed(ask)
            except (Denied, TooLarge):
                self._breaker.succeeded()  # an answer, too
                raise
            except PlaceError as error:
                wish = error.retry_after
                if wish is None or wish > LONGEST_DELAY or attempt + 1 == ATTEMPTS:
                    self._note_failure(error)
                    raise
                # Jitter: a fleet that was turned away together must not come back together.
                self._sleep(min(LONGEST_DELAY, wish * 2**attempt * _random.uniform(0.5, 1.5)))
            except BaseException as error:
                self._note_failure(error)
                raise
            else:
                self._breaker.succeeded()
                return answer
        raise AssertionError

    def _timed(self, ask: Callable[[], _T]) -> _T:
        begin = time.monotonic()
        try:
            return ask()
        finally:
            with self._lock:
                self._requests += 1
                self._request_seconds += time.monotonic() - begin

    def _note_failure(self, error: BaseException) -> None:
        if self._breaker.failed():
            event(
                logging.WARNING,
                "remote_silent",
                remote=self.shown,
                reason=error,
                remedy="kernels are made here until it answers",
            )
