"""What becomes of a request: a kernel, native, or a failure, and what is said of an error."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagercache.base.trouble import causes, is_passing
from eagercache.calls.numerics import CannotProve, ProofFailed, is_out_of_memory
from eagercache.calls.texts import first_line, named_line
from eagercache.worker.inductor.commands import CompileFailed

if TYPE_CHECKING:
    from eagercache.worker.inductor.compile import Lowered
    from eagercache.worker.modules.compile import ModuleResult
    from eagercache.worker.timing.timing import Timing
    from eagercache.worker.validation.validate import Proof


@dataclass
class Outcome:
    """What became of one request, before it is published."""

    verdict: str  # "kernel", "native", "failed" or "busy"
    reason: str = ""
    transient: bool = False
    of_imports: bool = False  # the worker found no module of the program: told, and not stored
    refused: bool = False  # the operator's function can have no kernel at all, for `reason`
    kernel: Built | None = None
    module: ModuleResult | None = None
    proof: Proof | None = None
    timing: Timing | None = None
    published: bool = False  # somebody else's entry was found
    facts: dict[str, str] = field(default_factory=dict)  # more for the manifest


class Failure(Exception):
    """Ends a request. ``transient``: may be tried again later."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(reason)
        self.transient = transient


@dataclass(frozen=True)
class Built:
    """A kernel's files, and how it is launched."""

    objects: tuple[tuple[str, str], ...]  # kind ("so", "cubin") and path
    lowered: Lowered
    form: str
    launch_plan: str = ""  # for a bare kernel and one for CUDA
    output_strides: str = ""  # native's, as JSON; for a container


def forget_locals(error: BaseException) -> None:
    """Drops what the error's frames hold: samples, and the probe, of which a thread has one."""
    traceback.clear_frames(error.__traceback__)


def is_transient(error: BaseException) -> bool:
    """Whether the machine, not the call, may be the reason."""
    return is_passing(error) or is_out_of_memory(error)


def failed_by(error: BaseException) -> Outcome:
    """What an error makes of a request."""
    of_imports = any(isinstance(one, ImportError) for one in causes(error))
    transient = is_transient(error)
    return Outcome("failed", one_line(error), transient=transient, of_imports=of_imports)


def one_line(error: BaseException) -> str:
    """What people read."""
    ours = isinstance(error, (Failure, CompileFailed, CannotProve, ProofFailed))
    return first_line(error, 300) if ours else named_line(error, 300)


def response_of(
    description: Mapping[str, Any], outcome: Outcome, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """What the service is told."""
    response: dict[str, Any] = {
        "id": description.get("id"),
        "digest": description.get("digest"),
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "failure": "transient" if outcome.transient else "deterministic",
        "found": outcome.published,
        "refused": outcome.refused,
        "seconds": seconds,
    }
    if outcome.proof is not None:
        response["numerics"] = outcome.proof.numerics
    if outcome.timing is not None:
        response["native_ns"] = outcome.timing.native_ns
        response["kernel_ns"] = outcome.timing.kernel_ns
    return response
