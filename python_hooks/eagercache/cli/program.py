"""Running a program with eagercache switched on, unchanged, and its children too.

A program is started with `_site/sitecustomize.py` first on its path and its settings in one
variable. Python runs that file in every interpreter that inherits both; it waits until torch is
imported and then calls `begin` here. What begins with ``-S``, ``-I`` or ``-E`` is not reached.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "EAGERCACHE_PROGRAM"
SITE = Path(__file__).absolute().parent.parent / "_site"


class CannotStart(ValueError):
    """The program cannot be started; the message is one line."""


@dataclass(frozen=True)
class Settings:
    """What every process of the program does.

    Attributes:
        enable: arguments of `enable()`.
        trace: a trace to record to.
        report: a folder for what each process says when it ends.
        native: nothing is switched on; `_site/sitecustomize.py` measures alone.
        measure: a folder for what `eagercache compare` is told by each process.
        estimate: a folder for what `eagercache estimate` is told by each process.
    """

    enable: Mapping[str, Any] = field(default_factory=dict)
    trace: str = ""
    report: str = ""
    native: bool = False
    measure: str = ""
    estimate: str = ""


def command_of(words: Sequence[str], *, module: bool) -> list[str]:
    """What to start for ``script.py ARGS``, ``-m module ARGS`` or ``executable ARGS``."""
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    if module:
        return [*python, "-m", *words]
    script = Path(words[0])
    if script.is_file() or (script.is_dir() and (script / "__main__.py").is_file()):
        return [*python, *words]
    if script.suffix != ".py" and (found := shutil.which(words[0])) is not None:
        return [found, *words[1:]]
    raise CannotStart(f"there is no program {words[0]}; name a script, or a module with -m")


def environment_of(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that the program starts with."""
    package_parent = str(Path(__file__).absolute().parent.parent.parent)
    path = environ.get("PYTHONPATH", "")
    body = {**asdict(settings), "package": package_parent}
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), path])),
        VARIABLE: json.dumps(body),
    }


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command to its end; its exit status, 128 + N when signal N ended it.

    The signals that end programs are handed on.
    """
    process = subprocess.Popen(command, env=dict(environ))

    def hand_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    # The terminal sends Ctrl-C to the program too, which decides what it means.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, hand_on),
        signal.SIGHUP: signal.signal(signal.SIGHUP, hand_on),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def begin(body: Mapping[str, Any]) -> None:
    """Switches on what the settings say, in a process of the program. Called once torch is there.

    Never raises: a program runs as ever where eagercache cannot.
    """
    try:
        _begin(body)
    except Exception as error:
        print(f"eagercache: is not active in process {os.getpid()}: {error}", file=sys.stderr)


def _begin(body: Mapping[str, Any]) -> None:
    import eagercache

    began = time.monotonic()
    if body["report"]:
        _report_at_exit(Path(body["report"]), began)
    if body["measure"]:
        atexit.register(_quietly, _count)
    if body["estimate"]:
        from eagercache.cli.estimates import estimated_process

        _write_at_exit(Path(body["estimate"]), estimated_process.begin(began))
    eagercache.enable(**body["enable"])
    if body["trace"]:
        eagercache.record(body["trace"])


_counters: dict[str, Any] = {}


def _count() -> None:
    from eagercache.cli.reports.reported_process import process_counters

    _counters.update(process_counters())


def counters() -> dict[str, Any]:
    """What eagercache did in this process, once it ends; for `_site/sitecustomize.py`."""
    return _counters


def _report_at_exit(folder: Path, began: float) -> None:
    from eagercache.base.load import core
    from eagercache.cli.reports.reported_process import process_report
    from eagercache.cli.reports.timeline import Timeline
    from eagercache.frontend import recording

    if core is None:
        return
    recording.listen()
    timeline = Timeline()
    _write_at_exit(folder, lambda: process_report(time.monotonic() - began, timeline))
    timeline.begin()


def _write_at_exit(folder: Path, what: Callable[[], dict[str, Any]]) -> None:
    """Writes into a file of ``folder`` what this process says at its end; its forks write none."""
    owner = os.getpid()

    def write() -> None:
        if os.getpid() != owner:
            return  # a fork
        target = folder / f"{owner}-{time.time_ns()}.json"
        unfinished = target.with_suffix(".part")
        unfinished.write_text(json.dumps(what()))
        unfinished.rename(target)

    atexit.register(_quietly, write)


def _quietly(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception as error:
        print(f"eagercache: process {os.getpid()} cannot report: {error}", file=sys.stderr)
