"""`eagercache warm`: compiles ahead of time what traces need."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from eagercache.base import config
from eagercache.calls.texts import argument_texts, counted
from eagercache.cli.common import (
    Unusable,
    directory_option,
    json_option,
    print_json,
    size_text,
    table,
)

if TYPE_CHECKING:
    from eagercache.ahead.budget import Budget
    from eagercache.ahead.report import Planned, WarmReport


class Compiling(Protocol):
    """What a progress bar shows."""

    @property
    def done(self) -> int:
        """What has its answer."""

    @property
    def total(self) -> int:
        """What is done, and to be done."""

    def seconds_left(self) -> float:
        """Until the end, as far as can be told."""


@click.command("warm")
@directory_option
@json_option
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Only calls on this device.")
@click.option("--budget", help="Stop after a time (120s, 10min, 2h) or a size (2GB).")
@click.option("--dry-run", is_flag=True, help="Say what would be compiled and what it would take.")
@click.option("--op", "ops", multiple=True, help="Only these operators, such as aten::var.")
@click.option("--skip", multiple=True, help="Not these operators.")
@click.option("--choose", type=click.Choice(config.CHOOSE), default="faster", show_default=True)
@click.option(
    "--numerics", type=click.Choice(config.NUMERICS), default="accurate", show_default=True
)
@click.option(
    "--search",
    type=click.Choice(config.SEARCH),
    help="How far faster forms of CUDA kernels are looked for; EAGERCACHE_SEARCH by default.",
)
@click.option(
    "--scale",
    type=click.IntRange(min=1),
    default=1,
    help="Divide the batch dimension of calls out of operator logs by this.",
)
@click.option("--workers", type=click.IntRange(min=1), help="All cores by default.")
@click.option(
    "--shard",
    metavar="INDEX/COUNT",
    help="Only this part of the keys, as 0/8; auto: as the task of a Slurm array or of an indexed "
    "Kubernetes job is told.",
)
@click.option(
    "--on",
    metavar="WHERE",
    help="Where to compile: local:8 (this machine), dask://HOST:PORT, ray://HOST:PORT or ray://auto.",
)
@click.argument("traces", nargs=-1, type=click.Path(path_type=Path))
@click.pass_context
def warm_command(
    context: click.Context,
    directory: Path | None,
    as_json: bool,
    device: config.Device | None,
    budget: str | None,
    dry_run: bool,
    ops: tuple[str, ...],
    skip: tuple[str, ...],
    choose: config.Choose,
    numerics: config.Numerics,
    search: config.Search | None,
    scale: int,
    workers: int | None,
    shard: str | None,
    on: str | None,
    traces: tuple[Path, ...],
) -> None:
    """Compiles into the store what TRACES need, largest expected gain first.

    Without TRACES: what was being compiled when programs ended, for which --dir, --json, --dry-run,
    --budget (a time) and --workers are the options.

    TRACES are files of `eagercache record`, operator logs, or folders of either. Nothing is
    compiled twice: what the store has is left alone, also after a run that was killed. Exit code 1
    when something failed that another run may mend (no memory, no disk, no compiler), or after
    Ctrl-C; calls for which no kernel can be made, and what a budget left out, are no failures.
    """
    from eagercache.ahead import warm
    from eagercache.ahead.errors import WarmError

    if not traces:
        _warm_pending(context, directory, as_json, budget, dry_run, workers or 0)
        return
    with _progress_bar(shown=not dry_run and not as_json) as progress:
        try:
            report = warm.warm_up(
                *traces,
                device=device,
                budget=_budget(budget),
                dry_run=dry_run,
                ops=ops or None,
                skip=skip,
                choose=choose,
                numerics=numerics,
                search=search,
                scale=scale,
                workers=workers or 0,
                cache_dir=directory,
                progress=progress,
                shard=shard,
                on=on,
            )
        except WarmError as error:
            raise Unusable(str(error)) from error
    if as_json:
        print_json(report.as_dict())
    else:
        _print_report(report)
    if not report.ok:
        sys.exit(1)


def _warm_pending(
    context: click.Context,
    directory: Path | None,
    as_json: bool,
    budget: str | None,
    dry_run: bool,
    workers: int,
) -> None:
    from eagercache.ahead.errors import WarmError
    from eagercache.cli import warm_pending

    for name in ("device", "ops", "skip", "choose", "numerics", "search", "scale", "on"):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = "--op" if name == "ops" else f"--{name}"
            raise Unusable(f"{option} is about traces; name one, made by `eagercache record`")
    try:
        limit = _budget(budget)
    except WarmError as error:
        raise Unusable(str(error)) from error
    if limit is not None and limit.seconds is None:
        raise Unusable(f"the budget {budget!r} is no time (120s, 10min, 2h)")
    with _progress_bar(shown=not dry_run and not as_json) as progress:
        report = warm_pending.compile_pending(
            directory, workers, limit.seconds if limit is not None else None, dry_run, progress
        )
    if as_json:
        print_json(report.as_dict())
    else:
        report.show()
    if not report.ok:
        sys.exit(1)


def _budget(text: str | None) -> Budget | None:
    """The budget, less what this process has spent on starting."""
    from eagercache.ahead.budget import Budget

    if text is None:
        return None
    budget = Budget.parse(text)
    if budget.seconds is None:
        return budget
    return Budget(seconds=max(0.0, budget.seconds - _process_age()))


def _process_age() -> float:
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds after the boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return 0.0


@contextlib.contextmanager
def _progress_bar(*, shown: bool) -> Iterator[Callable[[Compiling], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
    task: Any = None

    def update(run: Compiling) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task("", total=run.total, left="")
        bar.update(task, completed=run.done, left=f"{_duration(run.seconds_left())} left")

    try:
        yield update
    finally:
        if task is not None:
            bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# A trace of a large model has thousands of keys.
_MOST_ROWS = 50


def _print_report(report: WarmReport) -> None:
    rows = [
        entry
        for entry in report.entries
        if report.dry_run or entry.state not in ("found", "left", "ineligible")
    ]
    shown = rows[:_MOST_ROWS]
    if shown:
        table(
            "to compile, largest expected gain first" if report.dry_run else "what was done",
            [
                ("operator", ""),
                ("call", ""),
                ("calls", "right"),
                ("gain ms", "right"),
                ("result", ""),
                ("why", ""),
            ],
            [
                (
                    entry.call.name,
                    ", ".join(argument_texts(entry.description["args"])),
                    str(entry.call.calls),
                    f"{entry.gain_ns / 1e6:.2f}",
                    _result(entry, report.dry_run),
                    entry.reason,
                )
                for entry in shown
            ],
        )
    if len(rows) > len(shown):
        click.echo(f"and {len(rows) - len(shown)} more; --json has all of them")
    for entry in rows[_MOST_ROWS:]:
        if entry.state == "failed":
            click.echo(f"failed: {entry.call.name}: {entry.reason}")
    for problem in report.problems:
        click.echo(f"left out: {problem}")
    for reason, count in report.refused.items():
        click.echo(f"not taken, {count}: {reason}")
    click.echo(_summary(report))


def _result(entry: Planned, dry_run: bool) -> str:
    if entry.state == "left":
        return "to compile" if dry_run else "not reached"
    if entry.state == "ineligible":
        return "no kernel can be"
    if entry.state == "found":
        return f"{entry.verdict} (found)"
    return entry.verdict


def _summary(report: WarmReport) -> str:
    states = Counter(entry.state for entry in report.entries)
    parts = [f"{counted(len(report.entries), 'key')}: {states['found']} found in the store"]
    if report.dry_run:
        parts.append(f"{states['left']} to compile")
        parts.append(f"{states['ineligible']} that no kernel can be made for")
        return (
            f"{', '.join(parts)}; about {_duration(report.seconds)} with "
            f"{counted(report.workers, 'worker')}, {size_text(report.bytes)}"
        )
    kernels = report.count(state="compiled", verdict="kernel")
    native = report.count(state="compiled", verdict="native")
    parts.append(f"{counted(kernels, 'kernel')} compiled")
    parts.append(f"{native} that native keeps")
    for state, text in (
        ("failed", "failed"),
        ("ineligible", "that no kernel can be made for"),
        ("left", "not reached"),
    ):
        if states[state]:
            parts.append(f"{states[state]} {text}")
    text = f"{', '.join(parts)}; {_duration(report.seconds)}, {size_text(report.bytes)}"
    if report.machines:
        text += f"; on {counted(len(report.machines), 'machine')}"
    if report.lost:
        text += f", {counted(report.lost, 'batch', 'batches')} lost with a machine and tried again"
    return text + ("; interrupted" if report.interrupted else "")
