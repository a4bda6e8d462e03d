"""What the demo shows: timings, the table of operators, and the table as a picture."""

from __future__ import annotations

import platform
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    import eagercache
    from rich.console import Console

# An operator, its overload, and the sizes and strides of the tensors in its arguments.
CallSite = tuple[str, str, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]

COLUMNS = ("operator", "shapes", "calls a pass", "native us", "kernel us", "decision")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one pass: the median, and the middle half of the runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summarise the seconds of single passes."""
        low, median, high = statistics.quantiles([1e3 * value for value in seconds], n=4)
        return cls(median=median, low=low, high=high, runs=len(seconds))

    def __str__(self) -> str:
        return (
            f"{self.median:.2f} ms a pass (median of {self.runs}; "
            f"the middle half lies between {self.low:.2f} and {self.high:.2f})"
        )


@dataclass(frozen=True)
class Row:
    """One operator, and the calls of it for which one decision was made.

    The times are means over the calls of one pass, in microseconds, and None where nothing was
    measured. A kernel that could not be compiled, or that did not equal native closely enough, has
    failed; `reason` says why, for the first shape.
    """

    operator: str
    shapes: int
    calls: int
    native_us: float | None
    kernel_us: float | None
    decision: str
    reason: str


@dataclass(frozen=True)
class SecondProcess:
    """What the process on the warm cache measured.

    Attributes:
        digests: the keys whose verdicts it met, from the cache or of its own compiles.
    """

    native: Timing
    cached: Timing
    difference: float
    bound: float
    ready_s: float
    hits: int
    compiles: int
    failures: int
    digests: list[str]
    rows: list[Row]

    def compiled_again(self, known: set[str]) -> bool:
        """Return whether it compiled a key of `known`, those that were decided before it began.

        More calls may ask for kernels that fewer did not (see SETTLED_PASSES): those are new keys.
        """
        return self.compiles + self.failures > len(set(self.digests) - known)

    @classmethod
    def of(cls, data: dict[str, Any]) -> SecondProcess:
        """Rebuild from the JSON that the process wrote."""
        return cls(
            **{
                **data,
                "native": Timing(**data["native"]),
                "cached": Timing(**data["cached"]),
                "rows": [Row(**row) for row in data["rows"]],
            }
        )


@dataclass(frozen=True)
class Outcome:
    """Everything that the last table says."""

    title: str
    kept: bool  # the cache was not empty at the start
    first_compiles: int
    second: SecondProcess


def processor() -> str:
    """Return the processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def call_site(kernel: eagercache.KernelInfo) -> CallSite:
    """Return the operator of a kernel and the layout of the tensors that it is for."""
    layout = []
    for argument in kernel.call["args"]:
        elements = argument["elements"] if argument["kind"] == "tensor_list" else [argument]
        layout += [
            (tuple(element["sizes"]), tuple(element["strides"]))
            for element in elements
            if element["kind"] == "tensor"
        ]
    return kernel.op, kernel.overload, tuple(layout)


def rows_of(kernels: list[eagercache.KernelInfo], calls: Counter[CallSite]) -> list[Row]:
    """Gather the calls of one pass by operator and decision, the costliest natively first."""
    left = Counter(calls)
    groups: dict[tuple[str, str], list[tuple[eagercache.KernelInfo, int]]] = defaultdict(list)
    for kernel in kernels:
        count = left.pop(call_site(kernel), 0)
        if count:
            name = ".".join(filter(None, (kernel.op.removeprefix("aten::"), kernel.overload)))
            groups[name, kernel.decision].append((kernel, count))
    rows = [
        Row(
            operator=name,
            shapes=len(members),
            calls=sum(count for _, count in members),
            native_us=_mean_us([(kernel.native_ns, count) for kernel, count in members]),
            kernel_us=_mean_us([(kernel.kernel_ns, count) for kernel, count in members]),
            decision=decision,
            reason=members[0][0].reason,
        )
        for (name, decision), members in groups.items()
    ]
    return sorted(rows, key=lambda row: -(row.native_us or 0.0) * row.calls)


def _mean_us(times: list[tuple[float | None, int]]) -> float | None:
    known = [(value, count) for value, count in times if value is not None]
    if not known:
        return None
    return sum(value * count for value, count in known) / sum(count for _, count in known) / 1e3


def _cells(row: Row) -> tuple[str, ...]:
    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    return (
        row.operator,
        str(row.shapes),
        str(row.calls),
        text(row.native_us),
        text(row.kernel_us),
        row.decision,
    )


def lines_of(outcome: Outcome) -> list[str]:
    """Return the sentences below the table."""
    second = outcome.second
    if not outcome.kept:
        when = "in this run"
    elif outcome.first_compiles == 0:
        when = "in the run that filled the cache; nothing was compiled in this one"
    else:
        when = "in this run, or in the one that left the cache"
    refused = [
        f"{row.operator} stays native: {row.reason}"
        for row in second.rows
        if row.decision == "failed"
    ]
    return [
        *refused,
        f"native us and kernel us were measured when the decision was made, {when}.",
        f"native:          {second.native}",
        f"with eagercache: {second.cached}",
        f"ratio of the medians: x{second.native.median / second.cached.median:.3f} "
        "(passes in turn, in the second process)",
        f"largest output difference: {second.difference:.2e} (bound {second.bound:.2e})",
        f"compiles: first process {outcome.first_compiles}, second process {second.compiles}",
        f"hits in the second process: {second.hits}; kernels loaded after {second.ready_s:.2f} s",
    ]


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print the table and the sentences below it."""
    table = Table(title=outcome.title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("operator", "decision") else "right")
    for row in outcome.second.rows:
        style = {"kernel": "green", "failed": "red"}.get(row.decision)
        table.add_row(*_cells(row), style=style)
    console.print()
    console.print(table)
    for line in lines_of(outcome):
        console.print(line, soft_wrap=True)


def save_picture(path: Path, outcome: Outcome) -> None:
    """Draw the model's two times above the same table."""
    import matplotlib as mpl  # half a second that the second process does not need

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = outcome.second.rows
    figure, (bars, grid) = pyplot.subplots(
        2, 1, figsize=(10, 3.4 + 0.3 * len(rows)), height_ratios=[1.3, 0.6 + 0.3 * len(rows)]
    )
    timings = [outcome.second.cached, outcome.second.native]
    medians = [timing.median for timing in timings]
    spread = [
        [timing.median - timing.low for timing in timings],
        [timing.high - timing.median for timing in timings],
    ]
    bars.barh(["with eagercache", "native"], medians, xerr=spread, color=["#2a9d8f", "#8d99ae"])
    bars.set_xlabel("ms a pass: median, and the middle half of the runs")
    bars.set_xlim(left=0)
    bars.set_title(
        f"{outcome.title}: x{medians[1] / medians[0]:.3f}, "
        f"{outcome.second.compiles} compiles in the second process"
    )
    for side in ("top", "right"):
        bars.spines[side].set_visible(False)

    grid.axis("off")
    table = grid.table(
        cellText=[_cells(row) for row in rows] or [["-"] * len(COLUMNS)],
        colLabels=COLUMNS,
        colWidths=[0.36, 0.1, 0.14, 0.13, 0.13, 0.14],
        loc="upper center",
        cellLoc="right",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.3)
    for index, row in enumerate(rows, start=1):
        table[index, 0].get_text().set_horizontalalignment("left")
        if row.decision == "kernel":
            table[index, 5].set_facecolor("#d8f3dc")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
