"""The threads of a compile service, each with a worker process of its own.

A thread starts its worker, feeds it one batch of requests at a time, and replaces it when it
crashes, hangs or has served long enough.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from typing import Any

from eagercache.base.log import event
from eagercache.base.operators import described_name
from eagercache.service.crew import Crew
from eagercache.service.machine import free_bytes
from eagercache.service.pace import SAMPLE_SECONDS, Pace, cpu_quota, physical_cores
from eagercache.service.request import Request, Response, failure_of, message, note_lost_batch
from eagercache.service.request_queue import RequestQueue
from eagercache.service.slots import Slot, Slots
from eagercache.service.worker_process import WorkerLost, WorkerProcess, give_way_to_callers

log = logging.getLogger("eagercache")
INFO = logging.INFO

_PAUSE_AFTER_FAILURE = 0.5
# On fewer, hardly ever is one left over.
_LEAST_PROCESSORS = 4
# Of memory for each process that compiles beside a worker: it imports torch and Triton.
_COMPILER_BYTES = 1 << 29


class Workers:
    """Threads and workers, of which there are more as requests come. The queue's lock guards it."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self.threads: list[threading.Thread] = []
        self.processes: set[WorkerProcess] = set()
        self._said: set[str] = set()  # warnings that were given
        settings = queue.settings
        self._slots = Slots(
            settings.slots or max(settings.workers, (os.cpu_count() or 2) // 2, 1),
            settings.slots_folder,
        )
        self._serving = 0  # threads that hold a slot
        # Who says how many workers there are to be knows better.
        self._pace = None if settings.workers else Pace(physical_cores(), quota=cpu_quota())
        self._crew = Crew(self._most, self._has_room)

    def _has_room(self) -> bool:
        """Whether a worker that gives way to everybody has its turn, too."""
        many = len(os.sched_getaffinity(0)) >= _LEAST_PROCESSORS
        return many and self._pace is not None and self._pace.has_room()

    def _most(self) -> int:
        """Workers that may run now; none where one always has its turn (`Crew`)."""
        processors = len(os.sched_getaffinity(0))
        most = self._queue.settings.workers or max(1, processors // 2)
        return most if self._pace is None else min(most, self._pace.allowed())

    def start_thread_locked(self) -> bool:
        """Whether there is a thread that will serve what is queued."""
        if self._queue.idle > 0 or len(self.threads) >= max(1, self._most()):
            return True
        thread = threading.Thread(
            target=self._serve, name=f"eagercache-compile-{len(self.threads)}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            if not self.threads and "threads" not in self._said:
                self._said.add("threads")
                log.warning("nothing is compiled now: %s", error)
            return bool(self.threads)
        self.threads.append(thread)
        return True

    def _serve(self) -> None:
        """One thread: one worker, one batch of requests at a time, and never without a slot."""
        give_way_to_callers()
        process: WorkerProcess | None = None
        try:
            while True:
                batch: list[Request] = []
                try:
                    if not self._queue.wait_for_work(process):
                        return
                    slot = self._wait_for_slot()
                    if slot is None:
                        process = self._serve_batch(process, [])
                        continue
                    try:
                        batch = self._queue.take_batch(process)
                        process = self._serve_batch(process, batch)
                    finally:
                        self._release(slot)
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
        with self._queue.changed:
            mine = [p for p in self.processes if p.thread == threading.get_ident()]
        for process in mine:
            with contextlib.suppress(Exception):
                self._discard(process)
        reason = f"the compile service failed: {type(error).__name__}: {error}"[:300]
        with self._queue.changed:
            queued = {request.order for request in self._queue.waiting}
        for request in batch:
            if not request.answered and request.order not in queued:
                with contextlib.suppress(Exception):
                    self._queue.finish(
                        request, failure_of(request.description, reason, transient=True)
                    )
        with self._queue.changed:  # what fails at once does not keep a processor busy
            self._queue.changed.wait_for(lambda: self._queue.closed, _PAUSE_AFTER_FAILURE)

    def _wait_for_slot(self) -> Slot | None:
        """None where others serve, and the program has had use for the processors for too long."""
        deadline = time.monotonic() + self._queue.settings.slot_timeout
        while True:
            allowed = self._begin_serving()
            slot = self._slots.try_take() if allowed else None
            if slot is not None:
                return slot
            if allowed:
                self._end_serving()
            delay = self._queue.settings.slot_delay if allowed else SAMPLE_SECONDS
            with self._queue.changed:
                self._queue.changed.wait_for(lambda: self._queue.closed, delay)
                late = self._queue.closed or time.monotonic() > deadline
            if late:
                return Slot(None) if self._begin_serving() else None

    def _begin_serving(self) -> bool:
        """Whether one worker more may run now; it is counted then."""
        most = max(1, self._most())
        with self._queue.changed:
            if self._serving >= most and not self._queue.closed:
                return False
            self._serving += 1
            return True

    def _end_serving(self) -> None:
        with self._queue.changed:
            self._serving -= 1

    def _release(self, slot: Slot) -> None:
        slot.release()
        self._end_serving()

    def _serve_batch(
        self, process: WorkerProcess | None, batch: list[Request]
    ) -> WorkerProcess | None:
        """The worker to go on with."""
        if not batch:
            if process is not None:
                self._discard(process)
            return None
        process = self._ready_process(process, batch[0])
        with self._crew.at_work(process) if process is not None else contextlib.nullcontext():
            if len(batch) == 1:
                return self._handle(process, batch[0])
            return self._handle_batch(process, batch)

    def _ready_process(
        self, process: WorkerProcess | None, request: Request
    ) -> WorkerProcess | None:
        """A live worker, started when there is none; None when it cannot be."""
        if process is not None:
            if process.alive() and process.served < request.settings.requests_per_worker:
                process.be_nice(request.settings)
                return process
            self._discard(process)
        try:
            settings = request.settings
            gives_way = self._has_room() and not request.replaced and not settings.awaited
            process = WorkerProcess(settings, gives_way=gives_way)
        except Exception as error:  # no memory, no process, no thread, no such program
            if str(error) not in self._said:
                self._said.add(str(error))
                log.warning("the compile worker cannot be started: %s", error)
            return None
        with self._queue.changed:
            self.processes.add(process)
            closed = self._queue.closed
        if closed:
            process.kill()
        return process

    def _discard(self, process: WorkerProcess) -> None:
        process.kill()
        with self._queue.changed:
            self.processes.discard(process)

    def _handle(self, process: WorkerProcess | None, request: Request) -> WorkerProcess | None:
        """Has the request answered or queued again; the worker to go on with."""
        description, settings = request.description, request.settings
        if process is None:
            reason = "the compile worker cannot be started"
            self._queue.finish(request, failure_of(description, reason, transient=True))
            return None
        try:
            response = process.ask(self._message(request), settings)
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
            messages = [self._message(request) for request in batch]
            for response in process.ask_all(messages, batch[0].settings):
                if response.get("index") in left:
                    self._take_response(left.pop(response["index"]), response)
                    for request in itertools.islice(left.values(), 1):
                        request.begun = time.monotonic()  # the worker takes it now
        except WorkerLost as lost:
            self._discard(process)
            process = None
            if not lost.replaced:
                note_lost_batch(left, lost)
            for request in left.values():
                request.replaced = request.replaced or lost.replaced
        with self._queue.changed:
            closed = self._queue.closed
            if not closed:
                for request in left.values():
                    self._queue.push(request, delay=0.0)
        if closed:
            reason = "the compile service is closed"
            for request in left.values():
                self._queue.finish(request, failure_of(request.description, reason, transient=True))
        return process

    def _message(self, request: Request) -> dict[str, Any]:
        is_module = request.description.get("kind") == "module"
        if self._pace is not None and is_module and request.settings.gpu is not None:
            # Its Triton kernels are hundreds. The worker imports torch meanwhile.
            self._pace.wait_until_known()
        # What compiles beside the worker counts as it does, and is of its kind.
        left_over = self._pace.left_over() if self._pace is not None and self._has_room() else 0
        left_over = min(left_over, free_bytes() // _COMPILER_BYTES)
        return {**message(request), "processors": max(1, self._most()), "left_over": left_over}

    def _take_response(self, request: Request, response: Response) -> None:
        if response.get("verdict") == "busy":
            self._busy(request, response)
        else:
            self._queue.finish(request, response)

    def _lost(self, request: Request, lost: WorkerLost) -> WorkerProcess | None:
        with self._queue.changed:
            closed = self._queue.closed
            if lost.replaced and not closed:
                request.replaced = True
                self._queue.push(request, delay=0.0)
                return None
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
            with self._queue.changed:
                self._queue.push(request, delay=0.0)
            return None
        transient = closed or lost.transient
        failure = failure_of(request.description, str(lost), transient=transient)
        process = None if closed else self._record(request, failure)
        self._queue.finish(request, failure)
        return process

    def _record(self, request: Request, failure: Response) -> WorkerProcess | None:
        """Has a fresh worker store what the lost one could not."""
        process = self._ready_process(None, request)
        if process is None:
            return None
        try:
            with self._crew.at_work(process):
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
            self._queue.finish(request, failure_of(request.description, reason, transient=True))
            return
        delay = request.busy_delay
        request.busy_delay = min(2 * delay, settings.busy_longest_delay)
        with self._queue.changed:
            self._queue.push(request, delay)
