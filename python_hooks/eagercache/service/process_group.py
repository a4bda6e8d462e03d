"""A worker's process group: the worker, and the compilers that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time


class ProcessGroup:
    """Signals to a group, until it is ended. Thread-safe."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._lock = threading.Lock()
        self._ended = False
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    def end(self) -> None:
        """Kills all of it, once: later the number may be another group's."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._signal(signal.SIGKILL)

    def pause(self) -> None:
        """Stops all of it until `go_on`."""
        with self._lock:
            if not self._ended and self._paused_at is None:
                self._paused_at = time.monotonic()
                self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends a pause."""
        with self._lock:
            if self._paused_at is not None:
                self._paused_seconds += time.monotonic() - self._paused_at
                self._paused_at = None
                if not self._ended:
                    self._signal(signal.SIGCONT)

    def clock(self) -> float:
        """`time.monotonic`, but for pauses: deadlines of what it does are of this clock."""
        with self._lock:
            now = time.monotonic() if self._paused_at is None else self._paused_at
            return now - self._paused_seconds

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.number, number)
