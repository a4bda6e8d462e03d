"""A comparison for people: a table, a few lines, and the verdict as the last one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import click

from eagercache.calls.texts import counted
from eagercache.cli.common import size_text, table
from eagercache.cli.compared_output import OutputComparison
from eagercache.cli.comparison import Comparison, Progress, Spread, progress_of
from eagercache.cli.measured_process import Run
from eagercache.frontend.remedies import remedy_of_short_programs

_LONGEST_LINE = 60


def print_comparison(comparison: Comparison, program: str) -> None:
    """Prints all of it."""
    pairs = counted(len(comparison.pairs), "pair")
    cache = "an empty cache" if comparison.fresh else "the cache as it was"
    click.echo(f"{program}: {pairs} of runs, after a first process with kernels over {cache}")
    table(
        "",
        [("", ""), ("native", "right"), ("first with kernels", "right"), ("later ones", "right")],
        list(_rows(comparison)),
    )
    for line in lines_of(comparison, program):
        click.echo(line)
    click.echo(comparison.verdict())


def _rows(comparison: Comparison) -> Iterator[tuple[str, str, str, str]]:
    native, warm = comparison.native_seconds(), comparison.warm_seconds()
    cold = comparison.cold
    yield ("seconds, median", f"{native.median:.3f}", f"{cold.seconds:.3f}", f"{warm.median:.3f}")
    yield ("least to largest", _ends(native), "", _ends(warm))
    yield ("memory", _memory(comparison.natives), _memory([cold]), _memory(comparison.warm))
    workers = max(run.worker_bytes for run in comparison.warm)
    if cold.worker_bytes or workers:
        yield ("memory of compile workers", "", size_text(cold.worker_bytes), size_text(workers))
    gpu = [comparison.gpu_bytes(runs) for runs in (comparison.natives, [cold], comparison.warm)]
    if any(value is not None for value in gpu):
        texts = ["" if value is None else size_text(value) for value in gpu]
        yield ("memory on GPUs", texts[0], texts[1], texts[2])


def _ends(spread: Spread) -> str:
    return f"{spread.low:.3f} to {spread.high:.3f}" if spread.count > 1 else ""


def _memory(runs: Sequence[Run]) -> str:
    size = statistics.median(run.program_bytes for run in runs)
    return size_text(size) if size else ""


def lines_of(comparison: Comparison, program: str) -> Iterator[str]:
    """What the table does not say, but for the verdict."""
    yield from _gain_lines(comparison)
    yield from _output_lines(comparison.output())
    natives, kernels = comparison.codes()
    if natives != kernels:
        yield f"error: exit codes are {natives} natively and {kernels} with kernels"
    if all("hits" not in note for note in comparison.cold.notes):
        yield (
            "eagercache was active in no process: none imported torch, or all ended without "
            "running what is to run at exit"
        )
    elif comparison.hits() == 0 and not comparison.not_yet():
        yield "no call was answered by a kernel: `eagercache run --report` says what decided so"
    if comparison.unsettled():
        later = counted(len(comparison.warm), "later process", "later processes")
        yield (
            f"kernels were still being made in {comparison.unsettled()} of {later}: they may "
            "become faster"
        )
    if remedy := remedy_of_short_programs(comparison.not_yet(), program):
        yield remedy
    if any(run.workers_left for run in (comparison.cold, *comparison.warm)):
        yield "a compile worker outlived the wait after a run (--settle) and ran beside the next"


def _gain_lines(comparison: Comparison) -> Iterator[str]:
    lost = comparison.cold.seconds - comparison.native_seconds().median
    paid = comparison.paid_after()
    if lost <= 0:
        yield f"the first process with kernels was {-lost:.2f} s faster than native already"
    elif paid is not None:
        yield (
            f"the first process with kernels was {lost:.2f} s slower than native; kernels have "
            f"paid for that after {paid:.1f} s of running"
        )
    elif comparison.ratio().sign < 0:
        yield (
            f"the first process with kernels was {lost:.2f} s slower than native, and no later one "
            "pays for that"
        )
    else:
        yield (
            f"the first process with kernels was {lost:.2f} s slower than native; when later ones "
            "have paid for that is not known, because no gain is sure"
        )
    for name, runs in (("the first process", [comparison.cold]), ("later ones", comparison.warm)):
        progress = progress_of(comparison.natives, runs)
        if progress is None:
            yield "it prints too little, or too late, to see when within a process the gain begins"
            return
        yield f"within {name}, by its lines or progress bars: {_progress_text(progress)}"


def _progress_text(progress: Progress) -> str:
    if progress.lost == 0.0:
        return "never behind native"
    text = f"{progress.lost:.2f} s behind native at most, at second {progress.turn:.1f}"
    if progress.even is None:
        return f"{text}, and not even at the end"
    return f"{text}, never behind from second {progress.even:.1f} on"


def _output_lines(output: OutputComparison) -> Iterator[str]:
    seen = f"{counted(output.numbers, 'number')} in {counted(output.lines, 'line')} of output"
    if output.largest is not None:
        largest = output.largest
        yield (
            f"{seen}: {output.differing} with kernels are not native's; the largest relative "
            f"difference is {largest.relative:.1e}, in line {largest.line}: "
            f"{largest.native_number!r} natively, {largest.kernels_number!r} with kernels"
        )
    elif output.lines:
        yield f"{seen}: all are native's"
    if output.text is not None:
        text = output.text
        yield (
            f"line {text.line} of the output has other words: {_short(text.native)} natively, "
            f"{_short(text.kernels)} with kernels"
        )
    if output.missing:
        yield f"the outputs differ by {counted(output.missing, 'line')} in length"
    if output.changing:
        yield (
            f"{counted(output.changing, 'more number or line', 'more numbers or lines')} of the "
            "output changed between native runs too, as times do, and were left out"
        )


def _short(line: str) -> str:
    return repr(line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "...")
