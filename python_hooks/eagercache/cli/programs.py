"""`eagercache run` and `eagercache record`: unchanged programs, with kernels or recorded."""

from __future__ import annotations

import itertools
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from eagercache.base.torch_versions import platform_problem
from eagercache.calls.texts import counted
from eagercache.cli import program
from eagercache.cli.common import (
    Stopped,
    Unusable,
    json_option,
    print_json,
    require_core,
)
from eagercache.cli.program_options import (
    PROGRAM,
    chosen_arguments,
    command_of,
    enable_arguments,
    enable_options,
    policy_options,
)

if TYPE_CHECKING:
    from eagercache.calls import trace


def _start(runner: program.Runner, command: list[str], settings: program.Settings) -> int:
    try:
        return runner.run(command, program.environment_of(settings, os.environ))
    except OSError as error:
        raise Unusable(f"{command[0]} cannot be started: {error.strerror}") from error


@click.command("run", context_settings=PROGRAM)
@enable_options
@policy_options
@click.option("--report", "reports", is_flag=True, help="End with a table, a page and a picture.")
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where --report saves the page; eagercache-report-PROGRAM-TIME.html if not given.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where --report saves the picture; eagercache-report-PROGRAM-TIME.svg if not given.",
)
@json_option
@click.argument("words", metavar="PROGRAM [ARGUMENTS]...", nargs=-1, required=True)
def run_command(
    reports: bool,
    page: Path | None,
    picture: Path | None,
    as_json: bool,
    words: tuple[str, ...],
    **options: Any,
) -> None:
    """Runs PROGRAM, unchanged, with eagercache enabled; its child processes have it too.

    PROGRAM is a Python script, after -m a module, after -c a text, or a command that starts Python.
    It ends with the program's exit code, or by the signal that ended it. --report ends with a table
    on standard error of where the time of hooked operators went, which moved to kernels, the gain
    and the cost; with --json it is JSON. Where eagercache does not fit the installed torch, PROGRAM
    runs as without it, and one line says so.
    """
    command = command_of(words, options["module"])
    if (page or picture) and not reports:
        raise Unusable("--page and --picture are for --report")
    if not reports:
        arguments = _arguments_of(options)
        if arguments is not None:
            settings = program.Settings(enable=arguments)
            os.environ.update(program.environment_of(settings, os.environ))
        _become(command)
    code = None
    with (
        program.Runner() as runner,
        tempfile.TemporaryDirectory(prefix="eagercache-report-") as folder,
    ):
        arguments = _arguments_of(options)
        if arguments is not None:
            code = _start(runner, command, program.Settings(enable=arguments, report=folder))
            stem = _new_stem(words, options["module"])
            page, picture = page or Path(f"{stem}.html"), picture or Path(f"{stem}.svg")
            _show_report(Path(folder), page, picture, as_json)
    if code is None:
        _become(command)
    program.end_as(code)


def _arguments_of(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `enable()` is given; None, which is said, where eagercache cannot run.

    Whether it fits the torch is found out by the program, once it imports that: here it would cost
    a second and more before the program begins.
    """
    problem = platform_problem(platform.system(), platform.machine())
    if problem is not None:
        click.echo(f"eagercache: is not active: {problem}", err=True)
        return None
    return chosen_arguments(options)


def _become(command: list[str]) -> NoReturn:
    """Goes on as the program."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise Unusable(f"{command[0]} cannot be started: {error.strerror}") from error


def _new_stem(words: tuple[str, ...], module: bool) -> str:
    """A name that no file has: reports of several runs lie side by side."""
    stem = f"eagercache-report-{_name_of(words, module)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (f"{stem}{f'-{number}' if number else ''}" for number in itertools.count())
    return next(n for n in names if not any(Path(f"{n}.{end}").exists() for end in _ENDS))


def _name_of(words: tuple[str, ...], module: bool) -> str:
    """What the program is called: the module, or the file without its folder and ending."""
    first, *rest = words if words[0] != "--" else words[1:]
    if module or first == "-m":
        return first if module else rest[0]
    return {"-c": "command", "-": "stdin"}.get(first) or Path(first).stem or "program"


_ENDS = ("html", "svg")


def _show_report(folder: Path, page: Path, picture: Path, as_json: bool) -> None:
    from rich.console import Console

    from eagercache.cli.reports.program_report import Report
    from eagercache.cli.reports.report_page import save_page
    from eagercache.cli.reports.report_picture import save_picture
    from eagercache.cli.reports.report_text import print_report

    report = Report.read(folder)
    if report.processes == 0 and (folder / program.INACTIVE).exists():
        return  # the program has said why
    problems = {"page": save_page(report, page), "picture": save_picture(report, picture)}
    paths = {"page": str(page), "picture": str(picture)}
    if as_json:
        saved = {name: "" if problems[name] else path for name, path in paths.items()}
        print_json({**report.as_dict(), **saved}, err=True)
        return
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    print_report(report, console)
    for name, path in paths.items():
        console.print(problems[name] or f"{name}: {path}", markup=False, soft_wrap=True)


@click.command("record", context_settings=PROGRAM)
@enable_options
@json_option
@click.option("--append", is_flag=True, help="Add to TRACE where it exists; otherwise it is new.")
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("words", metavar="-- PROGRAM [ARGUMENTS]...", nargs=-1, required=True)
def record_command(
    module: bool,
    ops: tuple[str, ...],
    skip: tuple[str, ...],
    devices: tuple[str, ...],
    directory: Path | None,
    as_json: bool,
    append: bool,
    path: Path,
    words: tuple[str, ...],
) -> None:
    """Runs PROGRAM and writes to TRACE which calls it makes, for `eagercache warm`.

    Every process of the program adds its calls. Kernels that the store has are used, nothing is
    compiled. The exit code is the program's; 1 when that is 0 and nothing was recorded.
    """
    with program.Runner() as runner:
        require_core()
        arguments = enable_arguments(ops, skip, devices, directory)
        command = command_of(words, module)
        _prepare(path, append)
        before = _read(path)
        settings = program.Settings(
            enable={**arguments, "on_miss": "native"}, trace=str(path.absolute())
        )
        os.environ.setdefault("EAGERCACHE_ON_MISS", "native")  # where the program enables itself
        code = _start(runner, command, settings)
    after = _read(path)
    calls = _calls(after) - _calls(before)
    if as_json and (calls or code):
        sections = after.sections - before.sections
        print_json(
            {"calls": calls, "keys": len(after.calls), "sections": sections, "trace": str(path)},
            err=True,
        )
    elif calls:
        held = counted(len(after.calls), "key")
        click.echo(f"{counted(calls, 'call')} recorded; {path} holds {held}", err=True)
    if calls == 0 and code == 0:
        raise Stopped("nothing was recorded: no process of the program called a hooked operator")
    program.end_as(code)


def _prepare(path: Path, append: bool) -> None:
    """Makes the file, or empties it; never one that is no trace."""
    from eagercache.calls import trace

    try:
        if path.exists() and not trace.is_trace(path):
            raise Unusable(f"{path} exists and is no trace; name another file")
        with path.open("ab" if append else "wb"):
            pass
    except OSError as error:
        raise Unusable(f"{path} cannot be written: {error.strerror}") from error


def _read(path: Path) -> trace.Trace:
    from eagercache.calls import trace

    read = trace.Trace()
    try:
        trace.read(path, read)
    except trace.TraceError as error:
        raise Unusable(str(error)) from error
    return read


def _calls(read: trace.Trace) -> int:
    return sum(call.calls for call in read.calls.values())
