"""What happened in this process: counters and verdicts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagercache.base import config, entry_facts
from eagercache.base.entry_facts import number
from eagercache.base.load import core
from eagercache.base.operators import full_name
from eagercache.base.warn import warn_once
from eagercache.calls.texts import NOT_YET, argument_texts, counted
from eagercache.frontend.gains import (
    ModuleTotals,
    Outcomes,
    Unfinished,
    key_counts,
    module_totals,
    outcomes,
    saved_by_operator,
)
from eagercache.frontend.remedies import remedy_of_short_programs
from eagercache.frontend.tables import html_table
from eagercache.runtime.left_native import left_native
from eagercache.runtime.session import session

# In the text of `kernels()`; its table in a notebook has more.
MOST_LINES = 20


@dataclass(frozen=True)
class OperatorStats:
    """Calls of one hooked operator at one dispatch key, since the process started.

    Each call counts once: `hits` (a kernel answered), `misses` (first meeting of a key), `pending`
    (met before, no verdict yet), `native` (decided for native), `aside` (not cacheable by rule;
    `aside_reasons` counts the rules). In all but `hits` the native kernel answered.

    `keys`, `seconds_saved` and `seconds_lost` are as in `Stats`, of this operator.
    """

    op: str
    dispatch_key: str
    active: bool
    hits: int
    misses: int
    pending: int
    native: int
    aside: int
    aside_reasons: Mapping[str, int]
    shadowed: bool
    keys: Mapping[str, int] = field(default_factory=dict)
    seconds_saved: float = 0.0
    seconds_lost: float = 0.0


@dataclass(frozen=True)
class RemoteStats:
    """What this process asked of remotes; see `enable(remote=...)`.

    Attributes:
        hits: kernels and decisions that came from a remote, and were not compiled for that.
        untried: of these, kernels of another kind of machine, which a worker tries here at first.
        misses: keys that no remote had.
        refused: entries that were not used, by kind: "signature", "damaged", "version", "code" (no
            shared object, or for another processor), "rollback" (older than what its signer has
            shown), or "environment: FIELD" where that differs.
        errors: keys that a remote did not answer for, or that could not be sent.
        sent: entries that a remote got.
        unsent: entries that wait for that; `eagercache push` sends what a program leaves.
        requests, request_seconds: requests that were made, and what they took together.
        bytes_read, bytes_sent: bytes of entries, objects and lists.
    """

    hits: int = 0
    untried: int = 0
    misses: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    errors: int = 0
    sent: int = 0
    unsent: int = 0
    requests: int = 0
    request_seconds: float = 0.0
    bytes_read: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True)
class Stats:
    """Totals of this process. See `OperatorStats` for the call counters.

    Attributes:
        compiles: kernels compiled, proved and timed on behalf of this process.
        failures: compiles that ended without a kernel or a decision for native.
        keys: how many kinds of calls have which verdict: "kernel", "native" (native won, or is the
            only right way), "failed" (no kernel could be made), "not yet" (it is being made, or was
            when the process began to end).
        seconds_saved, seconds_lost: by kernels that answer, of operators and modules: calls, times
            what native takes longer by the times that were measured when the kernel was made. It is
            an estimate. Lost is what kernels took longer, as with ``choose="always"``. While calls
            are recorded it is exact in which kernel answered how often.
        loaded: kernel libraries in this process.
        outstanding: keys of operators on their way to a verdict; `not_yet` counts modules', too.
        frozen: whether `freeze()` holds.
        shadowed: hooked operators that somebody else overrode later; theirs are called, not ours.
        left_native: eligible operators that are not hooked, because native won all calls of earlier
            processes.
        operators: per operator, those with any call first by number of calls.
        modules: per class of modules that are watched.
        remote: what was asked of remotes.
    """

    hits: int
    misses: int
    pending: int
    native: int
    aside: int
    compiles: int
    failures: int
    loaded: int
    outstanding: int
    frozen: bool
    shadowed: int
    left_native: tuple[str, ...]
    operators: Mapping[str, OperatorStats] = field(repr=False)
    keys: Mapping[str, int] = field(default_factory=dict)
    seconds_saved: float = 0.0
    seconds_lost: float = 0.0
    modules: Mapping[str, ModuleTotals] = field(default_factory=dict, repr=False)
    remote: RemoteStats = field(default_factory=RemoteStats, repr=False)

    @property
    def not_yet(self) -> int:
        """Kernels that are being made, or were when the process began to end."""
        return self.keys.get(NOT_YET, 0) + sum(row.not_yet for row in self.modules.values())

    @property
    def remedy(self) -> str:
        """What to do where the program ends before its kernels are made; "" where all are."""
        return remedy_of_short_programs(self.not_yet, running=True)

    @property
    def module_hits(self) -> int:
        """Calls of whole modules that kernels answered."""
        return sum(row.hits for row in self.modules.values())

    def __repr__(self) -> str:
        native = self.misses + self.pending + self.native + self.aside
        calls = counted(self.hits, "call")
        calls += f" and {self.module_hits:,} of whole modules" if self.modules else ""
        text = (
            f"<eagercache: {calls} by kernels, {native:,} by native; "
            f"{counted(self.compiles, 'compile')}, {counted(self.failures, 'failure')}, "
            f"{self.not_yet} outstanding"
        )
        return text + (", frozen>" if self.frozen else ">")

    def _repr_html_(self) -> str:
        return html_table(
            repr(self).strip("<>"),
            (
                *("operator", "by kernel", "missed", "pending", "native", "aside"),
                *("kinds not yet made", "seconds saved", "why aside"),
            ),
            (
                (
                    name,
                    row.hits,
                    row.misses,
                    row.pending,
                    row.native,
                    row.aside,
                    row.keys.get(NOT_YET, 0),
                    row.seconds_saved - row.seconds_lost,
                    ", ".join(f"{n} {rule}" for rule, n in row.aside_reasons.items() if n),
                )
                for name, row in self.operators.items()
                if row.hits + row.misses + row.pending + row.native + row.aside
            ),
        )


@dataclass(frozen=True)
class KernelInfo:
    """One key's verdict in this process.

    Attributes:
        call: the call's description (argument kinds, dtypes, sizes, strides, values).
        decision: "kernel", "native" or "failed"; for the last two native answers.
        reason: why there is no kernel; empty for kernels.
        native_ns, kernel_ns: measured time of one call in nanoseconds, None where not timed.
        numerics: "bitwise", "accurate" or "" when not proved.
    """

    op: str
    overload: str
    dispatch_key: str
    digest: str
    call: Mapping[str, Any]
    decision: config.Decision
    reason: str
    native_ns: float | None
    kernel_ns: float | None
    numerics: config.Proved
    facts: Mapping[str, str] = field(repr=False)

    @property
    def gigabytes_per_second(self) -> float | None:
        """What the kernel moves: bytes of inputs and outputs, each once; None of small calls."""
        return entry_facts.gigabytes_per_second(self.facts)

    @property
    def share_of_copy(self) -> float | None:
        """The same as a share of a copy's speed on the machine that measured both."""
        return entry_facts.share_of_copy(self.facts)

    def __repr__(self) -> str:
        text = f"<{full_name((self.op, self.overload))}: {self.decision}"
        if self.native_ns and self.kernel_ns:
            text += f", {self.native_ns / self.kernel_ns:.2f} times as fast"
        if self.share_of_copy:
            text += f", at {self.share_of_copy:.0%} of a copy's speed"
        return text + (f", {self.reason}>" if self.reason else ">")


