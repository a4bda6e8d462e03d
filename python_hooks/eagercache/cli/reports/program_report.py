"""What `eagercache run --report` shows: where operators' time went, which moved, gain and cost."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagercache.calls.texts import NOT_YET, counted

# Rows of the table and bars of the picture; the rest is one row.
MOST_ROWS = 25


@dataclass
class Row:
    """One operator. Times in seconds, of the calls whose time is known.

    Attributes:
        native: what all its calls would have taken native.
        by_kernels, by_native, undecided: what they took: answered by kernels, taken at their
            measured time; by native for good; by native while there was no verdict.
        saved, lost: what kernels took less than native would have, and more. An estimate: calls
            times the times that were measured when the kernel was made.
        untimed: calls of keys of which no time is known.
        decisions: how many keys have which verdict, or "not yet".
        moved_bytes, moved_seconds, copy_seconds: what kernels moved in calls that are too large for
            caches, what they took, and what a copy of as much takes on this machine.
        unfinished: keys whose kernel was being made at the end, as the processes count them.
    """

    op: str
    calls: int = 0
    hits: int = 0
    native: float = 0.0
    by_kernels: float = 0.0
    by_native: float = 0.0
    undecided: float = 0.0
    saved: float = 0.0
    lost: float = 0.0
    untimed: int = 0
    decisions: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    moved_bytes: float = 0.0
    moved_seconds: float = 0.0
    copy_seconds: float = 0.0
    unfinished: int = 0

    @property
    def gigabytes_per_second(self) -> float | None:
        """Of its kernels; None where no call was large enough."""
        return self.moved_bytes / self.moved_seconds / 1e9 if self.moved_seconds else None

    @property
    def share_of_copy(self) -> float | None:
        """The same, of a copy's speed."""
        return self.copy_seconds / self.moved_seconds if self.moved_seconds else None

    @property
    def now(self) -> float:
        """What its calls took."""
        return self.by_kernels + self.by_native + self.undecided

    def add(self, call: Mapping[str, Any]) -> None:
        """Adds one key."""
        calls, hits = call["calls"], call["hits"]
        self.calls += calls
        self.hits += hits
        if call["decision"]:
            self.decisions[call["decision"]] += 1
        native_ns, kernel_ns = call["native_ns"], call["kernel_ns"]
        if native_ns is None or (hits and kernel_ns is None):
            self.untimed += calls
            return
        self.native += calls * native_ns / 1e9
        self.by_kernels += hits * (kernel_ns or 0.0) / 1e9
        rest = (calls - hits) * native_ns / 1e9
        if call["decision"] in ("native", "failed"):
            self.by_native += rest
        else:
            self.undecided += rest
        if speed := call.get("gbps"):
            self.moved_bytes += hits * call["bytes"]
            self.moved_seconds += hits * call["bytes"] / speed / 1e9
            self.copy_seconds += hits * call["bytes"] / call["copy_gbps"] / 1e9
        gain = hits * (native_ns - (kernel_ns or 0.0)) / 1e9
        self.saved += max(gain, 0.0)
        self.lost += max(-gain, 0.0)

    def take(self, other: Row) -> None:
        """Adds another row."""
        for name in ("calls", "hits", "untimed", *_TIMES):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for decision, count in other.decisions.items():
            self.decisions[decision] += count

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.__dict__,
            "now": self.now,
            "decisions": dict(self.decisions),
            "gigabytes_per_second": self.gigabytes_per_second,
            "share_of_copy": self.share_of_copy,
        }


@dataclass
class AsideRow:
    """Calls of one operator that stepped aside by one rule.

    Attributes:
        timed: so many of them were timed, drawn evenly.
        seconds: of all: an estimate from those; None where none was timed.
    """

    rule: str
    op: str
    calls: int = 0
    timed: int = 0
    seconds: float | None = None

    @staticmethod
    def of(parts: Iterable[Mapping[str, Any]]) -> list[AsideRow]:
        """Those of all processes, longest first."""
        rows: dict[tuple[str, str], AsideRow] = {}
        for one in (one for part in parts for one in part.get("asides", ())):
            name = _shown_name(one["op"], one["dispatch_key"])
            row = rows.setdefault((one["rule"], name), AsideRow(one["rule"], name))
            row.calls += one["calls"]
            row.timed += one["timed"]
            if one["timed"]:
                row.seconds = (row.seconds or 0.0) + one["calls"] * one["native_ns"] / 1e9
        return sorted(rows.values(), key=lambda row: (-(row.seconds or 0.0), -row.calls))


_TIMES = (
    *("native", "by_kernels", "by_native", "undecided", "saved", "lost"),
    *("moved_bytes", "moved_seconds", "copy_seconds"),
)


def _shown_name(op: str, dispatch_key: str) -> str:
    return op if dispatch_key == "CPU" else f"{op} @{dispatch_key}"


