"""`eagercache compare`: a program natively and with kernels, by turns, as whole processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from eagercache.cli.common import LENGTH, Unusable, json_option, print_json, require_core
from eagercache.cli.program import Settings
from eagercache.cli.program_options import (
    PROGRAM,
    chosen_arguments,
    command_of,
    enable_options,
    policy_options,
)

if TYPE_CHECKING:
    from eagercache.cli.comparison import Comparison
    from eagercache.cli.measured_process import Run

_SIDES = {False: "natively", True: "with kernels"}


class _ProgramFailed(Unusable):
    """The program ended with another exit status than 0."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc] # click has it on the class


@click.command("compare", context_settings=PROGRAM)
@enable_options
@policy_options
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Pairs of runs: one native and one with kernels.",
)
@click.option("--fresh", is_flag=True, help="Over an empty cache, which is removed afterwards.")
@click.option(
    "--input",
    "text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Standard input of each run; nothing if not given.",
)
@click.option(
    "--settle",
    type=LENGTH,
    default=600.0,
    show_default=True,
    help="Seconds to wait after each run for compile workers that outlive it.",
)
@json_option
@click.argument("words", metavar="PROGRAM [ARGUMENTS]...", nargs=-1, required=True)
def compare_command(
    runs: int,
    fresh: bool,
    text: Path | None,
    settle: float,
    as_json: bool,
    words: tuple[str, ...],
    **options: Any,
) -> None:
    """Runs PROGRAM natively and with kernels, by turns, and says what kernels bring it.

    The first run is native and in no figure: it finds files on a cold disk. Then comes the first
    process with kernels, which compiles what the cache lacks, and then pairs of a native process
    and one with kernels. Compared are the time of whole processes, memory, the numbers that are
    printed, and exit codes. What PROGRAM prints is shown only where it fails.

    The exit code is PROGRAM's where it fails both ways, and 1 where it ends otherwise with kernels
    than natively.
    """
    require_core()
    if fresh and options["directory"] is not None:
        raise Unusable("--fresh and --dir name two caches; give one of them")
    arguments = chosen_arguments(options)
    command = command_of(words, options["module"])
    with _cache(fresh) as variables, _ending_on_sigterm():
        runner = _Runner(command, arguments, variables, text.read_bytes() if text else b"", settle)
        comparison = _measure(runner, runs, fresh)
    if as_json:
        print_json({**comparison.as_dict(), "command": command})
    else:
        from eagercache.cli.comparison_text import print_comparison

        print_comparison(comparison, " ".join(words))
    natives, kernels = comparison.codes()
    if natives != kernels:
        sys.exit(1)


@contextlib.contextmanager
def _cache(fresh: bool) -> Iterator[dict[str, str]]:
    """The variables that name the cache."""
    if not fresh:
        yield {}
        return
    folder = tempfile.mkdtemp(prefix="eagercache-fresh-")
    try:
        yield {"EAGERCACHE_DIR": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a worker may be writing still


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Has SIGTERM end the run that is under way too."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Runner:
    """Runs the program either way; says on a terminal which run is under way."""

    def __init__(
        self,
        command: list[str],
        arguments: dict[str, Any],
        variables: dict[str, str],
        text: bytes,
        settle: float,
    ) -> None:
        self._command, self._arguments, self._text = command, arguments, text
        self._variables, self._settle = variables, settle
        self._count = 0
        self.total = 0

    def run(self, *, kernels: bool) -> Run:
        """One run. Unusable where it cannot be started."""
        from rich.console import Console

        from eagercache.cli.measured_process import measured

        environ = {**os.environ, **self._variables}
        if kernels:
            settings = Settings(enable=self._arguments)
        else:
            settings = Settings(native=True)
            environ["EAGERCACHE_DISABLE"] = "1"  # where the program enables it itself
        self._count += 1
        said = f"run {self._count} of {self.total}, {_SIDES[kernels]}"
        console = Console(stderr=True)
        shown = console.status(said) if console.is_terminal else contextlib.nullcontext()
        try:
            with shown:
                return measured(
                    self._command, settings, environ, text=self._text, settle=self._settle
                )
        except OSError as error:
            raise Unusable(f"{self._command[0]} cannot be started: {error.strerror}") from error


def _measure(runner: _Runner, pairs: int, fresh: bool) -> Comparison:
    """All runs. _ProgramFailed where one ends with another status than 0."""
    from eagercache.cli.comparison import Comparison

    runner.total = 2 + 2 * pairs
    first = runner.run(kernels=False)
    cold = runner.run(kernels=True)
    if first.code != 0 and cold.code == first.code:
        _show(first, kernels=False)
        message = f"the program ends with exit code {first.code}, natively and with kernels"
        raise _ProgramFailed(message, first.code)
    _require_success(first, kernels=False)
    _require_success(cold, kernels=True)
    comparison = Comparison(first, cold, fresh=fresh)
    for number in range(pairs):
        by_side = {}
        for kernels in (False, True) if number % 2 == 0 else (True, False):
            by_side[kernels] = runner.run(kernels=kernels)
            _require_success(by_side[kernels], kernels=kernels)
        comparison.pairs.append((by_side[False], by_side[True]))
    return comparison


def _require_success(run: Run, *, kernels: bool) -> None:
    if run.code == 0:
        return
    _show(run, kernels=kernels)
    raise _ProgramFailed(
        f"the program ended with exit code {run.code} {_SIDES[kernels]}, and otherwise in "
        "another run",
        1,
    )


# Of a program's output, the last lines.
_SHOWN_LINES = 200


def _show(run: Run, *, kernels: bool) -> None:
    """What a run printed."""
    for name, lines in (("output", run.lines), ("errors", run.errors.splitlines())):
        if lines:
            click.echo(f"--- {name} of the program {_SIDES[kernels]}", err=True)
            click.echo("\n".join(lines[-_SHOWN_LINES:]), err=True)
            click.echo("---", err=True)