class KernelList(list[KernelInfo]):
    """The verdicts of this process, as `kernels` gives them."""

    def __repr__(self) -> str:
        counts = Counter(row.decision for row in self)
        said = ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))
        text = f"eagercache: {counted(len(self), 'verdict')}" + (f" ({said})" if said else "")
        lines = [repr(row) for row in self[:MOST_LINES]]
        if len(self) > MOST_LINES:
            lines.append(f"and {len(self) - MOST_LINES:,} more")
        return "\n  ".join([text, *lines])

    def _repr_html_(self) -> str:
        return html_table(
            f"eagercache: {counted(len(self), 'verdict')}",
            ("operator", "call", "decision", "native us", "kernel us", "times", "GB/s", "why"),
            (
                (
                    full_name((row.op, row.overload)),
                    ", ".join(argument_texts(row.call.get("args", []))),
                    row.decision,
                    row.native_ns / 1e3 if row.native_ns else None,
                    row.kernel_ns / 1e3 if row.kernel_ns else None,
                    row.native_ns / row.kernel_ns if row.native_ns and row.kernel_ns else None,
                    row.gigabytes_per_second,
                    row.reason,
                )
                for row in self
            ),
        )


def stats() -> Stats:
    """Counters of this process; see `Stats`."""
    unfinished = Unfinished.now()
    verdicts = outcomes()
    rows = _operator_rows(verdicts, unfinished)
    modules = module_totals(unfinished)
    services = session.services()
    outstanding = core.outstanding() if core is not None and not core.forked() else 0
    keys: Counter[str] = Counter()
    for row in rows:
        keys.update(row.keys)
    keys[NOT_YET] = max(outstanding, len(unfinished.digests))
    saved = [row.seconds_saved for row in modules.values()]
    return Stats(
        hits=sum(row.hits for row in rows),
        misses=sum(row.misses for row in rows),
        pending=sum(row.pending for row in rows),
        native=sum(row.native for row in rows),
        aside=sum(row.aside for row in rows),
        compiles=sum(service.compiles for service in services),
        failures=sum(service.failures for service in services),
        loaded=core.loaded_kernels() if core is not None else 0,
        outstanding=outstanding,
        frozen=core is not None and bool(core.frozen()),
        shadowed=sum(row.shadowed for row in rows),
        left_native=tuple(sorted(full_name(name) for name, _ in left_native.pairs)),
        operators={_row_name(row): row for row in rows},
        keys=dict(keys),
        seconds_saved=sum(row.seconds_saved for row in rows) + sum(t for t in saved if t > 0),
        seconds_lost=sum(row.seconds_lost for row in rows) - sum(t for t in saved if t < 0),
        modules=modules,
        remote=_remote_stats(services),
    )


