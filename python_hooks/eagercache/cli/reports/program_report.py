"""What `eagercache run --report` shows: where operators' time went, which moved, gain and cost."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagercache.version import __version__

# Rows of the table and bars of the picture; the rest is one row.
MOST_ROWS = 25


def process_report(wall_seconds: float) -> dict[str, Any]:
    """What this process did, for `Report.of`. Calls must have been recorded."""
    from eagercache.base.load import core
    from eagercache.base.operators import described_name
    from eagercache.frontend import report
    from eagercache.frontend.gains import NOT_YET, Unfinished
    from eagercache.runtime.session import session

    assert core is not None
    stats = report.stats()
    cut_off = Unfinished.now().digests
    verdicts = {info.digest: info for info in report.kernels()}
    calls = []
    for text, hits in core.recorded_calls():
        row = json.loads(text)
        known = verdicts.get(row["digest"]) if row["digest"] not in cut_off else None
        kernel_ns = known.kernel_ns if known else None
        # A gain is of times that were measured together: those of a program's few first native
        # calls, cold or on a busy machine, are others.
        stored, seen = known.native_ns if known else None, row.get("native_ns")
        native_ns = stored or seen if kernel_ns is not None else seen or stored
        calls.append(
            {
                "op": described_name(row),
                "dispatch_key": row["dispatch_key"],
                "calls": row["calls"],
                "hits": hits,
                "native_ns": native_ns,
                "kernel_ns": kernel_ns,
                "decision": (
                    NOT_YET if row["digest"] in cut_off else known.decision if known else ""
                ),
            }
        )
    return {
        "pid": os.getpid(),
        "command": sys.argv[:3],
        "wall_seconds": wall_seconds,
        "calls": calls,
        "aside": {name: row.aside for name, row in stats.operators.items() if row.aside},
        "aside_reasons": dict(
            sum((Counter(row.aside_reasons) for row in stats.operators.values()), Counter())
        ),
        "modules": {name: asdict(row) for name, row in stats.modules.items()},
        "not_yet": stats.not_yet,
        "compiles": stats.compiles,
        "failures": stats.failures,
        "compile_seconds": sum(service.seconds for service in session.services()),
        "environment": _environment(),
    }


def _environment() -> dict[str, Any]:
    import torch

    gpus = torch.cuda.is_initialized()
    return {
        "eagercache": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "GPU": torch.cuda.get_device_name() if gpus else "none used",
    }


def process_counters() -> dict[str, Any]:
    """What this process did in a few numbers, for `eagercache compare`: no call was recorded."""
    from eagercache.frontend import report

    stats = report.stats()
    return {
        "hits": stats.hits + stats.module_hits,
        "compiles": stats.compiles,
        "failures": stats.failures,
        "not_yet": stats.not_yet,
    }


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
        return {**self.__dict__, "now": self.now, "decisions": dict(self.decisions)}


_TIMES = ("native", "by_kernels", "by_native", "undecided", "saved", "lost")


@dataclass
class Report:
    """What all processes of a program did together; forked children answer natively alone.

    Attributes:
        wall_seconds: of the longest process.
        process_seconds: of all processes together.
        not_yet: kernels that were being made when their process ended.
        aside_reasons: calls that stepped aside, by rule.
        modules: by class what became of the calls of whole modules; see `ModuleTotals`.
        environment: of the longest process.
        command: of the longest process.
    """

    rows: list[Row]
    processes: int = 0
    wall_seconds: float = 0.0
    process_seconds: float = 0.0
    compiles: int = 0
    failures: int = 0
    not_yet: int = 0
    compile_seconds: float = 0.0
    aside: int = 0
    aside_reasons: dict[str, int] = field(default_factory=dict)
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)

    @staticmethod
    def of(parts: Sequence[Mapping[str, Any]]) -> Report:
        """Adds up what processes reported."""
        rows: dict[str, Row] = {}
        modules: dict[str, Counter[str]] = defaultdict(Counter)
        reasons: Counter[str] = Counter()
        for part in parts:
            for call in part["calls"]:
                name = call["op"] if call["dispatch_key"] == "CPU" else f"{call['op']} @CUDA"
                rows.setdefault(name, Row(name)).add(call)
            for name, counts in part["modules"].items():
                modules[name].update(counts)
            reasons.update(part["aside_reasons"])
        longest = max(parts, key=lambda part: part["wall_seconds"], default={})
        return Report(
            rows=sorted(rows.values(), key=lambda row: (-row.native, -row.calls, row.op)),
            processes=len(parts),
            wall_seconds=longest.get("wall_seconds", 0.0),
            process_seconds=sum(part["wall_seconds"] for part in parts),
            compiles=sum(part["compiles"] for part in parts),
            failures=sum(part["failures"] for part in parts),
            not_yet=sum(part["not_yet"] for part in parts),
            compile_seconds=sum(part["compile_seconds"] for part in parts),
            aside=sum(sum(part["aside"].values()) for part in parts),
            aside_reasons=dict(reasons.most_common()),
            modules={name: dict(counts) for name, counts in modules.items()},
            environment=dict(longest.get("environment", {})),
            command=list(longest.get("command", [])),
        )

    @staticmethod
    def read(folder: Path) -> Report:
        """Of the files that the processes left."""
        files = sorted(folder.glob("*.json"))
        return Report.of([json.loads(file.read_text()) for file in files])

    def total(self) -> Row:
        """All operators in one row."""
        total = Row("all")
        for row in self.rows:
            total.take(row)
        return total

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
            **{k: v for k, v in self.__dict__.items() if k != "rows"},
            "operators": [row.as_dict() for row in self.rows],
            "total": self.total().as_dict(),
            "seconds_saved": self.seconds_saved(),
        }


def save_picture(report: Report, path: Path) -> str:
    """Draws where the time goes. What hinders it, with the remedy, or "" when it is drawn."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no picture was drawn: matplotlib is not installed (pip install matplotlib)"
    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report.shown_rows() if row.native > 0][:MOST_ROWS]
    if not rows:
        return "no picture was drawn: no call of a hooked operator was timed"
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(rows)))
    places = range(len(rows))
    axes.barh(places, [1e3 * row.native for row in rows], color="#c8c8c8", label="native")
    axes.barh(places, [1e3 * row.now for row in rows], height=0.45, color="#2b6cb0", label="now")
    axes.set_yticks(list(places), [row.op for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds in the run")
    axes.set_title("hooked operators: all native, and as they ran")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        return f"no picture was drawn: {path} cannot be written ({error.strerror})"
    except ValueError as error:
        return f"no picture was drawn: {error}"
    finally:
        pyplot.close(figure)
    return ""
