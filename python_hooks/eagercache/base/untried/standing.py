"""Whether kernels may be used in this process, while a check beside it is under way.

Until the check has passed everything stays native. It is a process of its own, which takes half a
minute of compiling; a thread waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence


class Standing:
    """Passed, where nothing was begun. Any thread may ask."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._settled.set()
        self._problem = ""
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def begin(self, command: Sequence[str], say: Callable[[str], None]) -> None:
        """Starts the check; ``say`` gets the problem that it found, "" for none, in a thread."""
        self._settled.clear()
        self._owner = os.getpid()
        try:
            self._process = subprocess.Popen(
                list(command), cwd="/", start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
            )  # fmt: skip
        except OSError as error:
            self._settle(f"it could not be started ({error})", say)
            return
        wait = threading.Thread(
            target=self._wait, args=(self._process, say), name="eagercache-self-check", daemon=True
        )
        wait.start()

    def pending(self) -> bool:
        """Whether it is not known yet. In a fork of the process that began it stays unknown."""
        return not self._settled.is_set()

    def problem(self) -> str:
        """Why everything stays native for good; "" for nothing, or nothing yet."""
        return self._problem

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is known; whether it is. A fork of the process has nothing to wait for."""
        if os.getpid() != self._owner:
            return not self.pending()
        return self._settled.wait(timeout)

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Calls it once it is known: from a thread, or now where it is."""
        with self._lock:
            if self.pending():
                self._callbacks.append(callback)
                return
        callback()

    def leave(self, lingers: bool) -> None:
        """At the end of the program: the check goes on behind it, or ends with it."""
        process = self._process
        if process is None or lingers or os.getpid() != self._owner or process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    def _wait(self, process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
        output, _ = process.communicate()
        try:
            problem = str(json.loads(output)["problem"])
        except (ValueError, KeyError, TypeError):
            problem = f"its process ended with status {process.returncode} and said nothing"
        self._settle(problem, say)

    def _settle(self, problem: str, say: Callable[[str], None]) -> None:
        self._problem = problem
        try:
            say(problem)  # first: who waits may end the program
        finally:
            with self._lock:
                self._settled.set()
                callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()


standing = Standing()
