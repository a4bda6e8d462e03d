"""What became of keys, and what kernels saved: by operator and by class of module.

Saved time is an estimate: calls that kernels answered, times what native takes longer by the times
that were measured when the kernel was made, on a machine that may have been busier or idler.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from eagercache.base.load import core
from eagercache.base.operators import described_name, full_name
from eagercache.calls.texts import NOT_YET
from eagercache.runtime.session import session

# What became of one key: its digest, the verdict, and nanoseconds of a call natively and by the
# kernel, 0 where it was not timed.
Outcome = tuple[str, str, float, float]
# Of operators' keys, by name and dispatch key.
Outcomes = Mapping[tuple[str, str], Sequence[Outcome]]

_DIGEST = re.compile(r'"digest":\s*"([^"]*)"')


def outcomes() -> Outcomes:
    """Of this process. What is known of a key besides costs nothing here."""
    if core is None:
        return {}
    return {
        (full_name((op, overload)), dispatch_key): rows
        for op, overload, dispatch_key, rows in core.outcomes()
    }


@dataclass(frozen=True)
class ModuleTotals:
    """Calls of all modules of one class.

    Attributes:
        modules: how many were watched.
        hits: calls answered by kernels.
        native: calls answered by the forward, for whatever reason.
        not_yet: kernels that are being made.
        refused: modules that are left to their forward for good.
        seconds_saved: by kernels, estimated as in `Stats`; negative where they lose.
        seconds_by_kernels: what the calls took that kernels answered, estimated in the same way.
    """

    modules: int = 0
    hits: int = 0
    native: int = 0
    not_yet: int = 0
    refused: int = 0
    seconds_saved: float = 0.0
    seconds_by_kernels: float = 0.0


@dataclass
class Unfinished:
    """What was asked for and has no verdict; or had none when the compile services were closed."""

    digests: set[str] = field(default_factory=set)  # of operators' keys
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)  # by name, dispatch key
    modules: Counter[str] = field(default_factory=Counter)  # by class

    @staticmethod
    def now() -> Unfinished:
        """Of this process."""
        found = Unfinished()
        for service in session.services():
            for description in service.unfinished():
                if description.get("kind") == "module":
                    found.modules[str(description.get("op", ""))] += 1
                else:
                    found.digests.add(str(description.get("digest", "")))
                    name = described_name(description)
                    found.operators[name, str(description.get("dispatch_key", ""))] += 1
        return found


def key_counts(rows: Iterable[Outcome], unfinished: Unfinished) -> dict[str, int]:
    """How many of an operator's keys have which verdict; what was cut off has not failed."""
    cut_off = unfinished.digests
    return dict(Counter(NOT_YET if row[0] in cut_off else row[1] for row in rows))


def saved_by_operator(
    verdicts: Outcomes, hits: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], tuple[float, float]]:
    """(seconds saved, seconds lost) by (name, dispatch key), both at least 0.

    While calls are recorded, hits are known by key. What was not recorded counts as if each kernel
    of its operator had answered equally often.
    """
    gains: dict[tuple[str, str], dict[str, float]] = {}
    for name, rows in verdicts.items():
        by_key = {
            digest: (native - kernel) / 1e9
            for digest, decision, native, kernel in rows
            if decision == "kernel" and native and kernel
        }
        if by_key:
            gains[name] = by_key
    recorded = _recorded_hits() if gains else {}
    result = {}
    for name, by_key in gains.items():
        counted = {digest: recorded.get(digest, 0) for digest in by_key} if recorded else {}
        rest = max(0, hits.get(name, 0) - sum(counted.values())) / len(by_key)
        times = [gain * (counted.get(digest, 0) + rest) for digest, gain in by_key.items()]
        result[name] = (sum(t for t in times if t > 0), -sum(t for t in times if t < 0))
    return result


def _recorded_hits() -> dict[str, int]:
    assert core is not None
    hits: Counter[str] = Counter()
    for text, count in core.recorded_calls():
        if found := _DIGEST.search(text):  # a quote within a value has a backslash before it
            hits[found[1]] += count
    return hits


def module_totals(unfinished: Unfinished) -> dict[str, ModuleTotals]:
    """By class; those that save most first."""
    loaded = sys.modules.get("eagercache.modules.manager")
    if loaded is None:
        return {}
    from eagercache.modules.gains import seconds

    sums: dict[str, Counter[str]] = defaultdict(Counter)
    by_forward: Counter[str] = Counter()
    by_kernels: Counter[str] = Counter()
    for _, row in loaded.manager.stats():
        native = row.pending + row.native + sum(row.aside_reasons.values())
        sums[row.name].update(
            modules=1, hits=row.hits, native=native, refused=int(row.state == "refused")
        )
        forward, kernels = seconds(row)
        by_forward[row.name] += forward  # type: ignore[assignment]
        by_kernels[row.name] += kernels  # type: ignore[assignment]
    totals = {
        name: ModuleTotals(
            **counts,
            not_yet=unfinished.modules[name],
            seconds_saved=float(by_forward[name] - by_kernels[name]),
            seconds_by_kernels=float(by_kernels[name]),
        )
        for name, counts in sums.items()
    }
    return dict(sorted(totals.items(), key=lambda item: (-item[1].seconds_saved, -item[1].hits)))
