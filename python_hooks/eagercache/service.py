"""The compile service of a user's process: a queue, and worker processes that answer it.

`submit` never blocks on a compile. Each worker belongs to one thread of ours, which starts it,
feeds it one request at a time, and replaces it when it crashes, hangs or has served long enough.
Threads and workers start with the first request. After a fork the child's copy does nothing.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .choices import WORKER_VARIABLE
from .log import event
from .operators import described_name
from .slots import Slot, Slots

log = logging.getLogger("eagercache")
INFO, DEBUG = logging.INFO, logging.DEBUG

Response = dict[str, Any]
OnDone = Callable[[Response], None]

# Not resolved: in a build tree the modules are links, and the extension module lies beside those.
_PACKAGE_PARENT = Path(__file__).absolute().parent.parent

# Removed from a worker's environment: code that would be loaded into it, and settings of the user's
# own threads. The thread count of a call comes with the call.
_DROPPED_VARIABLES = (
    "KMP_AFFINITY",
    "LD_AUDIT",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTHONINSPECT",
    "PYTHONSTARTUP",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",  # graphs, with which device time is measured, need the cache
    "TORCH_LOGS",
    "TORCH_TRACE",
)


# A whole model takes this many times as long as an operator.
MODULE_TIMEOUT_FACTOR = 6


@dataclass(frozen=True)
class ServiceSettings:
    """What the service needs to know. Seconds throughout.

    ``workers`` and ``slots`` of 0 mean half the cores, ``memory_bytes`` of 0 half of the machine's
    memory for each of a worker's processes. ``slots_folder`` None is the machine's own.
    ``python`` and ``worker_arguments`` exist for tests.
    """

    store_root: str
    environment: str
    choose: str = "faster"
    numerics: str = "accurate"
    margin: float = 0.03
    max_bytes: int = 10 << 30
    workers: int = 0
    slots: int = 0
    memory_bytes: int = 0
    slots_folder: Path | None = None
    cxx: str | None = None
    request_timeout: float = 300.0
    start_timeout: float = 120.0
    requests_per_worker: int = 500
    largest_batch: int = 16  # requests whose kernels are built together
    first_batch: int = 4  # the same for a worker's first, which somebody may be looking at
    idle_timeout: float = 60.0  # a worker that has nothing to do for so long is ended
    slot_delay: float = 0.25  # between attempts to get a slot
    slot_timeout: float = 120.0  # then without one: its holder may be stopped
    busy_first_delay: float = 0.5
    busy_longest_delay: float = 8.0
    busy_limit: float = 600.0
    gpu: int | None = None  # the only one that workers see, by this process's count
    python: str = sys.executable
    worker_arguments: tuple[str, ...] = ("-m", "eagercache.worker")
    extra_environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Request:
    description: dict[str, Any]
    on_done: OnDone
    settings: ServiceSettings
    submitted: float
    busy_delay: float
    order: int
    start: float  # not before this time
    crashes: int = 0
    alone: bool = False  # not in a batch: one that it was in has failed

    @property
    def gain(self) -> float:
        """What is expected to be won: calls seen x native time."""
        return expected_gain(self.description)


class _WorkerLost(Exception):
    """The worker is gone. ``timed_out`` when we ended it."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class CompileService:
    """Compiles calls in the background. Thread-safe.

    ``compiles`` counts requests that ended with a kernel or a decision made here, ``failures``
    those that failed, ``seconds`` the CPU time that workers spent on them.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        # Guards everything below.
        self._changed = threading.Condition()
        self._queue: list[_Request] = []
        self._order = itertools.count()
        self._unanswered: dict[int, _Request] = {}  # by order
        self._threads: list[threading.Thread] = []
        self._processes: set[_WorkerProcess] = set()
        self._idle = 0
        self._closed = False
        self._owner = os.getpid()
        self._slots = Slots(
            settings.slots or max(settings.workers, (os.cpu_count() or 2) // 2, 1),
            settings.slots_folder,
        )
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

    def submit(self, description: dict[str, Any], on_done: OnDone) -> None:
        """Queues one call. ``on_done(response)`` is called once, on a thread of the service.

        Once the service is closed, or in a forked child, it is called at once with a failure.
        """
        inert = os.getpid() != self._owner
        if not inert:
            with self._changed:
                inert = self._closed
                if not inert:
                    settings = self._settings
                    whole_module = description.get("kind") == "module"
                    if whole_module:
                        timeout = settings.request_timeout * MODULE_TIMEOUT_FACTOR
                        settings = replace(settings, request_timeout=timeout)
                    now = time.monotonic()
                    request = _Request(
                        description,
                        on_done,
                        settings,
                        submitted=now,
                        busy_delay=settings.busy_first_delay,
                        order=next(self._order),
                        start=now,
                        alone=whole_module,
                    )
                    self._unanswered[request.order] = request
                    self._push(request, delay=0.0)
                    self._start_thread_locked()
        if inert:
            on_done(_failure(description, "the compile service is closed", transient=True))

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
            processes, threads = list(self._processes), list(self._threads)
            self._changed.notify_all()
        for process in processes:
            process.kill(wait=0.0)
        current = threading.current_thread()
        for thread in threads:
            if thread is not current:
                thread.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(Exception):
            atexit.unregister(self.close)

    def _push(self, request: _Request, delay: float) -> None:
        request.start = time.monotonic() + delay
        self._queue.append(request)
        self._changed.notify()

    def _start_thread_locked(self) -> None:
        limit = self._settings.workers or max(1, len(os.sched_getaffinity(0)) // 2)
        if self._idle > 0 or len(self._threads) >= limit:
            return
        thread = threading.Thread(
            target=self._serve, name=f"eagercache-compile-{len(self._threads)}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """One thread: one worker, one batch of requests at a time, and never without a slot."""
        process: _WorkerProcess | None = None
        try:
            while self._wait_for_work(process):
                slot = self._wait_for_slot()
                try:
                    process = self._serve_batch(process, self._take_batch(process))
                finally:
                    slot.release()
        finally:
            if process is not None:
                self._discard(process)

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
        self, process: _WorkerProcess | None, batch: list[_Request]
    ) -> _WorkerProcess | None:
        """The worker to go on with."""
        if not batch:
            if process is not None:
                self._discard(process)
            return None
        process = self._ready_process(process, batch[0])
        if len(batch) == 1:
            return self._handle(process, batch[0])
        return self._handle_batch(process, batch)

    def _wait_for_work(self, process: _WorkerProcess | None) -> bool:
        """Waits for a request that may start; False once the service is closed.

        Also returns when ``process`` has been idle for too long.
        """
        since = time.monotonic()
        with self._changed:
            self._idle += 1
            try:
                while not self._closed:
                    now = time.monotonic()
                    soonest = min((request.start for request in self._queue), default=None)
                    if soonest is not None and soonest <= now:
                        return True
                    limits = [] if soonest is None else [soonest - now]
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

    def _take_batch(self, process: _WorkerProcess | None) -> list[_Request]:
        """The most useful requests that may start, to be answered together; perhaps none."""
        with self._changed:
            now = time.monotonic()
            ready = [request for request in self._queue if request.start <= now]
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

    def _answer_locked(self, request: _Request, reason: str) -> None:
        self._changed.release()
        try:
            self._finish(request, _failure(request.description, reason, transient=True))
        finally:
            self._changed.acquire()

    def _ready_process(
        self, process: _WorkerProcess | None, request: _Request
    ) -> _WorkerProcess | None:
        """A live worker, started when there is none; None when it cannot be."""
        if process is not None:
            if process.alive() and process.served < request.settings.requests_per_worker:
                return process
            self._discard(process)
        try:
            process = _WorkerProcess(request.settings)
        except OSError as error:
            log.warning("the compile worker cannot be started: %s", error)
            return None
        with self._changed:
            self._processes.add(process)
            closed = self._closed
        if closed:
            process.kill()
        return process

    def _discard(self, process: _WorkerProcess) -> None:
        process.kill()
        with self._changed:
            self._processes.discard(process)

    def _handle(self, process: _WorkerProcess | None, request: _Request) -> _WorkerProcess | None:
        """Has the request answered or queued again; the worker to go on with."""
        description, settings = request.description, request.settings
        if process is None:
            reason = "the compile worker cannot be started"
            self._finish(request, _failure(description, reason, transient=True))
            return None
        try:
            response = process.ask(_message(request), settings)
        except _WorkerLost as lost:
            self._discard(process)
            return self._lost(request, lost)
        self._take_response(request, response)
        return process

    def _handle_batch(
        self, process: _WorkerProcess | None, batch: list[_Request]
    ) -> _WorkerProcess | None:
        """Has every request of the batch answered or queued again."""
        if process is None:
            for request in batch:
                self._handle(None, request)
            return None
        left = dict(enumerate(batch))
        try:
            messages = [_message(request) for request in batch]
            for response in process.ask_all(messages, batch[0].settings):
                if response.get("index") in left:
                    self._take_response(left.pop(response["index"]), response)
        except _WorkerLost as lost:
            self._discard(process)
            process = None
            event(INFO, "worker_lost", calls=len(left), reason=lost, retry="one by one")
        with self._changed:
            closed = self._closed
            if not closed:
                for request in left.values():
                    request.alone = True
                    self._push(request, delay=0.0)
        if closed:
            reason = "the compile service is closed"
            for request in left.values():
                self._finish(request, _failure(request.description, reason, transient=True))
        return process

    def _take_response(self, request: _Request, response: Response) -> None:
        if response.get("verdict") == "busy":
            self._busy(request, response)
        else:
            self._finish(request, response)

    def _lost(self, request: _Request, lost: _WorkerLost) -> _WorkerProcess | None:
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
        transient = closed or lost.timed_out
        failure = _failure(request.description, str(lost), transient=transient)
        process = None if closed else self._record(request, failure)
        self._finish(request, failure)
        return process

    def _record(self, request: _Request, failure: Response) -> _WorkerProcess | None:
        """Has a fresh worker store what the lost one could not."""
        process = self._ready_process(None, request)
        if process is None:
            return None
        try:
            process.ask({**_message(request), "record": failure}, request.settings)
        except _WorkerLost as lost:
            event(
                INFO, "worker_lost", op=described_name(request.description), reason=lost, retry="no"
            )
            self._discard(process)
            return None
        return process

    def _busy(self, request: _Request, response: Response) -> None:
        settings = request.settings
        if time.monotonic() - request.submitted > settings.busy_limit:
            reason = "another process has been compiling this call for too long"
            self._finish(request, _failure(request.description, reason, transient=True))
            return
        delay = request.busy_delay
        request.busy_delay = min(2 * delay, settings.busy_longest_delay)
        with self._changed:
            self._push(request, delay)

    def _finish(self, request: _Request, response: Response) -> None:
        """Counts, logs and delivers one answer."""
        seconds = cpu_seconds(response)
        failed = response.get("verdict") == "failed"
        with self._changed:
            self.seconds += seconds
            if failed:
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
        try:
            request.on_done(response)
        except Exception:
            log.exception(
                "delivering the verdict on %s failed", described_name(request.description)
            )
        finally:
            with self._changed:
                self._unanswered.pop(request.order, None)
                self._changed.notify_all()


def _default_memory() -> int:
    """Half of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _message(request: _Request) -> dict[str, Any]:
    settings = request.settings
    return {
        "description": request.description,
        "store_root": settings.store_root,
        "environment": settings.environment,
        "choose": settings.choose,
        "numerics": settings.numerics,
        "margin": settings.margin,
        "max_bytes": settings.max_bytes,
        "cxx": settings.cxx,
    }


