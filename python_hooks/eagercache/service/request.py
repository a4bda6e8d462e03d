"""Requests to the compile service, and what becomes of them."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagercache.base.log import event
from eagercache.base.operators import described_name
from eagercache.base.worker_variables import program_variables
from eagercache.service.settings import ServiceSettings

if TYPE_CHECKING:
    from eagercache.remote.desk import RemoteDesk
    from eagercache.service.worker_process import WorkerLost

Response = dict[str, Any]
OnDone = Callable[[Response], None]

# A request goes on alone once it was in so many batches whose worker was lost over another one.
MOST_LOST_BATCHES = 2


@dataclass
class Request:
    """One request on its way. Times are those of `time.monotonic`."""

    description: dict[str, Any]
    on_done: OnDone
    settings: ServiceSettings
    submitted: float
    busy_delay: float
    order: int
    start: float  # not before this time
    begun: float = 0.0  # when a worker turned to it
    crashes: int = 0
    again: bool = False  # to be measured again, when the machine is idle: nobody waits for it
    alone: bool = False  # not in a batch: one that it was in has failed
    replaced: bool = False  # a worker of its was ended for getting nothing: no other such one
    lost_batches: int = 0  # batches that it was in whose worker was lost
    answered: bool = False  # or about to be
    desk: RemoteDesk | None = None  # where it was looked up in remotes
    refused_remotely: bool = False  # one has an entry that must not be used

    @property
    def gain(self) -> float:
        """What is expected to be won: calls seen x native time."""
        return expected_gain(self.description)


def message(request: Request) -> dict[str, Any]:
    """What a worker is asked."""
    settings = request.settings
    asked = {
        "description": request.description,
        "store_root": settings.store_root,
        "environment": settings.environment,
        "choose": settings.choose,
        "numerics": settings.numerics,
        "margin": settings.margin,
        "search": settings.search,
        "max_bytes": settings.max_bytes,
        "allow_untrusted": settings.allow_untrusted,
        "revoked": settings.revoked,
        "cxx": settings.cxx,
        # A worker that was lost may have been so over another machine's kernel.
        "tries": request.crashes == 0,
    }
    if runs_program_code(request.description):
        asked["variables"] = program_variables(os.environ)
    return asked


def runs_program_code(description: Mapping[str, Any]) -> bool:
    """Whether a worker runs code of the program's to answer, which may ask for its environment."""
    return "function" in description or description.get("kind") == "module"


def cpu_seconds(response: Mapping[str, Any]) -> float:
    """What a worker says that its answer took."""
    # Parts of a step ("compile.link") are in the step.
    return float(
        sum(value for name, value in response.get("seconds", {}).items() if "." not in name)
    )


def note_lost_batch(left: Mapping[int, Request], lost: WorkerLost) -> None:
    """Who of a batch that a worker left unanswered goes on alone: the one that it died of."""
    suspect = left.get(-1 if lost.at is None else lost.at)
    for request in left.values():
        request.lost_batches += 1
        if request is suspect or suspect is None or request.lost_batches >= MOST_LOST_BATCHES:
            request.alone = True
    if suspect is not None and not lost.timed_out:
        suspect.crashes += 1
    event(
        logging.INFO,
        "worker_lost",
        calls=len(left),
        op=described_name(suspect.description) if suspect else None,
        reason=lost,
        retry="one by one" if suspect is None else "that one alone",
    )


def failure_of(description: Mapping[str, Any], reason: str, *, transient: bool) -> Response:
    """The answer to a request that no worker answered."""
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
