"""Running the C++ compiler, and how a compile may end."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from eagercache.base.trouble import causes, is_trouble_of_machine

# A compiler run that takes longer than this is killed.
COMMAND_TIMEOUT = 720.0  # seconds; a busy machine gives a worker a twentieth of a core
# Of the time between two looks at a command, what it may have had a processor for.
_LONGEST_LOOK_SECONDS = 1.0


_ERRNOS_OF_MACHINE = frozenset(
    {
        *(errno.EACCES, errno.EAGAIN, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE),
        *(errno.ENODEV, errno.ENOMEM, errno.ENOSPC, errno.EPERM, errno.EROFS, errno.ESTALE),
        *(errno.ENOTCONN, errno.ETXTBSY),
    }
)


def is_certainly_passing(error: BaseException) -> bool:
    """The same of what is otherwise a refusal: code that is traced may raise errors of its own."""
    return any(
        isinstance(one, MemoryError)
        or (isinstance(one, OSError) and one.errno in _ERRNOS_OF_MACHINE)
        or "can't allocate memory" in str(one)
        for one in causes(error)
        if not isinstance(one, CompileRefused)
    )


class CompileRefused(Exception):
    """The call is left to native, for a reason that will be the same next time.

    ``read``: what a module's forward read until then, where that is known (`calls/trace_rows.py`).
    With other values the reason may be gone.
    """

    read: list[list[str]] | None = None


class FunctionRefused(CompileRefused):
    """No call of the Python function can have a kernel. The text begins with the line, if any."""


class NoKernelOfItsOwn(CompileRefused):
    """Inductor answers the call with the very operator that native runs."""


class CompileFailed(Exception):
    """The compile went wrong. ``transient`` when the machine, not the call, was the reason."""

    def __init__(self, reason: str, *, transient: bool) -> None:
        super().__init__(reason)
        self.transient = transient


# All that a compiler is told by its environment. What changes what it compiles (CPATH,
# GCC_EXEC_PREFIX and their like) is in no key and is not handed to it.
_COMPILER_VARIABLES = ("HOME", "PATH", "TMPDIR")


def compiler_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that compilers run in: the same for all who share kernels."""
    kept = {name: environ[name] for name in _COMPILER_VARIABLES if name in environ}
    return {**kept, "LC_ALL": "C"}  # its errors are read


def empty_library(compiler: str, folder: Path, name: str, run: Callable[[list[str]], None]) -> Path:
    """An empty library of that name in ``folder``, made once, for a linker to read.

    The real one of torch takes 0.15 s a link. ``run`` runs a command; raises what that raises.
    """
    library = folder / name
    if not library.exists():
        made = folder / f"{name}.{os.getpid()}"
        words = [compiler, "-shared", "-fPIC", "-nostdlib", "-x", "c", os.devnull]
        run([*words, f"-Wl,-soname,{name}", "-o", str(made)])
        made.rename(library)
    return library


class Command:
    """One running command; its output is kept in a file, so that it never blocks on a full pipe."""

    def __init__(self, step: str, words: Sequence[str], directory: Path) -> None:
        self.step = step
        self.seconds = 0.0  # of CPU time, the compiler's own children included
        self._log = directory / f"{step}.log"
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    words,
                    cwd=directory,
                    env=compiler_environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            except OSError as error:
                raise CompileFailed(
                    f"the compiler does not start: {error}", transient=True
                ) from error

    def wait(self) -> None:
        """Waits for the end. Raises CompileFailed for anything but success.

        Time in which this process was stopped, and its commands with it, does not count.
        """
        waited, last = 0.0, time.monotonic()
        while True:
            # wait4 tells the CPU time of this very process; Popen would only tell its exit status.
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid != 0:
                break
            now = time.monotonic()
            waited, last = waited + min(now - last, _LONGEST_LOOK_SECONDS), now
            if waited > COMMAND_TIMEOUT:
                self.kill()
                raise CompileFailed(
                    f"the compiler's {self.step} step took over {COMMAND_TIMEOUT:.0f} s",
                    transient=True,
                )
            time.sleep(0.003)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds = usage.ru_utime + usage.ru_stime
        if self._process.returncode != 0:
            raise self._failure(self._process.returncode)

    def kill(self) -> None:
        """Ends it, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _failure(self, code: int) -> CompileFailed:
        output = self._log.read_text(errors="replace")
        lines = output.splitlines()
        line = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
        transient = code < 0 or is_trouble_of_machine(output)
        return CompileFailed(
            f"the compiler's {self.step} step exited with {code}: {line.strip()[:200]}",
            transient=transient,
        )
