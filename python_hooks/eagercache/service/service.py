"""The compile service of a user's process: a queue, and worker processes that answer it.

`submit` never blocks on a compile. Each worker belongs to one thread of ours, which starts it,
feeds it one request at a time, and replaces it when it crashes, hangs or has served long enough.
Threads and workers start with the first request. After a fork the child's copy does nothing.

Whatever goes wrong here, every request is answered: somebody may be waiting.

A request to measure something again waits until nothing else does and the machine is idle.

Where there are remotes, a request is looked up there first (`remote/desk.py`), and what workers
made is offered to them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eagercache.base import structured_trace
from eagercache.base.log import event
from eagercache.base.operators import described_name
from eagercache.service.remote_requests import RemoteDesks, found_response, may_be_remote
from eagercache.service.request import (
    OnDone,
    Request,
    Response,
    cpu_seconds,
    failure_of,
    message,
    note_lost_batch,
)
from eagercache.service.settings import ServiceSettings
from eagercache.service.slots import Slot, Slots
from eagercache.service.worker_process import WorkerLost, WorkerProcess, give_way_to_callers

if TYPE_CHECKING:
    from eagercache.remote.desk import LookedUp

__all__ = ["CompileService", "ServiceSettings", "cpu_seconds"]

log = logging.getLogger("eagercache")
INFO = logging.INFO


# A whole model takes this many times as long as an operator.
MODULE_TIMEOUT_FACTOR = 6

_PAUSE_AFTER_FAILURE = 0.5


class CompileService:
    """Compiles calls in the background. Thread-safe.

    ``compiles`` counts requests that ended with a kernel or a decision made here, ``failures``
    those that failed, ``seconds`` the CPU time that workers spent on them. What is under way when
    the service is closed is answered, but has not failed.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        # Guards everything below.
        self._changed = threading.Condition()
        self._queue: list[Request] = []
        self._order = itertools.count()
        self._unanswered: dict[int, Request] = {}  # by order
        self._cut_off: list[Request] = []  # without an answer but that the service was closed
        self._threads: list[threading.Thread] = []
        self._processes: set[WorkerProcess] = set()
        self._said: set[str] = set()  # warnings that were given
        self._idle = 0
        self._closed = False
        self.left_open: list[Request] = []  # what was unanswered when it was closed
        self._owner = os.getpid()
        self._slots = Slots(
            settings.slots or max(settings.workers, (os.cpu_count() or 2) // 2, 1),
            settings.slots_folder,
        )
        self._remotes = RemoteDesks()
        self.compiles = 0
        self.failures = 0
        self.seconds = 0.0
        atexit.register(self.close)

    @property
    def settings(self) -> ServiceSettings:
        """The settings that the next request gets."""
        return self._settings

    def reconfigure(self, **changes: Any) -> None:
        """Changes fields of the settings for requests submitted from now on."""
        with self._changed:
            self._settings = replace(self._settings, **changes)

    def submit(self, description: dict[str, Any], on_done: OnDone, *, crashes: int = 0) -> None:
        """Queues one call. ``on_done(response)`` is called once, on a thread of the service.

        ``crashes``: workers of an earlier process that were lost over it.

        One that says "again" is measured again, once nothing else is asked for and the machine is
        idle; `wait` does not wait for it.

        Once the service is closed, or in a forked child, it is called at once with a failure.
        """
        why_not = "the compile service is closed"
        inert = os.getpid() != self._owner
        if not inert:
            with self._changed:
                inert = self._closed
                if not inert:
                    settings = self._settings
                    again = "again" in description
                    whole_module = description.get("kind") == "module"
                    if whole_module:
                        timeout = settings.request_timeout * MODULE_TIMEOUT_FACTOR
                        settings = replace(settings, request_timeout=timeout)
                    now = time.monotonic()
                    request = Request(
                        description,
                        on_done,
                        settings,
                        submitted=now,
                        busy_delay=settings.busy_first_delay,
                        order=next(self._order),
                        start=now,
                        crashes=crashes,
                        again=again,
                        alone=whole_module or again or crashes > 0,
                    )
                    if not again:
                        self._unanswered[request.order] = request
        if inert:
            on_done(failure_of(description, why_not, transient=True))
            return
        if may_be_remote(request):
            request.desk = self._remotes.desk_for(settings)
        if request.desk is None:
            self._ask_workers(request)
        else:
            done = functools.partial(self._looked_up, request)
            request.desk.look_up(str(description["digest"]), done)

    def _looked_up(self, request: Request, found: LookedUp) -> None:
        """What remotes said, on a thread of theirs."""
        request.refused_remotely = found.refused
        if found.verdict:
            self._finish(request, found_response(request, found.verdict))
        else:
            self._ask_workers(request)

    def _ask_workers(self, request: Request) -> None:
        """Queues a request for the workers."""
        why_not = ""
        with self._changed:
            if self._closed:
                why_not = "the compile service is closed"
            else:
                self._push(request, delay=request.settings.again_delay if request.again else 0.0)
                if not self._start_thread_locked():
                    why_not = "no thread can be started"
                    self._queue.remove(request)
        if why_not:
            self._finish(request, failure_of(request.description, why_not, transient=True))

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every request is answered; False when ``timeout`` seconds passed first."""
        if os.getpid() != self._owner:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._unanswered, timeout)

    def unanswered(self) -> list[tuple[dict[str, Any], float]]:
        """(description, seconds since it was submitted) of every request without an answer."""
        now = time.monotonic()
        with self._changed:
            return [(one.description, now - one.submitted) for one in self._unanswered.values()]

    def unfinished(self) -> list[dict[str, Any]]:
        """The descriptions of what was asked for and has no answer; once closed, had none then."""
        if os.getpid() != self._owner:
            return []
        with self._changed:
            return [one.description for one in (*self._cut_off, *self._unanswered.values())]

    def remote_counts(self) -> dict[str, Any]:
        """What was asked of remotes: the sums of `RemoteDesk.counts`; empty in a forked child."""
        return self._remotes.counts() if os.getpid() == self._owner else {}

    def close(self, timeout: float = 2.0) -> None:
        """Ends the workers and their compilers. Requests under way are answered with a failure.

        Takes at most ``timeout`` seconds. Calling it again does nothing.
        """
        if os.getpid() != self._owner:
            return
        deadline = time.monotonic() + timeout
        with self._changed:
            if self._closed:
                return
            self._closed = True
            # Copies: to be ended with its worker is no crash of a request.
            self.left_open = [replace(request) for request in self._unanswered.values()]
            processes, threads = list(self._processes), list(self._threads)
            self._changed.notify_all()
        self._remotes.close()
        for process in processes:
            process.kill(wait=0.0)
        current = threading.current_thread()
        for thread in threads:
            if thread is not current:
                thread.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(Exception):
            atexit.unregister(self.close)

    def _push(self, request: Request, delay: float) -> None:
        request.start = time.monotonic() + delay
        self._queue.append(request)
        self._changed.notify()

    def _start_thread_locked(self) -> bool:
        """Whether there is a thread that will serve what is queued."""
        limit = self._settings.workers or max(1, len(os.sched_getaffinity(0)) // 2)
        if self._idle > 0 or len(self._threads) >= limit:
            return True
        thread = threading.Thread(
            target=self._serve, name=f"eagercache-compile-{len(self._threads)}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads and "threads" not in self._said:
                self._said.add("threads")
                log.warning("nothing is compiled now: %s", error)
            return bool(self._threads)
        self._threads.append(thread)
        return True

    def _serve(self) -> None:
        """One thread: one worker, one batch of requests at a time, and never without a slot."""
        give_way_to_callers()
        process: WorkerProcess | None = None
        try:
            while True:
                batch: list[Request] = []
                try:
                    if not self._wait_for_work(process):
                        return
                    slot = self._wait_for_slot()
                    try:
                        batch = self._take_batch(process)
                        process = self._serve_batch(process, batch)
                    finally:
                        slot.release()
                except BaseException as error:  # whoever waits for the batch must not wait for ever
                    process = None
                    self._give_up(batch, error)
        finally:
            if process is not None:
                self._discard(process)

    def _give_up(self, batch: list[Request], error: BaseException) -> None:
        """After what should not happen: ends this thread's worker, answers the batch's requests."""
        log.error("compiling failed as it should not; %d calls stay native for now", len(batch))
        log.debug("the reason:", exc_info=error)
        with self._changed:
            mine = [p for p in self._processes if p.thread == threading.get_ident()]
        for process in mine:
            with contextlib.suppress(Exception):
                self._discard(process)
        reason = f"the compile service failed: {type(error).__name__}: {error}"[:300]
        with self._changed:
            queued = {request.order for request in self._queue}
        for request in batch:
            if not request.answered and request.order not in queued:
                with contextlib.suppress(Exception):
                    self._finish(request, failure_of(request.description, reason, transient=True))
        with self._changed:  # what fails at once does not keep a processor busy
            self._changed.wait_for(lambda: self._closed, _PAUSE_AFTER_FAILURE)

    def _wait_for_slot(self) -> Slot:
        deadline = time.monotonic() + self._settings.slot_timeout
        while True:
            slot = self._slots.try_take()
            if slot is not None:
                return slot
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._settings.slot_delay)
                if self._closed or time.monotonic() > deadline:
                    return Slot(None)

    def _serve_batch(
        self, process: WorkerProcess | None, batch: list[Request]
    ) -> WorkerProcess | None:
        """The worker to go on with."""
        if not batch:
            if process is not None:
                self._discard(process)
            return None
        process = self._ready_process(process, batch[0])
        if len(batch) == 1:
            return self._handle(process, batch[0])
        return self._handle_batch(process, batch)

    def _wait_for_work(self, process: WorkerProcess | None) -> bool:
        """Waits for a request that may start; False once the service is closed.

        Also returns when ``process`` has been idle for too long.
        """
        since = time.monotonic()
        with self._changed:
            self._idle += 1
            try:
                while not self._closed:
                    now = time.monotonic()
                    if self._ready_locked(now):
                        return True
                    limits = [
                        max(one.start - now, self._settings.idle_check if one.again else 0.0)
                        for one in self._queue
                    ]
                    if process is not None:
                        left = since + self._settings.idle_timeout - now
                        if left <= 0:
                            return True
                        limits.append(left)
                    self._changed.wait(min(limits, default=None))
                while self._queue:
                    self._answer_locked(self._queue.pop(), "the compile service is closed")
                return False
            finally:
                self._idle -= 1

    def _ready_locked(self, now: float) -> list[Request]:
        """The requests that may start."""
        due = [request for request in self._queue if request.start <= now]
        ready = [request for request in due if not request.again]
        if ready or not due or self._unanswered or not self._settings.machine_is_idle():
            return ready
        return due[:1]

    def _take_batch(self, process: WorkerProcess | None) -> list[Request]:
        """The most useful requests that may start, to be answered together; perhaps none."""
        with self._changed:
            now = time.monotonic()
            ready = self._ready_locked(now)
            if not ready:
                return []
            ready.sort(key=lambda request: (-request.gain, request.order))
            settings = ready[0].settings
            limit = settings.largest_batch if process and process.served else settings.first_batch
            # Other idle threads get their share.
            limit = max(1, min(limit, -(-len(ready) // (self._idle + 1))))
            if ready[0].alone:
                batch = ready[:1]
            else:
                together = [r for r in ready if not r.alone and r.settings == settings]
                batch = together[:limit]
            for request in batch:
                self._queue.remove(request)
            return batch

    def _answer_locked(self, request: Request, reason: str) -> None:
        self._changed.release()
        try:
            self._finish(request, failure_of(request.description, reason, transient=True))
        finally:
            self._changed.acquire()

    def _ready_process(
        self, process: WorkerProcess | None, request: Request
    ) -> WorkerProcess | None:
        """A live worker, started when there is none; None when it cannot be."""
        if process is not None:
            if process.alive() and process.served < request.settings.requests_per_worker:
                return process
            self._discard(process)
        try:
            process = WorkerProcess(request.settings)
        except Exception as error:  # no memory, no process, no thread, no such program
            if str(error) not in self._said:
                self._said.add(str(error))
                log.warning("the compile worker cannot be started: %s", error)
            return None
        with self._changed:
            self._processes.add(process)
            closed = self._closed
        if closed:
            process.kill()
        return process

    def _discard(self, process: WorkerProcess) -> None:
        process.kill()
        with self._changed:
            self._processes.discard(process)

    def _handle(self, process: WorkerProcess | None, request: Request) -> WorkerProcess | None:
        """Has the request answered or queued again; the worker to go on with."""
        description, settings = request.description, request.settings
        if process is None:
            reason = "the compile worker cannot be started"
            self._finish(request, failure_of(description, reason, transient=True))
            return None
        try:
            response = process.ask(message(request), settings)
        except WorkerLost as lost:
            self._discard(process)
            return self._lost(request, lost)
        self._take_response(request, response)
        return process

    def _handle_batch(
        self, process: WorkerProcess | None, batch: list[Request]
    ) -> WorkerProcess | None:
        """Has every request of the batch answered or queued again."""
        if process is None:
            for request in batch:
                self._handle(None, request)
            return None
        left = dict(enumerate(batch))
        try:
            messages = [message(request) for request in batch]
            for response in process.ask_all(messages, batch[0].settings):
                if response.get("index") in left:
                    self._take_response(left.pop(response["index"]), response)
        except WorkerLost as lost:
            self._discard(process)
            process = None
            note_lost_batch(left, lost)
        with self._changed:
            closed = self._closed
            if not closed:
                for request in left.values():
                    self._push(request, delay=0.0)
        if closed:
            reason = "the compile service is closed"
            for request in left.values():
                self._finish(request, failure_of(request.description, reason, transient=True))
        return process

    def _take_response(self, request: Request, response: Response) -> None:
        if response.get("verdict") == "busy":
            self._busy(request, response)
        else:
            self._finish(request, response)

    def _lost(self, request: Request, lost: WorkerLost) -> WorkerProcess | None:
        with self._changed:
            closed = self._closed
        request.crashes += 1
        # Once may be the machine (out of memory, a stray kill); the second time it is the call.
        if not closed and not lost.timed_out and request.crashes < 2:
            event(
                INFO,
                "worker_lost",
                op=described_name(request.description),
                reason=lost,
                retry="yes",
            )
            with self._changed:
                self._push(request, delay=0.0)
            return None
        transient = closed or lost.transient
        failure = failure_of(request.description, str(lost), transient=transient)
        process = None if closed else self._record(request, failure)
        self._finish(request, failure)
        return process

    def _record(self, request: Request, failure: Response) -> WorkerProcess | None:
        """Has a fresh worker store what the lost one could not."""
        process = self._ready_process(None, request)
        if process is None:
            return None
        try:
            process.ask({**message(request), "record": failure}, request.settings)
        except WorkerLost as lost:
            event(
                INFO, "worker_lost", op=described_name(request.description), reason=lost, retry="no"
            )
            self._discard(process)
            return None
        return process

    def _busy(self, request: Request, response: Response) -> None:
        settings = request.settings
        if time.monotonic() - request.submitted > settings.busy_limit:
            reason = "another process has been compiling this call for too long"
            self._finish(request, failure_of(request.description, reason, transient=True))
            return
        delay = request.busy_delay
        request.busy_delay = min(2 * delay, settings.busy_longest_delay)
        with self._changed:
            self._push(request, delay)

    def _finish(self, request: Request, response: Response) -> None:
        """Counts, logs and delivers one answer."""
        seconds = cpu_seconds(response)
        failed = response.get("verdict") == "failed"
        with self._changed:
            self.seconds += seconds
            if failed and self._closed and response.get("failure") == "transient":
                if not request.again:
                    self._cut_off.append(request)
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
            with self._changed:
                self._unanswered.pop(request.order, None)
                self._changed.notify_all()