@dataclass
class Report:
    """What all processes of a program did together.

    Attributes:
        cut_off: processes that were ended from outside: what they said last is a little old.
        forks: forked children, which answer natively alone, and in no other figure here.
        fork_seconds: of all of them together; of one that was killed only its beginning is known.
        wall_seconds: of the longest process.
        process_seconds: of all processes together.
        not_yet: kernels that were being made when their process ended.
        aside_reasons: calls that stepped aside, by rule.
        asides: the same by rule and operator, with times.
        modules: by class what became of the calls of whole modules; see `ModuleTotals`.
        why_native: by (operator, verdict, reason): how many calls native answers for good.
        differences: kernels whose answer was found to differ from native's.
        timelines: of each process what it did when, the longest one first; see `Timeline.ended`.
        environment: of the longest process.
        command: of the longest process.
    """

    rows: list[Row]
    processes: int = 0
    cut_off: int = 0
    forks: int = 0
    fork_seconds: float = 0.0
    wall_seconds: float = 0.0
    process_seconds: float = 0.0
    compiles: int = 0
    failures: int = 0
    not_yet: int = 0
    compile_seconds: float = 0.0
    aside: int = 0
    aside_reasons: dict[str, int] = field(default_factory=dict)
    asides: list[AsideRow] = field(default_factory=list)
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    why_native: dict[tuple[str, str, str], int] = field(default_factory=dict)
    differences: list[dict[str, str]] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)

    @staticmethod
    def of(all_parts: Sequence[Mapping[str, Any]]) -> Report:
        """Adds up what processes reported."""
        parts = [part for part in all_parts if not part.get("fork")]
        forks = [part["wall_seconds"] for part in all_parts if part.get("fork")]
        rows: dict[str, Row] = {}
        modules: dict[str, Counter[str]] = defaultdict(Counter)
        reasons: Counter[str] = Counter()
        why_native: Counter[tuple[str, str, str]] = Counter()
        for part in parts:
            for call in part["calls"]:
                name = _shown_name(call["op"], call["dispatch_key"])
                rows.setdefault(name, Row(name)).add(call)
                if call["decision"] in ("native", "failed"):
                    why_native[name, call["decision"], call.get("reason", "")] += call["calls"]
            for op, dispatch_key, count in part.get("unfinished", ()):
                # By operator: a kernel for many sizes has a key that no call has.
                if row := rows.get(_shown_name(op, dispatch_key)):
                    row.unfinished += count
            for name, counts in part["modules"].items():
                modules[name].update(counts)
            reasons.update(part["aside_reasons"])
        ordered = sorted(parts, key=lambda part: -part["wall_seconds"])
        for row in rows.values():
            if row.unfinished > row.decisions[NOT_YET]:
                row.decisions[NOT_YET] = row.unfinished
        longest = ordered[0] if ordered else {}
        return Report(
            rows=sorted(rows.values(), key=lambda row: (-row.native, -row.calls, row.op)),
            processes=len(parts),
            cut_off=sum(not part.get("ended", True) for part in parts),
            forks=len(forks),
            fork_seconds=sum(forks),
            wall_seconds=longest.get("wall_seconds", 0.0),
            process_seconds=sum(part["wall_seconds"] for part in parts),
            compiles=sum(part["compiles"] for part in parts),
            failures=sum(part["failures"] for part in parts),
            not_yet=sum(part["not_yet"] for part in parts),
            compile_seconds=sum(part["compile_seconds"] for part in parts),
            aside=sum(sum(part["aside"].values()) for part in parts),
            aside_reasons=dict(reasons.most_common()),
            asides=AsideRow.of(parts),
            modules={name: dict(counts) for name, counts in modules.items()},
            why_native=dict(why_native.most_common()),
            differences=[one for part in parts for one in part.get("differences", ())],
            timelines=[part["timeline"] for part in ordered if part.get("timeline")],
            environment=dict(longest.get("environment", {})),
            command=list(longest.get("command", [])),
        )

    @staticmethod
    def read(folder: Path) -> Report:
        """Of the files that the processes left."""
        files = sorted(folder.glob("*.json"))
        return Report.of([json.loads(file.read_text()) for file in files])

    def processes_text(self) -> str:
        """How many, and what is not known of them."""
        text = counted(self.processes, "process", "processes")
        if self.cut_off:
            were = "was" if self.cut_off == 1 else "were"
            text += (
                f", of which {self.cut_off:,} {were} ended from outside and told their last state"
            )
        if self.forks:
            text += (
                f"; {counted(self.forks, 'forked child', 'forked children')} beside, all native, "
                f"{self.fork_seconds:.1f} s"
            )
        return text

    def total(self) -> Row:
        """All operators in one row."""
        total = Row("all")
        for row in self.rows:
            total.take(row)
        return total

    def seconds_aside(self) -> dict[str, float]:
        """By rule, what calls took that stepped aside; an estimate, longest first."""
        seconds: Counter[str] = Counter()
        for row in self.asides:
            seconds[row.rule] += row.seconds or 0.0  # type: ignore[assignment]
        return {rule: float(sum) for rule, sum in seconds.most_common() if sum}

    def seconds_by_modules(self) -> float:
        """What the calls of whole modules took that kernels answered; an estimate."""
        return float(sum(sums.get("seconds_by_kernels", 0.0) for sums in self.modules.values()))

    def seconds_saved(self) -> float:
        """By operators and modules, less what was lost; an estimate."""
        total = self.total()
        return total.saved - total.lost + sum(m["seconds_saved"] for m in self.modules.values())

    def shown_rows(self) -> list[Row]:
        """The rows of the table: the last one stands for all that have no place."""
        if len(self.rows) <= MOST_ROWS:
            return self.rows
        rest = Report(self.rows[MOST_ROWS - 1 :]).total()
        rest.op = f"{len(self.rows) - MOST_ROWS + 1} more"
        return [*self.rows[: MOST_ROWS - 1], rest]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **{k: v for k, v in self.__dict__.items() if k not in ("rows", "why_native", "asides")},
            "asides": [row.__dict__ for row in self.asides],
            "seconds_aside": self.seconds_aside(),
            "why_native": [
                {"op": op, "decision": decision, "reason": reason, "calls": calls}
                for (op, decision, reason), calls in self.why_native.items()
            ],
            "operators": [row.as_dict() for row in self.rows],
            "total": self.total().as_dict(),
            "seconds_saved": self.seconds_saved(),
        }
