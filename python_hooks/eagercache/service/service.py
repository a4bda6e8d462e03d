"""The compile service of a user's process: a queue, and worker processes that answer it.

`submit` never blocks on a compile. Each worker belongs to one thread of ours (`workers.py`).
Threads and workers start with the first request. After a fork the child's copy does nothing.

Whatever goes wrong here, every request is answered: somebody may be waiting.

Where there are remotes, a request is looked up there first (`remote/desk.py`), and what workers
made is offered to them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eagercache.service.remote_requests import RemoteDesks, found_response, may_be_remote
from eagercache.service.request import OnDone, Request, failure_of
from eagercache.service.request_queue import Answer, RequestQueue
from eagercache.service.settings import ServiceSettings
from eagercache.service.workers import Workers

if TYPE_CHECKING:
    from eagercache.remote.desk import LookedUp

# A whole model takes this many times as long as an operator.
MODULE_TIMEOUT_FACTOR = 6
# Requests that wait for the program's end, and what they may hold: a module's may be megabytes.
MOST_FOR_LATER = 256
MOST_LATER_BYTES = 16 << 20


def _ignore(_: Any) -> None:
    """Nobody waits for the answer."""


def _size(request: Request) -> int:
    return len(request.description.get("payload", ""))


class CompileService:
    """Compiles calls in the background. Thread-safe.

    ``compiles`` counts requests that ended with a kernel or a decision made here, ``failures``
    those that failed, ``seconds`` the CPU time that workers spent on them; `answers` has the latest
    of them one by one. What is under way when the service is closed is answered, but has not
    failed.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._queue = RequestQueue(settings)
        self._workers = Workers(self._queue)
        self._order = itertools.count()
        self.left_open: list[Request] = []  # what was unanswered when it was closed, or for later
        self._for_later: dict[str, Request] = {}  # by digest
        self._owner = os.getpid()
        self._remotes = RemoteDesks()
        atexit.register(self.close)

    @property
    def compiles(self) -> int:
        """Requests that ended with a kernel or a decision made here."""
        return self._queue.compiles

    @property
    def failures(self) -> int:
        """Requests that failed."""
        return self._queue.failures

    @property
    def seconds(self) -> float:
        """CPU time that workers spent."""
        return self._queue.seconds

    def answers(self) -> list[Answer]:
        """What became of the latest requests, in the order in which they ended."""
        with self._queue.changed:
            return list(self._queue.answers)

    @property
    def settings(self) -> ServiceSettings:
        """The settings that the next request gets."""
        return self._queue.settings

    def reconfigure(self, **changes: Any) -> None:
        """Changes fields of the settings for requests submitted from now on."""
        with self._queue.changed:
            self._queue.settings = replace(self._queue.settings, **changes)

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
            with self._queue.changed:
                inert = self._queue.closed
                if not inert:
                    request = self._request_locked(description, on_done, crashes)
                    if not request.again:
                        self._queue.unanswered[request.order] = request
        if inert:
            on_done(failure_of(description, why_not, transient=True))
            return
        if may_be_remote(request):
            request.desk = self._remotes.desk_for(request.settings)
        if request.desk is None:
            self._ask_workers(request)
        else:
            done = functools.partial(self._looked_up, request)
            request.desk.look_up(str(description["digest"]), done)

    def keep_for_later(self, description: dict[str, Any]) -> None:
        """Takes what cannot be compiled beside this program: it is `left_open` at the end.

        Of too many those go of which least is expected.
        """
        if os.getpid() != self._owner or "again" in description:
            return
        with self._queue.changed:
            if self._queue.closed:
                return
            request = self._request_locked(description, _ignore, 0)
            self._for_later[str(description["digest"])] = request
            kept = self._for_later
            while len(kept) > MOST_FOR_LATER or sum(map(_size, kept.values())) > MOST_LATER_BYTES:
                del kept[min(kept, key=lambda key: kept[key].gain)]

    def _request_locked(
        self, description: dict[str, Any], on_done: OnDone, crashes: int
    ) -> Request:
        settings = self._queue.settings
        again, whole_module = "again" in description, description.get("kind") == "module"
        if whole_module:
            timeout = settings.request_timeout * MODULE_TIMEOUT_FACTOR
            settings = replace(settings, request_timeout=timeout)
        now = time.monotonic()
        return Request(
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

    def _looked_up(self, request: Request, found: LookedUp) -> None:
        """What remotes said, on a thread of theirs."""
        request.refused_remotely = found.refused
        if found.verdict:
            self._queue.finish(request, found_response(request, found.verdict))
        else:
            self._ask_workers(request)

    def _ask_workers(self, request: Request) -> None:
        """Queues a request for the workers."""
        why_not = ""
        with self._queue.changed:
            if self._queue.closed:
                why_not = "the compile service is closed"
            else:
                self._queue.push(
                    request, delay=request.settings.again_delay if request.again else 0.0
                )
                if not self._workers.start_thread_locked():
                    why_not = "no thread can be started"
                    self._queue.waiting.remove(request)
        if why_not:
            self._queue.finish(request, failure_of(request.description, why_not, transient=True))

    def worker_groups(self) -> set[int]:
        """The process groups of its workers and what these started."""
        with self._queue.changed:
            return {process.pid for process in self._workers.processes}

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every request is answered; False when ``timeout`` seconds passed first."""
        if os.getpid() != self._owner:
            return True
        with self._queue.changed:
            return self._queue.changed.wait_for(lambda: not self._queue.unanswered, timeout)

    def unanswered(self) -> list[tuple[dict[str, Any], float]]:
        """(description, seconds since it was submitted) of every request without an answer."""
        now = time.monotonic()
        with self._queue.changed:
            return [
                (one.description, now - one.submitted) for one in self._queue.unanswered.values()
            ]

    def unfinished(self) -> list[dict[str, Any]]:
        """The descriptions of what was asked for and has no answer; once closed, had none then."""
        if os.getpid() != self._owner:
            return []
        with self._queue.changed:
            return [
                one.description for one in (*self._queue.cut_off, *self._queue.unanswered.values())
            ]

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
        with self._queue.changed:
            if self._queue.closed:
                return
            self._queue.closed = True
            # Copies: to be ended with its worker is no crash of a request.
            kept = (*self._queue.unanswered.values(), *self._for_later.values())
            self.left_open = [replace(request) for request in kept]
            processes, threads = list(self._workers.processes), list(self._workers.threads)
            self._queue.changed.notify_all()
        self._remotes.close()
        for process in processes:
            process.kill(wait=0.0)
        current = threading.current_thread()
        for thread in threads:
            if thread is not current:
                thread.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(Exception):
            atexit.unregister(self.close)
