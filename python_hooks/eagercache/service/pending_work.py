"""Going on with pending requests: what the lingering process and `eagercache warm` both do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from eagercache.base.operators import described_name
from eagercache.service.pending import MOST_ATTEMPTS, PendingFolder, PendingRequest
from eagercache.service.request import Response
from eagercache.service.service import CompileService

_SLICE_SECONDS = 0.1


class Entries(Protocol):
    """As much of a store as is asked here."""

    def find(self, digest: str, /) -> Any:
        """The entry, or None."""


@dataclass
class Outcome:
    """What became of one request."""

    name: str
    verdict: str  # "kernel", "native" or "failed"
    reason: str = ""
    transient: bool = False  # a failure that another run may mend


class PendingWork:
    """The pending requests of one environment on their way through a service.

    ``total``, ``done`` and ``now`` may be read while `run` is under way.
    """

    def __init__(
        self,
        folder: PendingFolder,
        environment: str,
        store: Entries,
        service_for: Callable[[str], CompileService],
    ) -> None:
        """``service_for`` makes the service for a GPU, by its UUID, and for the CPU, by ""."""
        self._folder = folder
        self._environment = environment
        self._store = store
        self._service_for = service_for
        self._services: dict[str, CompileService] = {}  # by device
        self._tried: set[str] = set()
        self._open: dict[str, PendingRequest] = {}  # begun and without an answer
        self._closed = False
        self._began = time.monotonic()
        self.outcomes: list[Outcome] = []
        self.total = 0
        self.now = ""  # an operator that is being compiled

    @property
    def done(self) -> int:
        """Requests that were answered."""
        return len(self.outcomes)

    def seconds_left(self) -> float:
        """Until the end, as far as can be told."""
        left = max(0, self.total - self.done)
        return left * (time.monotonic() - self._began) / self.done if self.done else 2.0 * left

    def left(self) -> list[PendingRequest]:
        """What is to be done; what the store has a verdict on by now is forgotten."""
        found = []
        for request in self._folder.read(self._environment):
            if request.name in self._tried:
                continue
            if self._store.find(request.digest) is not None:
                self._folder.remove(request.name)
            else:
                found.append(request)
        self.total = self.done + len(found)
        return found

    def run(
        self,
        choose: Callable[[list[PendingRequest]], list[PendingRequest]],
        over: Callable[[], bool],
    ) -> bool:
        """Goes through the requests in groups; whether nothing is left.

        ``choose`` is given what is left, the most useful first, and says what comes next, all for
        one device. It may wait. Nothing from it, or True from ``over``, ends the work. The services
        are closed then: what was begun is not finished.
        """
        while left := self.left():
            group = choose(left)
            if not group:
                return False
            service = self.service(group[0].gpu)
            for request in group:
                self._submit(request, service)
            while not service.wait(_SLICE_SECONDS):
                if over():
                    return False
        return True

    def service(self, gpu: str) -> CompileService:
        """The service for a device, which is made once."""
        if gpu not in self._services:
            self._services[gpu] = self._service_for(gpu)
        return self._services[gpu]

    def workers_on(self, gpu: str) -> set[int]:
        """The process groups of the workers that are on a GPU."""
        service = self._services.get(gpu)
        return service.worker_groups() if service is not None else set()

    def leave(self, gpu: str) -> None:
        """Ends the workers on a GPU at once. What they were at counts as not begun."""
        service = self._services.pop(gpu, None)
        if service is None:
            return
        for request in [one for one in self._open.values() if one.gpu == gpu]:
            if self._open.pop(request.name, None) is not None:  # not answered meanwhile
                self._folder.put_back(request)
                self._tried.discard(request.name)
        service.close()

    def close(self, *, asked: bool) -> None:
        """Ends what is under way. ``asked``: by somebody, so that it is no attempt that failed."""
        self._closed = True
        for service in self._services.values():
            service.close()
        for request in self._open.values():
            if asked:
                self._folder.put_back(request)
            elif request.attempts >= MOST_ATTEMPTS:
                self._folder.remove(request.name)

    def _submit(self, request: PendingRequest, service: CompileService) -> None:
        begun = self._folder.begin(request)
        self._tried.add(request.name)
        self._open[request.name] = begun
        self.now = described_name(begun.description)
        service.reconfigure(choose=request.choose, numerics=request.numerics, margin=request.margin)
        service.submit(
            dict(request.description),
            lambda response: self._answered(begun, response),
            crashes=request.crashes,
        )

    def _answered(self, request: PendingRequest, response: Response) -> None:
        """On a thread of the service."""
        if self._closed or self._open.pop(request.name, None) is None:
            return  # it was put back
        verdict = str(response.get("verdict", "failed"))
        passing = verdict == "failed" and response.get("failure") == "transient"
        if not passing or request.attempts >= MOST_ATTEMPTS:
            self._folder.remove(request.name)
        self.outcomes.append(
            Outcome(
                described_name(request.description),
                verdict,
                str(response.get("reason", "")),
                passing,
            )
        )
