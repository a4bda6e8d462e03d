"""The report of `eagercache run --report` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from eagercache.calls.texts import NOT_YET, counted
from eagercache.cli.reports.program_report import MOST_ROWS, Report, Row
from eagercache.frontend.remedies import remedy_of_short_programs

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (
    *("calls", "on kernels", "native ms", "now ms", "saved ms"),
    *("kernels", "native", "failed", NOT_YET),
)
_MODULE_COLUMNS = ("modules", "by kernel", "by forward", "saved ms", "refused", NOT_YET)


def print_report(report: Report, console: Console) -> None:
    """The tables, and what they do not say."""
    from rich.table import Table

    table = Table(title="eagercache: hooked operators", title_justify="left")
    table.add_column("operator", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    rows = report.shown_rows()
    for number, row in enumerate(rows):
        table.add_row(*_cells(row), end_section=number == len(rows) - 1)
    table.add_row(*_cells(report.total()))
    console.print(table, markup=False)
    if report.modules:
        table = Table(title="eagercache: whole modules", title_justify="left")
        table.add_column("class", overflow="fold")
        for name in _MODULE_COLUMNS:
            table.add_column(name, justify="right")
        for name, sums in list(report.modules.items())[:MOST_ROWS]:
            counts = [sums["modules"], sums["hits"], sums["native"]]
            saved = _milliseconds(sums["seconds_saved"]) if sums["hits"] else ""
            ends = [sums["refused"], sums["not_yet"]]
            table.add_row(name, *(f"{n:,}" for n in counts), saved, *(f"{n:,}" for n in ends))
        console.print(table, markup=False)
    for line in report_lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _cells(row: Row) -> list[str]:
    timed = row.native > 0
    return [
        row.op,
        f"{row.calls:,}",
        f"{row.hits / row.calls:.0%}" if row.calls else "",
        _milliseconds(row.native) if timed else "",
        _milliseconds(row.now) if timed else "",
        _milliseconds(row.saved - row.lost) if timed and row.hits else "",
        *(f"{row.decisions.get(name, 0):,}" for name in ("kernel", "native", "failed", NOT_YET)),
    ]


def report_lines(report: Report) -> Iterator[str]:
    """What the tables do not say."""
    total = report.total()
    if report.processes == 0:
        yield "no process reported: none imported torch, or all were killed"
        return
    share = total.native / report.wall_seconds if report.wall_seconds else 0.0
    if report.processes == 1:
        yield (
            f"hooked operators would take {total.native:.2f} s of native time, "
            f"{share:.0%} of the {report.wall_seconds:.2f} s that the program ran"
        )
    else:
        yield (
            f"hooked operators of {report.processes} processes would take {total.native:.2f} s "
            f"of native time; the longest ran {report.wall_seconds:.2f} s"
        )
    modules = sum(sums["seconds_saved"] for sums in report.modules.values())
    by_modules = f", {modules:.3f} s by modules" if report.modules else ""
    yield (
        f"saved: {total.saved:.3f} s by operators{by_modules}; lost: {total.lost:.3f} s; estimated "
        "from times that were measured when kernels were made"
    )
    yield (
        f"cost: {counted(report.compiles, 'compile')} in other processes, "
        f"{report.compile_seconds:.1f} s of CPU time; {report.failures} failed, "
        f"{report.not_yet} not yet done at the end"
    )
    if total.untimed:
        have = "is" if total.untimed == 1 else "are"
        yield f"{counted(total.untimed, 'call')} {have} of no known time and not in the times above"
    if report.aside:
        seconds = sum(report.seconds_aside().values())
        rules = ", ".join(f"{rule} {count:,}" for rule, count in report.aside_reasons.items())
        about = f", about {seconds:.2f} s natively" if seconds else ""
        yield f"{counted(report.aside, 'call')} stepped aside by rule ({rules}){about}"
    if report.cut_off or report.forks:
        yield report.processes_text()
    if remedy := remedy_of_short_programs(report.not_yet, " ".join(report.command) or "PROGRAM"):
        yield remedy
