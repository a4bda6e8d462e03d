"""The command line of a conformance run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from . import summary, units
from .runner import Options, Run, State, counted_units, list_units


def _shard(_: Any, __: Any, text: str) -> tuple[int, int]:
    try:
        index, count = map(int, text.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 1 <= index <= count:
        raise click.BadParameter(f"{text!r} is not i/n with 1 <= i <= n")
    return index - 1, count


def _words(_: Any, __: Any, text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if word]


@click.command()
@click.option("--state", type=click.Path(path_type=Path), default=Path("build/conformance"))
@click.option("--also", type=click.Path(path_type=Path), multiple=True, help="A state to add.")
@click.option("--work", type=click.Path(path_type=Path), default=None, help="For kernels, logs.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--ops", callback=_words, default="", help="Names of the database; * at the end.")
@click.option("--dtypes", callback=_words, default="", help="float32,bfloat16,int64,bool,...")
@click.option("--stages", callback=_words, default="", help="first, errors, rest, forms")
@click.option("--shard", callback=_shard, default="1/1", help="i/n: every n-th operator.")
@click.option("--jobs", type=click.IntRange(1), default=2, help="Child processes.")
@click.option("--seconds", type=float, default=None, help="Stop in time; to be gone on with.")
@click.option("--max-kernels", type=int, default=None, help="Stop after so many.")
@click.option("--samples", type=click.IntRange(1), default=None, help="Of a unit, at most.")
@click.option("--json", "as_json", is_flag=True, help="The totals as JSON.")
@click.option("--redo", is_flag=True, help="Units with failures count as not run.")
@click.option(
    "--again",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="A file of units, one a line, that count as not run; they come last.",
)
@click.option("--report", is_flag=True, help="Only say what the state holds.")
@click.option("--write-docs", type=click.Path(path_type=Path), default=None, multiple=True)
@click.option(
    "--version",
    "versions",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="A state of another torch version, for the totals of --write-docs.",
)
@click.option(
    "--fuzz",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="What `make fuzz` wrote to --json, for --write-docs.",
)
def main(
    state: Path,
    also: tuple[Path, ...],
    work: Path | None,
    device: str,
    ops: list[str],
    dtypes: list[str],
    stages: list[str],
    shard: tuple[int, int],
    jobs: int,
    seconds: float | None,
    max_kernels: int | None,
    samples: int | None,
    as_json: bool,
    redo: bool,
    again: Path | None,
    report: bool,
    write_docs: tuple[Path, ...],
    versions: tuple[Path, ...],
    fuzz: tuple[Path, ...],
) -> None:
    """Puts every eligible operator through eagercache and compares it with native.

    Goes on where an earlier run with the same --state ended. What --also names (states of runs
    elsewhere) counts as done and is left as it is. Exit code 1: a disagreement or a crash; 2: it
    could not be run.
    """
    console = Console(stderr=True)
    until = time.time() + seconds if seconds else None
    kept = State.open(state.absolute(), [folder.absolute() for folder in also])
    if redo:
        kept.forget_failures()
    if again is not None:
        kept.run_again(again.read_text(encoding="utf-8").split())
    work = work.absolute() if work is not None else None
    options = Options(device, jobs, until, max_kernels, samples, work)
    try:
        known = list_units(kept, options, ops)
    except RuntimeError as error:
        console.print(str(error))
        sys.exit(2)
    chosen = units.select(known, ops, dtypes, stages, shard)
    if not chosen:
        console.print("no operator of the database has such a name or dtype")
        sys.exit(2)
    if not report:
        run = Run(kept, chosen, options)
        _run(run, console)
        if run.problem:
            console.print(run.problem)
            sys.exit(2)
    totals = summary.totals(kept, known)
    beside = []
    for folder in versions if write_docs else ():
        other = State.open(folder.absolute())
        beside.append((other, counted_units(other, device)))
    programs = [json.loads(path.read_text(encoding="utf-8")) for path in fuzz]
    for path in write_docs:
        page = summary.document(kept, known, device, beside, programs)
        path.write_text(page, encoding="utf-8")
    print(json.dumps(totals, indent=1) if as_json else summary.text(kept, totals))
    sys.exit(1 if totals["disagreements"] or totals["crashes"] else 0)


def _run(run: Run, console: Console) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} units"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("conformance", total=run.total, completed=run.done, left="")

        def show(now: Run) -> None:
            left = now.seconds_left()
            text = "" if left is None else f"{left / 60:.0f} min left, "
            bar.update(
                task,
                completed=now.done,
                left=f"{text}{now.kernels} kernels, {now.disagreements} disagreements",
            )

        said = time.monotonic()

        def say(now: Run) -> None:
            nonlocal said
            show(now)
            if not console.is_terminal and time.monotonic() > said + 30:
                said = time.monotonic()
                fields = bar.tasks[0].fields["left"]
                console.print(f"{now.done}/{now.total} units, {now.stage}, {fields}")

        run.run(say)


if __name__ == "__main__":
    main()
