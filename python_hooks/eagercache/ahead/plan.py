"""The keys of a trace that the store has no verdict on, largest expected gain first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from eagercache.ahead.errors import WarmError
from eagercache.ahead.experience import Experience
from eagercache.ahead.report import Planned
from eagercache.ahead.traces import MALFORMED, one_line
from eagercache.base.entry_facts import search_is_due
from eagercache.base.load import core
from eagercache.calls import trace
from eagercache.service import cuda_gate
from eagercache.service.request import expected_gain


def _description(call: trace.TracedCall) -> dict[str, Any]:
    """What the executor is asked with; every GPU is the first one, which is of the same kind."""
    description: dict[str, Any] = json.loads(json.dumps(call.description))
    if description["dispatch_key"] == "CUDA":
        description = cuda_gate.on_first_gpu(description)
    description["calls"] = call.calls
    if call.native_ns is not None:
        description["native_ns"] = call.native_ns
    return description


def plan_calls(
    calls: Iterable[trace.TracedCall],
    store: Any,
    choose: str,
    experience: Experience,
    deep: bool = False,
) -> list[Planned]:
    """An entry for every key of the calls. Raises WarmError where one is damaged.

    ``deep``: what the store has is left to do where forms of its kernel may be faster.
    """
    assert core is not None
    entries: dict[str, Planned] = {}
    for call in calls:
        try:
            description = _description(call)
            native_ns = expected_gain(description)
            gain = native_ns * experience.share_saved(call.name)
            seconds = experience.seconds(call.name, description["args"])
            empty = _is_empty(description["args"])
        except MALFORMED as error:
            raise WarmError(
                f"the trace has a damaged call of {call.name[:100]!r} ({one_line(error)}); "
                "record the trace anew"
            ) from error
        entry = Planned(call, description, "", native_ns, gain, seconds)
        text = json.dumps({k: description[k] for k in ("state", "args")})
        operator = (description["op"], description["overload"], description["dispatch_key"])
        try:
            if empty:
                raise ValueError("a tensor has no elements")  # noqa: TRY301 - told like the others
            entry.digest = core.call_digest(*operator, text, choose)
        except (ValueError, TypeError, RuntimeError) as error:
            entry.state, entry.reason, entry.seconds = "ineligible", str(error), 0.0
            entries[f"{len(entries)}"] = entry
            continue
        description["digest"] = entry.digest
        if (same := entries.get(entry.digest)) is not None:  # two GPUs of one kind
            same.call = replace(same.call, calls=same.call.calls + call.calls)
            same.native_ns += native_ns
            same.gain_ns += gain
            continue
        entries[entry.digest] = entry
        known = store.find(entry.digest)
        if known is not None and not (deep and search_is_due(known["facts"])):
            take_known(entry, known)
    return sorted(entries.values(), key=lambda entry: -entry.gain_ns)


def _is_empty(arguments: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the call steps aside for a tensor without elements."""
    return any(
        0 in argument.get("sizes", ()) or _is_empty(argument.get("elements", ()))
        for argument in arguments
    )


def take_known(entry: Planned, manifest: Mapping[str, Any]) -> None:
    """What the store has of an entry's key."""
    entry.state, entry.seconds = "found", 0.0
    entry.verdict = manifest["kind"]
    entry.reason = manifest["facts"].get("reason", "")
    measure_gain(entry, manifest["facts"])


def measure_gain(entry: Planned, known: Mapping[str, Any]) -> None:
    """What all calls of the trace save, out of the facts of a kernel."""
    entry.gain_ns = 0.0
    if entry.verdict == "kernel" and "native_ns" in known and "kernel_ns" in known:
        saved = float(known["native_ns"]) - float(known["kernel_ns"])
        entry.gain_ns = saved * entry.call.calls
