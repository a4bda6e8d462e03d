"""What `eagercache run --report` shows: where operators' time went, which moved, gain and cost."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagercache.calls.texts import counted

if TYPE_CHECKING:
    from rich.console import Console

# Rows of the table and bars of the picture; the rest is one row.
MOST_ROWS = 25


def process_report(wall_seconds: float) -> dict[str, Any]:
    """What this process did, for `Report.of`. Calls must have been recorded."""
    from eagercache.base.load import core
    from eagercache.base.operators import described_name
    from eagercache.frontend import report
    from eagercache.runtime.session import session

    assert core is not None
    stats = report.stats()
    verdicts = {info.digest: info for info in report.kernels()}
    calls = []
    for text, hits in core.recorded_calls():
        row = json.loads(text)
        known = verdicts.get(row["digest"])
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
                "decision": known.decision if known else "",
            }
        )
    return {
        "pid": os.getpid(),
        "command": sys.argv[:3],
        "wall_seconds": wall_seconds,
        "calls": calls,
        "aside": {name: row.aside for name, row in stats.operators.items() if row.aside},
        "compiles": stats.compiles,
        "failures": stats.failures,
        "outstanding": stats.outstanding,
        "compile_seconds": sum(service.seconds for service in session.services()),
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
        now: what they took, kernels' answers taken at their measured time.
        untimed: calls of keys of which no time is known.
        decisions: how many keys have which verdict.
    """

    op: str
    calls: int = 0
    hits: int = 0
    native: float = 0.0
    now: float = 0.0
    untimed: int = 0
    decisions: dict[str, int] = field(default_factory=lambda: defaultdict(int))

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
        self.now += ((calls - hits) * native_ns + hits * (kernel_ns or 0.0)) / 1e9

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.__dict__, "decisions": dict(self.decisions)}


@dataclass
class Report:
    """What all processes of a program did together."""

    rows: list[Row]
    processes: int
    wall_seconds: float  # of the longest process
    compiles: int
    failures: int
    outstanding: int
    compile_seconds: float
    aside: int

    @staticmethod
    def of(parts: Sequence[Mapping[str, Any]]) -> Report:
        """Adds up what processes reported."""
        rows: dict[str, Row] = {}
        for part in parts:
            for call in part["calls"]:
                name = call["op"] if call["dispatch_key"] == "CPU" else f"{call['op']} @CUDA"
                rows.setdefault(name, Row(name)).add(call)
        return Report(
            rows=sorted(rows.values(), key=lambda row: (-row.native, -row.calls, row.op)),
            processes=len(parts),
            wall_seconds=max((part["wall_seconds"] for part in parts), default=0.0),
            compiles=sum(part["compiles"] for part in parts),
            failures=sum(part["failures"] for part in parts),
            outstanding=sum(part["outstanding"] for part in parts),
            compile_seconds=sum(part["compile_seconds"] for part in parts),
            aside=sum(sum(part["aside"].values()) for part in parts),
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
            total.calls += row.calls
            total.hits += row.hits
            total.native += row.native
            total.now += row.now
            total.untimed += row.untimed
            for decision, count in row.decisions.items():
                total.decisions[decision] += count
        return total

    def shown_rows(self) -> list[Row]:
        """The rows of the table: the last one stands for all that have no place."""
        if len(self.rows) <= MOST_ROWS:
            return self.rows
        rest = Report([*self.rows[MOST_ROWS - 1 :]], 0, 0, 0, 0, 0, 0, 0).total()
        rest.op = f"{len(self.rows) - MOST_ROWS + 1} more"
        return [*self.rows[: MOST_ROWS - 1], rest]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **{k: v for k, v in self.__dict__.items() if k != "rows"},
            "operators": [row.as_dict() for row in self.rows],
            "total": self.total().as_dict(),
        }

    def print(self, console: Console) -> None:
        """The table, and what it cost."""
        from rich.table import Table

        table = Table(title="eagercache: hooked operators", title_justify="left")
        table.add_column("operator", overflow="fold")
        for name in ("calls", "on kernels", "native ms", "now ms", "gain", "kernels", "native"):
            table.add_column(name, justify="right")
        rows = self.shown_rows()
        for number, row in enumerate(rows):
            table.add_row(*_cells(row), end_section=number == len(rows) - 1)
        table.add_row(*_cells(self.total()))
        console.print(table, markup=False)
        for line in self.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def lines(self) -> Iterable[str]:
        """What the table does not say."""
        total = self.total()
        if self.processes == 0:
            yield "no process reported: none imported torch, or all were killed"
            return
        share = total.native / self.wall_seconds if self.wall_seconds else 0.0
        if self.processes == 1:
            yield (
                f"hooked operators would take {total.native:.2f} s of native time, "
                f"{share:.0%} of the {self.wall_seconds:.2f} s that the program ran"
            )
        else:
            yield (
                f"hooked operators of {self.processes} processes would take {total.native:.2f} s "
                f"of native time; the longest ran {self.wall_seconds:.2f} s"
            )
        yield f"gain: {total.native - total.now:.3f} s, as far as calls were timed"
        yield (
            f"cost: {counted(self.compiles, 'compile')} in other processes, "
            f"{self.compile_seconds:.1f} s of CPU time; {self.failures} failed, "
            f"{self.outstanding} under way at the end"
        )
        if total.untimed:
            have = "is" if total.untimed == 1 else "are"
            yield (
                f"{counted(total.untimed, 'call')} {have} of no known time and not in the times "
                "above"
            )
        if self.aside:
            calls = counted(self.aside, "call")
            yield f"{calls} stepped aside by rule; eagercache.explain() says which one"


def _cells(row: Row) -> list[str]:
    timed = row.native > 0
    gain = 1 - row.now / row.native if timed else 0.0
    return [
        row.op,
        f"{row.calls:,}",
        f"{row.hits / row.calls:.0%}" if row.calls else "",
        f"{row.native * 1e3:.1f}" if timed else "",
        f"{row.now * 1e3:.1f}" if timed else "",
        f"{gain:.0%}" if timed and row.hits else "",
        str(row.decisions.get("kernel", 0)),
        str(row.decisions.get("native", 0) + row.decisions.get("failed", 0)),
    ]


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