def cpu_seconds(response: Mapping[str, Any]) -> float:
    """What a worker says that its answer took."""
    # Parts of a step ("compile.link") are in the step.
    return float(
        sum(value for name, value in response.get("seconds", {}).items() if "." not in name)
    )


def _failure(description: Mapping[str, Any], reason: str, *, transient: bool) -> Response:
    return {
        "id": description.get("id"),
        "digest": description.get("digest"),
        "verdict": "failed",
        "reason": reason,
        "failure": "transient" if transient else "deterministic",
        "found": False,
        "seconds": {},
    }


def expected_gain(description: Mapping[str, Any]) -> float:
    """Calls seen x native time, in nanoseconds.

    The time is the one that came with the request, else estimated by what the tensors hold.
    """
    native_ns = description.get("native_ns")
    if native_ns is None:
        size = sum(map(math.prod, tensor_sizes(description.get("args", ()))))
        native_ns = _CALL_NS + size * _ELEMENT_NS
    return float(description.get("calls", 1)) * float(native_ns)


# A guess that only orders the queue: a call, and an element of any dtype on one core.
_CALL_NS = 1_000.0
_ELEMENT_NS = 0.5


def tensor_sizes(arguments: Iterable[Mapping[str, Any]]) -> Iterator[Sequence[int]]:
    """The sizes of every tensor among described arguments."""
    for argument in arguments:
        if argument.get("kind") == "tensor":
            yield argument["sizes"]
        elif argument.get("kind") == "tensor_list":
            yield from tensor_sizes(argument["elements"])


