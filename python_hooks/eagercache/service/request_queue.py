"""Requests that wait for a worker, and what becomes of them.

A request to measure something again waits until nothing else does and the machine is idle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from eagercache.base import structured_trace
from eagercache.base.log import event
from eagercache.base.operators import described_name
from eagercache.service.request import Request, Response, cpu_seconds, failure_of
from eagercache.service.settings import ServiceSettings
from eagercache.service.worker_process import WorkerProcess

log = logging.getLogger("eagercache")
INFO = logging.INFO

# Of a program that asks for more the latest are kept.
MOST_ANSWERS = 4096


@dataclass(frozen=True)
class Answer:
    """What became of one request, and when.

    Attributes:
        began, ended: on the clock of `time.monotonic`; it began when a worker turned to it.
        verdict: "kernel", "native", "failed", or "not yet" where the service was closed first.
        cpu_seconds: that the worker spent; 0 for what another process had made.
    """

    op: str
    began: float
    ended: float
    verdict: str
    reason: str
    cpu_seconds: float


class RequestQueue:
    """What a compile service was asked, and a lock for it. `push` and what ends in _locked need it.

    ``compiles``, ``failures``, ``seconds`` and ``answers`` as those of `CompileService`.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        # Guards everything below, and all of `Workers`.
        self.changed = threading.Condition()
        self.settings = settings  # that the next request gets
        self.waiting: list[Request] = []
        self.unanswered: dict[int, Request] = {}  # by order
        self.cut_off: list[Request] = []  # without an answer but that the service was closed
        self.idle = 0  # threads
        self.closed = False
        self.compiles = 0
        self.failures = 0
        self.seconds = 0.0
        self.answers: deque[Answer] = deque(maxlen=MOST_ANSWERS)

    def push(self, request: Request, delay: float) -> None:
        """Queues a request that may start in so many seconds. The lock is held."""
        request.start = time.monotonic() + delay
        self.waiting.append(request)
        self.changed.notify()

    def wait_for_work(self, process: WorkerProcess | None) -> bool:
        """Waits for a request that may start; False once the service is closed.

        Also returns when ``process`` has been idle for too long.
        """
        since = time.monotonic()
        with self.changed:
            self.idle += 1
            try:
                while not self.closed:
                    now = time.monotonic()
                    if self._ready_locked(now):
                        return True
                    limits = [
                        max(one.start - now, self.settings.idle_check if one.again else 0.0)
                        for one in self.waiting
                    ]
                    if process is not None:
                        left = since + self.settings.idle_timeout - now
                        if left <= 0:
                            return True
                        limits.append(left)
                    self.changed.wait(min(limits, default=None))
                while self.waiting:
                    self._answer_locked(self.waiting.pop(), "the compile service is closed")
                return False
            finally:
                self.idle -= 1

    def _ready_locked(self, now: float) -> list[Request]:
        """The requests that may start."""
        due = [request for request in self.waiting if request.start <= now]
        ready = [request for request in due if not request.again]
        if ready or not due or self.unanswered or not self.settings.machine_is_idle():
            return ready
        return due[:1]

    def take_batch(self, process: WorkerProcess | None) -> list[Request]:
        """The most useful requests that may start, to be answered together; perhaps none."""
        with self.changed:
            now = time.monotonic()
            ready = self._ready_locked(now)
            if not ready:
                return []
            ready.sort(key=lambda request: (-request.gain, request.order))
            settings = ready[0].settings
            limit = settings.largest_batch if process and process.served else settings.first_batch
            # Other idle threads get their share.
            limit = max(1, min(limit, -(-len(ready) // (self.idle + 1))))
            if ready[0].alone:
                batch = ready[:1]
            else:
                together = [r for r in ready if not r.alone and r.settings == settings]
                batch = together[:limit]
            for request in batch:
                self.waiting.remove(request)
            batch[0].begun = now  # the others once this one is answered
            return batch

    def _answer_locked(self, request: Request, reason: str) -> None:
        self.changed.release()
        try:
            self.finish(request, failure_of(request.description, reason, transient=True))
        finally:
            self.changed.acquire()

    def _note_locked(self, request: Request, response: Response, *, cut_off: bool) -> None:
        ended = time.monotonic()
        self.answers.append(
            Answer(
                op=described_name(request.description),
                began=request.begun or ended,
                ended=ended,
                verdict="not yet" if cut_off else str(response.get("verdict", "")),
                reason=str(response.get("reason", "")),
                cpu_seconds=cpu_seconds(response),
            )
        )

    def finish(self, request: Request, response: Response) -> None:
        """Counts, logs and delivers one answer."""
        seconds = cpu_seconds(response)
        failed = response.get("verdict") == "failed"
        with self.changed:
            cut_off = failed and self.closed and response.get("failure") == "transient"
            self.seconds += seconds
            self._note_locked(request, response, cut_off=cut_off)
            if cut_off:
                if not request.again:
                    self.cut_off.append(request)
            elif failed:
                self.failures += 1
            elif not response.get("found"):
                self.compiles += 1
        event(
            INFO,
            "compiled",
            op=described_name(request.description),
            digest=request.description.get("digest"),
            verdict=response.get("verdict"),
            reason=response.get("reason"),
            cpu_seconds=f"{seconds:.2f}",
        )
        structured_trace.note_response(
            described_name(request.description),
            str(request.description.get("digest", "")),
            response,
        )
        request.answered = True
        if request.desk is not None and not failed and not response.get("found"):
            key = str(request.description["digest"])
            request.desk.offer(key, replace=request.refused_remotely)
        try:
            request.on_done(response)
        except BaseException:  # SystemExit too: this thread is not the callback's to end
            log.exception(
                "delivering the verdict on %s failed", described_name(request.description)
            )
        finally:
            with self.changed:
                self.unanswered.pop(request.order, None)
                self.changed.notify_all()
