"""`eagercache estimate`: what kernels would bring a program, before any is compiled."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from eagercache.calls.texts import counted
from eagercache.cli import program
from eagercache.cli.common import Unusable, json_option, print_json, require_core, table
from eagercache.cli.program_options import PROGRAM, command_of, enable_arguments

if TYPE_CHECKING:
    from eagercache.cli.estimates.estimation import Estimate, Part

MOST_ROWS = 15


@click.command("estimate", context_settings=PROGRAM)
@click.option("-m", "module", is_flag=True, help="The program is a module, as of python -m.")
@json_option
@click.argument("words", metavar="PROGRAM [ARGUMENTS]...", nargs=-1, required=True)
def estimate_command(module: bool, as_json: bool, words: tuple[str, ...]) -> None:
    """Runs PROGRAM natively and says what kernels would probably save of its time.

    Nothing is compiled, and no kernel of a cache is used. Recorded are the operators that enable()
    hooks and the outermost modules, with their times; what such calls gained where they were
    measured comes with the package. The bounds are those of the measurements: what nothing is known
    of, and what runs on a GPU, counts as no gain. `eagercache compare` measures what this guesses.

    The tables go to standard error, with --json as JSON; the exit code is the program's.
    """
    command = command_of(words, module)
    with (
        program.Runner() as runner,
        tempfile.TemporaryDirectory(prefix="eagercache-estimate-") as folder,
    ):
        require_core()
        from eagercache.cli.estimates.estimation import Estimate

        said = Path(folder, "said")
        said.mkdir()
        # An empty cache, so that none of the program's calls has a kernel.
        arguments = enable_arguments((), (), (), Path(folder, "cache"))
        settings = program.Settings(
            enable={**arguments, "on_miss": "native"}, estimate=str(said.absolute())
        )
        try:
            code = runner.run(command, program.environment_of(settings, os.environ))
        except OSError as error:
            raise Unusable(f"{command[0]} cannot be started: {error.strerror}") from error
        estimate = Estimate.read(said)
    if as_json:
        print_json(estimate.as_dict(), err=True)
    else:
        _print(estimate)
    program.end_as(code)


def _print(estimate: Estimate) -> None:
    if estimate.processes == 0:
        click.echo("no process reported: none imported torch, or all were killed", err=True)
        return
    with contextlib.redirect_stdout(sys.stderr):
        for title, parts in (("operator", estimate.operators), ("module", estimate.modules)):
            if parts:
                table(
                    f"{title}s, by their native time",
                    [
                        (title, ""),
                        *((name, "right") for name in ("calls", "native s", "low", "middle")),
                        ("high: seconds saved", "right"),
                    ],
                    [_cells(part) for part in parts[:MOST_ROWS]],
                )
    for line in lines_of(estimate):
        click.echo(line, err=True)


def _cells(part: Part) -> list[str]:
    if part.seconds == 0:
        saved = ["", "", "not timed"]
    elif part.known:
        saved = [f"{value:.3f}" for value in vars(part.saved).values()]
    else:
        saved = ["", "", "not measured"]
    return [part.name, f"{part.calls:,}", f"{part.seconds:.3f}", *saved]


def lines_of(estimate: Estimate) -> Iterator[str]:
    """What the tables come to."""
    yield f"the program ran {estimate.wall_seconds:.2f} s, all of its processes together"
    ways = (
        ("operators", "eagercache run", estimate.operators),
        ("outermost modules", "eagercache run --modules auto", estimate.modules),
    )
    for what, command, parts in ways:
        if not parts:
            yield f"no {what.removesuffix('s')} was called"
            continue
        shares = estimate.shares(parts)
        yield (
            f"{what} took {shares['time']:.0%} of that; gains are known of {shares['known']:.0%}: "
            f"kernels would save {shares['low']:.0%} to {shares['high']:.0%} of the program's "
            f"time, {shares['middle']:.0%} in the middle ({command})"
        )
    untimed = sum(part.untimed for part in estimate.operators)
    if untimed:
        yield f"not timed, on a GPU for one, so that no gain is assumed: {counted(untimed, 'call')}"
    if any(part.name.endswith("(training)") for part in estimate.modules):
        yield "modules that need gradients have kernels with --training alone"
    overlap = "the two overlap, and are no sum; " if estimate.operators and estimate.modules else ""
    yield f"{overlap}measured in " + ", ".join(estimate.sources)
    yield "eagercache compare measures what is guessed here"
