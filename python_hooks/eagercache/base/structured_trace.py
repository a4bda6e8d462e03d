"""What becomes of kernels, in PyTorch's structured trace (`TORCH_TRACE`, which tlparse reads).

Off unless PyTorch writes such a trace: asking costs a look at a logger, and imports nothing. Each
event is an artifact of JSON:

- ``eagercache_compile``: a compile worker's answer on one key: operator or module, the entry's
  digest, verdict, reason and the CPU seconds of its parts;
- ``eagercache_validation``: for kernels that were compared with native or timed: the class of
  numerics, and both times in nanoseconds;
- ``eagercache_quarantine``: an entry that nobody uses any more, and why.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

# The logger of torch._logging. It has handlers while a structured trace is written, and only then.
_TRACE = logging.getLogger("torch.__trace")


def is_on() -> bool:
    """Whether PyTorch writes a structured trace in this process."""
    return bool(_TRACE.handlers)


def note(event: str, fields: Mapping[str, Any]) -> None:
    """Puts one event into the trace where there is one; ``fields`` hold what JSON can. Any thread.

    Never raises: what goes wrong with a trace is not the program's trouble.
    """
    if not is_on():
        return
    with contextlib.suppress(Exception):
        from torch._logging import trace_structured

        body = json.dumps(
            {name: value for name, value in fields.items() if value not in (None, "")}, indent=1
        )
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"eagercache_{event}", "encoding": "json"},
            payload_fn=lambda: body,
            expect_trace_id=False,
        )


def note_response(op: str, digest: str, response: Mapping[str, Any]) -> None:
    """The events of a compile worker's answer, as `worker.jobs.outcome` makes it."""
    if not is_on():
        return
    named = {"op": op, "digest": digest}
    kept = ["verdict", "reason", "found", "seconds"]
    if response.get("verdict") == "failed":
        kept.append("failure")
    note("compile", {**named, **{name: response.get(name) for name in kept}})
    measured = {name: response.get(name) for name in ("numerics", "native_ns", "kernel_ns")}
    if any(value is not None for value in measured.values()):
        note("validation", {**named, "verdict": response.get("verdict"), **measured})