def worker_environment(settings: ServiceSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that a worker starts with."""
    from .environment import worker_variables

    kept = {
        name: value
        for name, value in worker_variables(environ).items()
        if name not in _DROPPED_VARIABLES and not name.startswith("EAGERCACHE_")
    }
    paths = [str(_PACKAGE_PARENT), *filter(None, [environ.get("PYTHONPATH")])]
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    kept[WORKER_VARIABLE] = "1"
    kept["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # CPU calls need no CUDA context.
    kept["CUDA_VISIBLE_DEVICES"] = (
        "" if settings.gpu is None else _gpu_name(settings.gpu, environ.get("CUDA_VISIBLE_DEVICES"))
    )
    kept.update(settings.extra_environment)
    return kept


def _gpu_name(index: int, visible: str | None) -> str:
    """How CUDA_VISIBLE_DEVICES names what is GPU ``index`` in a process where it is ``visible``."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    return names[index] if index < len(names) else str(index)


class _WorkerProcess:
    """One running worker. `ask` belongs to one thread; `kill` may be called from any."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.served = 0
        self._ready = False
        self._ending = threading.Lock()  # guards _ended
        self._ended = False
        self._last_lines: collections.deque[str] = collections.deque(maxlen=20)
        # A session of its own: Ctrl-C in the terminal does not reach it, and one signal ends it
        # together with its compilers. exec'ed, never a fork of this (threaded) process.
        self._process = subprocess.Popen(
            [
                settings.python,
                *settings.worker_arguments,
                str(settings.memory_bytes or _default_memory()),
                str(os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=worker_environment(settings, os.environ),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        # Without a buffer, in which a second frame would lie where `select` does not see it.
        self._answers: Any = open(self._process.stdout.fileno(), "rb", 0, closefd=False)  # noqa: SIM115
        self._reader = threading.Thread(
            target=self._read_errors, name="eagercache-worker-log", daemon=True
        )
        self._reader.start()
        event(INFO, "worker_start", pid=self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], settings: ServiceSettings) -> Response:
        """The worker's response. Raises _WorkerLost when it dies or takes too long."""
        (response,) = self._exchange(request, 1, settings)
        return response

    def ask_all(
        self, requests: Sequence[Mapping[str, Any]], settings: ServiceSettings
    ) -> Iterator[Response]:
        """The responses to a batch as they come, each with the "index" of its request."""
        return self._exchange({"batch": requests}, len(requests), settings)

    def _exchange(
        self, frame: Mapping[str, Any], count: int, settings: ServiceSettings
    ) -> Iterator[Response]:
        from .worker import write_frame

        stdin = self._process.stdin
        assert stdin is not None
        try:
            if not self._ready:
                self._read(settings.start_timeout, "start")
                self._ready = True
            write_frame(stdin, frame)
            for _ in range(count):
                response = self._read(settings.request_timeout, "answer")
                self.served += 1
                yield response
        except (OSError, ValueError) as error:
            raise _WorkerLost(self._obituary()) from error

    def _read(self, timeout: float, what: str) -> Response:
        """One frame. The worker writes frames whole, so that only their beginning is waited for."""
        from .worker import read_frame

        ready, _, _ = select.select([self._answers.fileno()], [], [], timeout)
        if not ready:
            self.kill()
            raise _WorkerLost(
                f"the compile worker did not {what} within {timeout:.0f} s", timed_out=True
            )
        frame = read_frame(self._answers)
        if frame is None:
            raise _WorkerLost(self._obituary())
        return frame

    def _obituary(self) -> str:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "the compile worker closed its output"
        self._reader.join(1.0)
        last = next((line for line in reversed(self._last_lines) if line), "")
        if code < 0:
            return f"the compile worker was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"the compile worker exited with {code}: {last[:200]}"

    def _read_errors(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for raw in stderr:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                event(DEBUG, "worker_said", pid=self._process.pid, text=line)

    def kill(self, wait: float = 1.0) -> None:
        """Ends the worker's whole process group, once; waits up to ``wait`` seconds for it."""
        with self._ending:
            if not self._ended:
                # Only the first time: later the number may be another group's.
                self._ended = True
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)
