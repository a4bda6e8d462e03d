"""One compile worker, as the service sees it."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagercache.base import private_file
from eagercache.base.config import WORKER_VARIABLE
from eagercache.base.log import event
from eagercache.base.store_directory import BYTECODE_FOLDER, HEADERS_FOLDER
from eagercache.base.trouble import is_trouble_of_machine
from eagercache.base.worker_environment import (
    START_FOLDER,
    absolute_entries,
    import_paths,
)
from eagercache.base.worker_variables import passed_variables
from eagercache.service.process_group import ProcessGroup
from eagercache.service.request import Response
from eagercache.service.settings import ServiceSettings
from eagercache.service.tether import Tether
from eagercache.service.worker_pipe import PipeTimeout, WorkerPipe

log = logging.getLogger("eagercache")
INFO, DEBUG = logging.INFO, logging.DEBUG


# How much nicer a worker is than its program, which goes on meanwhile: where both want a processor,
# the worker gets a twentieth of it.
NICENESS = 13
# A process group of its own: Ctrl-C in the terminal does not reach it, and one signal ends it with
# its compilers. Not a session of its own, between which Linux shares processors first, however nice
# their processes are (sched_autogroup). Python 3.10 knows no other way, though.
_OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)

# Not resolved: in a build tree the modules are links, and the extension module lies beside those.
_PACKAGE_PARENT = Path(__file__).absolute().parent.parent.parent

# What code that is wrong raises in itself. Every other signal is somebody else's: the kernel's when
# memory or a disk is full, an administrator's, a terminal's.
_SIGNALS_OF_CODE = frozenset(
    {
        signal.SIGABRT,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
# The same of what a worker says last.
_ERRORS_OF_MACHINE = ("ImportError:", "MemoryError", "ModuleNotFoundError:", "OSError:")


class WorkerLost(Exception):
    """The worker is gone. ``timed_out`` when we ended it; ``transient``: not the call's fault.

    ``at`` is the index of the request of a batch that it was at, where that is known.
    """

    at: int | None = None
    replaced = False  # it was ended for another one: nothing was wrong

    def __init__(self, reason: str, *, timed_out: bool = False, transient: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out
        self.transient = transient or timed_out


_FRAME = re.compile(r'\s*File "(.+)", line (\d+) in (.+)')


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the many real-time signals
        return "a real-time signal"


def _place_in(lines: Sequence[str]) -> str:
    """Where a process was when a signal killed it, as `faulthandler` says, innermost first."""
    for line in lines:
        if found := _FRAME.fullmatch(line):
            return f" in {found[3]} ({Path(found[1]).name}:{found[2]})"
    return ""


def give_way_to_callers() -> None:
    """Has this thread, and what it starts, never take the processor from the caller who wakes it.

    It runs where a processor is free, or when the caller's turn is over.
    """
    with contextlib.suppress(OSError):  # as where a sandbox does not know these calls
        if os.sched_getscheduler(0) != os.SCHED_IDLE:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _default_memory() -> int:
    """Half of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def worker_environment(settings: ServiceSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that a worker starts with: what `base.worker_variables` lists, and ours."""
    kept = passed_variables(environ)
    kept.update(import_paths(_PACKAGE_PARENT, environ))
    # The worker is in another folder.
    for name in ("PATH", "LD_LIBRARY_PATH"):
        if name in kept:
            kept[name] = os.pathsep.join(absolute_entries(kept[name]))
    for name in ("CC", "CXX"):
        if os.sep in kept.get(name, "") and " " not in kept[name]:
            kept[name] = os.path.abspath(kept[name])  # noqa: PTH100
    kept[WORKER_VARIABLE] = "1"
    kept["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    bytecode = bytecode_folder(Path(settings.store_root), environ)
    if bytecode is not None:
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        kept["PYTHONPYCACHEPREFIX"] = str(bytecode)
    # CPU calls need no CUDA context.
    kept["CUDA_VISIBLE_DEVICES"] = (
        "" if settings.gpu is None else _gpu_name(settings.gpu, environ.get("CUDA_VISIBLE_DEVICES"))
    )
    kept.update(settings.extra_environment)
    return kept


def inductor_folder() -> Path:
    """Where Inductor's sources are."""
    return Path(torch.__file__).parent / "_inductor"


def has_bytecode() -> bool:
    """Whether Inductor's compiled sources are where Python looks for them."""
    source = inductor_folder() / "lowering.py"
    return Path(importlib.util.cache_from_source(str(source))).exists()


def bytecode_folder(store_root: Path, environ: Mapping[str, str]) -> Path | None:
    """Where workers keep Inductor's compiled sources, which nobody else keeps; None where one does.

    To compile them costs more than all else that a worker does before its first kernel, and in
    images where packages have no bytecode, and may get none, every worker would do it anew.
    """
    if (
        environ.get("PYTHONPYCACHEPREFIX")
        or not store_root.is_absolute()
        or not store_root.is_dir()
    ):
        return None
    kept_by_python = not environ.get("PYTHONDONTWRITEBYTECODE") and os.access(
        inductor_folder(), os.W_OK
    )
    if has_bytecode() or kept_by_python or not private_file.is_private(store_root):
        return None
    folder = store_root / BYTECODE_FOLDER
    return None if private_file.foreign_entry(folder) else folder


@functools.cache
def warn_about_foreign_entries(store_root: Path) -> None:
    """Says once what others may have left in a store's folders of code, which is not used then."""
    for name in (BYTECODE_FOLDER, HEADERS_FOLDER):
        if problem := private_file.foreign_entry(store_root / name):
            log.warning(
                "eagercache: %s, so %s is not used; other users were able to put files into this "
                "store: delete it (rm -r %s), it fills again",
                problem,
                store_root / name,
                shlex.quote(str(store_root)),
            )


def _gpu_name(index: int, visible: str | None) -> str:
    """How CUDA_VISIBLE_DEVICES names what is GPU ``index`` in a process where it is ``visible``."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    return names[index] if index < len(names) else str(index)


def _start(settings: ServiceSettings, kept: int) -> subprocess.Popen[bytes]:
    """A worker by exec, never by a fork of this (threaded) process, with ``kept`` left open."""
    return subprocess.Popen(
        [
            settings.python,
            *settings.worker_arguments,
            str(settings.memory_bytes or _default_memory()),
            str(os.getpid()),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(kept,),
        env=worker_environment(settings, os.environ),
        cwd=START_FOLDER,
        umask=0o077,  # the bytecode that it keeps is believed where nobody else may write it
        **_OWN_GROUP,
    )


class WorkerProcess:
    """One running worker. `ask` belongs to one thread, the rest may be called from any.

    One that ``gives_way`` runs where nobody else wants to (SCHED_IDLE), if the system has that.
    """

    def __init__(self, settings: ServiceSettings, *, gives_way: bool = False) -> None:
        self.served = 0
        self.gives_way = False
        self._replaced = False
        self.thread = threading.get_ident()  # whose it is
        self._ready = False
        self._last_lines: collections.deque[str] = collections.deque(maxlen=200)
        warn_about_foreign_entries(Path(settings.store_root))
        self._tether = Tether()
        try:
            self._process = _start(settings, self._tether.far)
            self._tether.tie(self._process.pid)
        finally:
            self._tether.let_go_of_far_end()
        self._awaited = True  # it begins as nice as its program
        self.be_nice(settings)  # now, before it imports anything
        with contextlib.suppress(OSError):
            if gives_way:
                os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
                self.gives_way = True
        # A container's limit of memory holds for the program and its workers together. Where it is
        # reached, the kernel ends the largest process, unless one says that it is to be the first.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._group = ProcessGroup(self._process.pid)
        self._pipe = WorkerPipe(
            self._process.stdin.fileno(), self._process.stdout.fileno(), self._group.clock
        )
        self._reader = threading.Thread(
            target=self._read_errors, name="eagercache-worker-log", daemon=True
        )
        try:
            self._reader.start()
        except RuntimeError:  # no more threads
            self.kill()
            raise
        event(INFO, "worker_start", pid=self._process.pid)

    @property
    def pid(self) -> int:
        """The process's number, also its group's."""
        return self._process.pid

    def be_nice(self, settings: ServiceSettings) -> None:
        """From here on it is nicer than its program, unless that waits for what it makes.

        To be less nice again takes a privilege (setpriority(2)): without, it stays as it is.
        """
        if self._awaited == settings.awaited:
            return
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0) + (0 if settings.awaited else NICENESS)
            os.setpriority(os.PRIO_PGRP, self._process.pid, min(19, nice))
        self._awaited = settings.awaited

    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], settings: ServiceSettings) -> Response:
        """The worker's response. Raises WorkerLost when it dies or takes too long."""
        (response,) = self._exchange(request, 1, settings)
        return response

    def ask_all(
        self, requests: Sequence[Mapping[str, Any]], settings: ServiceSettings
    ) -> Iterator[Response]:
        """The responses to a batch as they come, each with the "index" of its request."""
        return self._exchange({"batch": requests}, len(requests), settings)

    def _exchange(
        self, frame: Mapping[str, Any], count: int, settings: ServiceSettings
    ) -> Iterator[Response]:
        at: int | None = None
        try:
            if not self._ready:
                self._read(settings.start_timeout, "start")
                self._ready = True
            self._write(frame, settings.start_timeout)
            while count > 0:
                response = self._read(settings.request_timeout, "answer")
                if "at" in response:
                    at = response["at"]
                    continue
                count -= 1
                self.served += 1
                yield response
        except WorkerLost as lost:
            raise self._noted(lost, at) from None
        except Exception as error:
            raise self._noted(self._death(), at) from error

    def _noted(self, lost: WorkerLost, at: int | None) -> WorkerLost:
        lost.at, lost.replaced = at, self._replaced
        return lost

    def _write(self, frame: Mapping[str, Any], timeout: float) -> None:
        try:
            self._pipe.write(frame, timeout)
        except PipeTimeout:
            self.kill()
            raise WorkerLost(
                f"the compile worker did not read its request within {timeout:.0f} s",
                timed_out=True,
            ) from None
        except ValueError as error:  # the worker is well, but is given up with what it was to do
            self.kill()
            raise WorkerLost(str(error)) from error

    def _read(self, timeout: float, what: str) -> Response:
        try:
            frame = self._pipe.read(timeout)
        except PipeTimeout:
            self.kill()
            raise WorkerLost(
                f"the compile worker did not {what} within {timeout:.0f} s", timed_out=True
            ) from None
        if frame is None:
            raise self._death()
        return frame

    def _death(self) -> WorkerLost:
        """What is to be said of a worker that speaks no more."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return WorkerLost("the compile worker closed its output", transient=True)
        self._reader.join(1.0)
        lines = list(self._last_lines)
        if code < 0:
            name = _signal_name(-code)
            return WorkerLost(
                f"the compile worker was killed by signal {-code} ({name}){_place_in(lines)}",
                transient=-code not in _SIGNALS_OF_CODE or is_trouble_of_machine("\n".join(lines)),
            )
        last = next((line for line in reversed(lines) if line), "")
        # One that never started was given nothing that it could die of.
        transient = not self._ready or last.startswith(_ERRORS_OF_MACHINE)
        return WorkerLost(
            f"the compile worker exited with {code}: {last[:200]}",
            transient=transient or is_trouble_of_machine(last),
        )

    def _read_errors(self) -> None:
        give_way_to_callers()
        stderr = self._process.stderr
        assert stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for raw in stderr:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                event(DEBUG, "worker_said", pid=self._process.pid, text=line)

    def pause(self) -> None:
        """Stops it and its compilers until `go_on`; deadlines are put off as long."""
        self._group.pause()

    def go_on(self) -> None:
        """Ends a pause."""
        self._group.go_on()

    def replace(self) -> None:
        """Ends it for another one: what it was at is no fault of anybody's."""
        self._replaced = True
        self._group.end()

    def kill(self, wait: float = 1.0) -> None:
        """Ends the worker's whole process group, once; waits up to ``wait`` seconds for it."""
        self._group.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)
