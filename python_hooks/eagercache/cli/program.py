"""Running a program with eagercache switched on, unchanged, and its children too.

A program is started with `_site/sitecustomize.py` first on its path and its settings in one
variable. Python runs that file in every interpreter that inherits both; it waits until torch is
imported and then calls `begin` here. What begins with ``-S``, ``-I`` or ``-E`` is not reached.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "EAGERCACHE_PROGRAM"
# In the folder of a report: eagercache does not fit the program's torch.
INACTIVE = "inactive"
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
    """What to start for ``script.py ARGS``, ``-m module ARGS`` or ``executable ARGS``.

    Python's own ``-c TEXT`` and ``-``, which is standard input, are taken too.
    """
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    if module:
        return [*python, "-m", *words]
    if words[0] in ("-c", "-"):
        return [*python, *words]
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


# What somebody may send to the process that they started, and mean for the program.
_HANDED_ON = {
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
}
_PR_SET_PDEATHSIG = 1


class Runner:
    """Runs a program in the place of this process.

    Signals that a process sends to this one are handed on. Those of the terminal, as Ctrl-C, reach
    the program too, which decides what they mean. It is entered before torch is imported: a signal
    would end this process in a thread of torch's that was started before.
    """

    def __enter__(self) -> Runner:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_HANDED_ON, signal.SIGCHLD})
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Runs a command to its end; its exit status, -N when signal N ended it."""
        library = ctypes.CDLL(None)

        def begin_as_program() -> None:
            # Who kills this process with signal 9 means the program.
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

        process = subprocess.Popen(command, env=dict(environ), preexec_fn=begin_as_program)
        while process.poll() is None:
            seen = signal.sigwaitinfo({*_HANDED_ON, signal.SIGCHLD})
            # A code above 0 is the kernel's, for the terminal.
            if seen.si_signo in _HANDED_ON and seen.si_code <= 0:
                process.send_signal(seen.si_signo)
        return int(process.returncode)


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command to its end as `Runner` does."""
    with Runner() as runner:
        return runner.run(command, environ)


def end_as(code: int) -> NoReturn:
    """Ends this process as `run` says that a program ended: by a signal, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program's own core is the one wanted
        with contextlib.suppress(OSError, ValueError):  # signals 9 and 19 have no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)


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
    from eagercache.cli.reports.report_file import ReportFile
    from eagercache.cli.reports.reported_process import process_report
    from eagercache.cli.reports.timeline import Timeline
    from eagercache.frontend import recording

    if core is None:
        return
    recording.listen()
    file = ReportFile(
        folder, lambda end: process_report(time.monotonic() - began, timeline, at_end=end)
    )
    timeline = Timeline(file.refresh)
    file.begin()
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