def _remote_stats(services: Iterable[Any]) -> RemoteStats:
    total: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for service in services:
        counts = service.remote_counts()
        refused.update(counts.pop("refused", {}))
        total.update(counts)
    return RemoteStats(refused=dict(refused), **total)


def _operator_rows(verdicts: Outcomes, unfinished: Unfinished) -> list[OperatorStats]:
    """One for each hooked operator at each of its keys, most calls first."""
    if core is None:
        return []
    counters = core.operator_stats()
    hits = {(row["op"], row["dispatch_key"]): row["hits"] for row in counters}
    saved = saved_by_operator(verdicts, hits)
    rows = []
    for row in counters:
        name = row["op"], row["dispatch_key"]
        keys = key_counts(verdicts.get(name, ()), unfinished)
        if unfinished.operators[name]:
            keys[NOT_YET] = unfinished.operators[name]
        gained, lost = saved.get(name, (0.0, 0.0))
        rows.append(
            OperatorStats(
                **{**row, "aside_reasons": dict(row["aside_reasons"])},
                keys=keys,
                seconds_saved=gained,
                seconds_lost=lost,
            )
        )
    for one in rows:
        if one.shadowed and one.active:
            warn_once(
                f"shadowed:{one.op}:{one.dispatch_key}",
                f"{one.op} was overridden at {one.dispatch_key} by another library after "
                "eagercache; that library's kernel is called.",
            )
    rows.sort(key=lambda row: -(row.hits + row.misses + row.pending + row.native + row.aside))
    return rows


def _row_name(row: OperatorStats) -> str:
    return row.op if row.dispatch_key == "CPU" else f"{row.op} @{row.dispatch_key}"


def _kernel_rows() -> Iterator[KernelInfo]:
    assert core is not None
    for row in core.verdicts():
        facts = dict(row["facts"])
        yield KernelInfo(
            op=row["op"],
            overload=row["overload"],
            dispatch_key=row["dispatch_key"],
            digest=row["digest"],
            call=json.loads(row["call"]),
            decision=row["decision"],
            reason=row["reason"],
            native_ns=number(facts, "native_ns"),
            kernel_ns=number(facts, "kernel_ns"),
            numerics=facts.get("numerics", ""),
            facts=facts,
        )


def kernels() -> KernelList:
    """The verdicts that this process has met: kernels, decisions for native, failures."""
    return KernelList(_kernel_rows() if core is not None else ())
