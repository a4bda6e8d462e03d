"""The file that a process of `eagercache run --report` leaves, however it ends.

It is written when the process ends, by whichever way Python knows of, and now and then before: what
is killed by a signal has a report that is a little old. Forked children have no kernels of their
own, so they only say that they were there and for how long.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0
# A pause is at least so many times what the writing before it took.
PAUSES_FOR_COST = 50.0
# `os._exit` may be called while some lock is held that the last writing waits for.
LAST_WRITE_SECONDS = 5.0


class ReportFile:
    """One process's, and its forks'. `begin` is called once, by the process that it is of.

    ``what``: what the process says of itself; it is told whether this is the end.
    """

    def __init__(self, folder: Path, what: Callable[[bool], dict[str, Any]]) -> None:
        self._folder = folder
        self._what = what
        self._owner = os.getpid()
        self._name = f"{self._owner}-{time.time_ns()}.json"
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._ended = False
        self._pause = FIRST_PAUSE_SECONDS
        self._due = self._began + self._pause

    def begin(self) -> None:
        """Has the end of this process, and of its forks, be seen."""
        from multiprocessing import util

        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._in_fork)
        util.register_after_fork(self, ReportFile._note_fork)
        os._exit = self._then(os._exit)  # type: ignore[assignment]

    def refresh(self) -> None:
        """Writes what is known so far, when it is time again. Called by a thread of ours."""
        began = time.monotonic()
        if began < self._due or os.getpid() != self._owner:
            return
        self._write(at_end=False)
        took = time.monotonic() - began
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._due = began + took + max(self._pause, PAUSES_FOR_COST * took)

    def end(self) -> None:
        """The process, or a fork of it, ends."""
        if os.getpid() != self._owner:
            self._note_fork()
            return
        try:
            self._write(at_end=True)
        except Exception as error:
            print(f"eagercache: process {os.getpid()} cannot report: {error}", file=sys.stderr)

    def _then(self, leave: Callable[[int], Any]) -> Callable[[int], Any]:
        @functools.wraps(leave)
        def leave_with_a_report(status: int) -> Any:
            with contextlib.suppress(Exception):
                if os.getpid() == self._owner:
                    last = threading.Thread(target=self.end, daemon=True)
                    last.start()
                    last.join(LAST_WRITE_SECONDS)
                else:
                    self._note_fork()
            leave(status)

        return leave_with_a_report

    def _in_fork(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()  # another thread may have held it

    def _note_fork(self) -> None:
        """Says of a fork how long it was there; of one that is killed, that it was."""
        with contextlib.suppress(Exception):
            note = {"fork": True, "wall_seconds": time.monotonic() - self._began}
            self._put(f"fork-{os.getpid()}-{self._name}", note)

    def _write(self, *, at_end: bool) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = at_end
            self._put(self._name, {**self._what(at_end), "ended": at_end})

    def _put(self, name: str, value: dict[str, Any]) -> None:
        target = self._folder / name
        unfinished = target.with_suffix(".part")
        unfinished.write_text(json.dumps(value))
        unfinished.rename(target)
