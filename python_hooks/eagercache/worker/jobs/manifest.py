"""What an entry of the store says of an outcome."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagercache.base.machine_kind import MACHINE, kind_for
from eagercache.base.operators import described_name
from eagercache.calls.integers import known_ranges
from eagercache.worker.jobs.outcome import Outcome
from eagercache.worker.jobs.untried import TEXT_FACTS

TRANSIENT_RETRY_SECONDS = 600

# Bytes that facts take of a manifest, which has 64 KiB.
MAX_FACTS = 60_000


def library_object(path: Path) -> tuple[tuple[str, str], ...]:
    """A shared object among an entry's files."""
    return (("so", str(path)),)


def facts_of(
    request: Mapping[str, Any], outcome: Outcome, seconds: Mapping[str, float]
) -> dict[str, str]:
    """What is written down of a request, for people and for later measurements."""
    import torch

    description = request["description"]
    call = {name: description[name] for name in ("state", "args") if name in description}
    facts = {
        "op": described_name(description),
        "dispatch_key": description["dispatch_key"],
        "call": json.dumps(call, separators=(",", ":")),
        "choose": request["choose"],
        "reason": outcome.reason,
        "torch": str(torch.__version__),
        MACHINE: kind_for(description["dispatch_key"]),
    }
    if "integers" in description:
        facts["integers"] = json.dumps(known_ranges(description))
    facts.update({f"seconds_{name}": f"{value:.3f}" for name, value in seconds.items()})
    facts.update(found_facts(outcome))
    if outcome.module is not None:
        facts.update(outcome.module.facts)
    if outcome.kernel is not None:
        text = outcome.kernel.lowered.text
        facts["kernels"] = " ".join(text.kernels)[:2_000]
        facts["extern_calls"] = " ".join(text.extern_calls)[:2_000]
        for name in TEXT_FACTS:
            facts[name] = str(int(getattr(text, name)))
        facts["form"] = outcome.kernel.form
        if outcome.kernel.launch_plan:
            facts["launch_plan"] = outcome.kernel.launch_plan
        else:
            facts["output_strides"] = outcome.kernel.output_strides
        if outcome.kernel.lowered.why_container:
            facts["why_container"] = outcome.kernel.lowered.why_container[:300]
    # A call on hundreds of tensors is left out, where a manifest has no room beside the plan.
    if sum(len(name) + len(value) + len("fact  \n") for name, value in facts.items()) > MAX_FACTS:
        del facts["call"]
    return facts


def found_facts(outcome: Outcome) -> dict[str, str]:
    """What this machine found out: by proving, by timing, and the outcome's own facts."""
    facts: dict[str, str] = {}
    if outcome.proof is not None:
        facts["numerics"] = outcome.proof.numerics
        facts["fills"] = " ".join(outcome.proof.fills)
        facts["seed"] = str(outcome.proof.seed)
        facts["largest_error_ulp"] = f"{outcome.proof.largest_error:.4g}"
        facts["native_error_ulp"] = f"{outcome.proof.native_error:.4g}"
    if outcome.timing is not None:
        facts["native_ns"] = f"{outcome.timing.native_ns:.1f}"
        facts["kernel_ns"] = f"{outcome.timing.kernel_ns:.1f}"
        facts["spread"] = outcome.timing.spread
        facts["pairs"] = str(outcome.timing.pairs)
        facts.update(outcome.timing.facts())
    return facts | outcome.facts


def manifest_of(
    request: Mapping[str, Any],
    outcome: Outcome,
    seconds: Mapping[str, float],
    cpu_features: Callable[[], tuple[str, ...]],
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """An entry, and its files: the kind ("so", "cubin") and path of each."""
    manifest: dict[str, Any] = {
        "key": request["description"]["digest"],
        "kind": outcome.verdict,
        "created": int(time.time()),
        "facts": facts_of(request, outcome, seconds),
    }
    sources: list[tuple[str, str]] = []
    if outcome.verdict == "kernel":
        if outcome.kernel is not None:
            sources.extend(outcome.kernel.objects)
        elif outcome.module is not None:
            for path in (outcome.module.path, *outcome.module.more):
                sources.extend(library_object(path))
        if any(kind == "so" for kind, _ in sources):
            manifest["cpu_features"] = list(cpu_features())
    elif outcome.verdict == "failed":
        manifest["failure"] = "transient" if outcome.transient else "deterministic"
        if outcome.transient:
            manifest["retry_after"] = int(time.time()) + TRANSIENT_RETRY_SECONDS
    return manifest, sources
