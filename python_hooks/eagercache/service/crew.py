"""Looks after workers while they have something to do.

How many may begin is asked before each batch, but a batch takes minutes, and a program that reads
its data when they begin may use every processor a moment later. So those that have become too many
are stopped. And one that gives way to everybody (SCHED_IDLE) gets nothing on a machine that has
become full: it is replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from eagercache.service.pace import SAMPLE_SECONDS

log = logging.getLogger("eagercache")

# Of each sample one of the stopped ones runs for so long: it may hold a lock of the store.
TURN_SECONDS = 0.02
# The same where none may run: what compiling may take of a processor then.
SHARE_SECONDS = 0.1
# Looks in a row that find no processor left over, before what gives way is replaced.
FULL_LOOKS = 10


class Member(Protocol):
    """As much of a worker as is needed here."""

    @property
    def gives_way(self) -> bool:
        """Whether it only runs where nobody else wants to."""

    def pause(self) -> None:
        """Stops it."""

    def go_on(self) -> None:
        """Has it run again; nothing where it runs."""

    def replace(self) -> None:
        """Ends it, so that another one answers what it was at."""


class Crew:
    """The workers of a service that have something to do. Thread-safe.

    ``most`` says how many of them may run now, ``has_room`` whether a processor is left over.
    """

    def __init__(self, most: Callable[[], int], has_room: Callable[[], bool]) -> None:
        self._most = most
        self._has_room = has_room
        self._lock = threading.Lock()
        self._busy: list[Member] = []  # the longest at it first
        self._watched = False
        self._turn = 0
        self._full = 0

    @contextmanager
    def at_work(self, worker: Member) -> Iterator[None]:
        """While a worker has something to do, it may be stopped or replaced."""
        with self._lock:
            self._busy.append(worker)
            watched, self._watched = self._watched, True
        try:
            if not watched:
                self._start()
            yield
        finally:
            with self._lock:
                self._busy.remove(worker)
                worker.go_on()

    def look(self, rest: Callable[[float], None] = time.sleep) -> bool:
        """Does what is to be done now; False where nobody is at work, and nobody looks any more.

        Of those that may run it is those that began first.
        """
        most, room = self._most(), self._has_room()
        with self._lock:
            if not self._busy:
                self._watched = False
                return False
            self._full = 0 if room else self._full + 1
            if self._full >= FULL_LOOKS:
                self._full = 0
                for worker in self._busy:
                    if worker.gives_way:
                        worker.replace()
            for worker in self._busy[:most]:
                worker.go_on()
            stopped = self._busy[most:]
            for worker in stopped:
                worker.pause()
            if not stopped:
                return True
            self._turn += 1
            chosen = stopped[self._turn % len(stopped)]
            chosen.go_on()
        rest(TURN_SECONDS if most else SHARE_SECONDS)
        with self._lock:
            if chosen in self._busy[most:]:
                chosen.pause()
        return True

    def _start(self) -> None:
        thread = threading.Thread(target=self._watch, name="eagercache-crew", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: all of them run
            with self._lock:
                self._watched = False

    def _watch(self) -> None:
        try:
            while self.look():
                time.sleep(SAMPLE_SECONDS)
        except Exception:  # as where /proc cannot be read: nobody stays stopped
            log.debug("workers are not looked after:", exc_info=True)
            with self._lock:
                self._watched = False
                for worker in self._busy:
                    worker.go_on()
