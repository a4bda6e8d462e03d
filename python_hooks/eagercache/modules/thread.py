"""The thread that answers the core's questions about modules, beside the program's."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("eagercache")


class ModuleThread:
    """Runs jobs one after the other, and counts what is unfinished. Thread-safe."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._unfinished = 0
        self._idle = threading.Condition()

    def post(self, job: Callable[[], None]) -> None:
        """Runs ``job`` later; not at all once this is closed."""
        with self._idle:
            if self._closed:
                return
            self._unfinished += 1
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="eagercache-modules", daemon=True
                )
                self._thread.start()
        self._queue.put(job)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if not self._closed:
                    job()
            except Exception:
                log.exception("looking at a module failed; its forward answers")
            finally:
                del job
                self.finish()

    def begin(self) -> None:
        """Counts something that is done elsewhere, until `finish`."""
        with self._idle:
            self._unfinished += 1

    def finish(self) -> None:
        """One job or compile less is unfinished."""
        with self._idle:
            self._unfinished -= 1
            self._idle.notify_all()

    def close(self, timeout: float) -> None:
        """At exit: looks at no more modules, and waits for our thread to be done with one.

        It runs PyTorch's operators on copies of tensors. One that asks for the interpreter's lock
        while Python ends would end the program with `std::terminate`.
        """
        with self._idle:
            self._closed = True
            thread = self._thread
        self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is looked at or compiled; False when ``timeout`` seconds passed."""
        with self._idle:
            return self._idle.wait_for(lambda: self._unfinished == 0, timeout)
