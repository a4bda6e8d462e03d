"""Starts programs from a process that has imported torch and nothing else, which forks for each.

Importing torch costs a program seconds of processor time; a fork of this process has it already,
and is otherwise what `python -c CODE` is: one thread, no hooks, no eagercache, the environment that
is asked for. Those with prepared workers, which are not about how programs end, leave torch as it
is when they do.

Run as a script with the number of a connected Unix socket, on which `Launcher` speaks:
a request is a frame (4 bytes of length, JSON) that comes with the descriptors of stdout and stderr;
the answers are one line with the child's process id and one with its wait status.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finished:
    """How a program ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Launcher:
    """The forking process, and the way to ask it for programs. One at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._mine, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())],
                # numpy's OpenBLAS starts threads when it is loaded, which a fork would lose.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._lines = self._mine.makefile("r")

    def run(
        self,
        code: str,
        arguments: Sequence[str],
        environment: dict[str, str],
        folder: Path,
        timeout: float,
        workers: str = "",
    ) -> Finished:
        """Runs `code` to its end; its compile workers are those at the address `workers`, if any.

        Raises:
            subprocess.TimeoutExpired: it was still running after `timeout` seconds, and was killed.
        """
        request = {
            "code": code,
            "arguments": list(arguments),
            "environment": environment,
            "folder": str(folder),
            "workers": workers,
        }
        body = json.dumps(request).encode()
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            descriptors = [stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._mine, [struct.pack("<I", len(body))], descriptors)
            self._mine.sendall(body)
            pid = int(self._lines.readline())
            killed = False
            self._mine.settimeout(timeout)
            try:
                status = self._lines.readline()
            except TimeoutError:
                os.kill(pid, 9)
                killed = True
                self._mine.settimeout(None)
                self._lines = self._mine.makefile("r")
                status = self._lines.readline()
            finally:
                self._mine.settimeout(None)
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        if killed:
            raise subprocess.TimeoutExpired(code, timeout, texts[0], texts[1])
        return Finished(os.waitstatus_to_exitcode(int(status)), *texts)

    def close(self) -> None:
        """Ends the forking process."""
        self._lines.close()
        self._mine.close()
        self._process.wait(60)


# Before a program's environment takes its place. What is preloaded may have something to do at the
# end.
_PRELOADED = "LD_PRELOAD" in os.environ


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
    if len(head) < 4:
        return None
    left = struct.unpack("<I", head)[0]
    body = b""
    while len(body) < left:
        body += connection.recv(left - len(body))
    return json.loads(body), descriptors


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Forks for every request. Returns the request in the child, and None at the end."""
    while (received := _receive(connection)) is not None:
        request, descriptors = received
        pid = os.fork()
        if pid == 0:
            connection.close()
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{status}\n".encode())
    return None


def _leave_torch_whole() -> None:
    """When the process ends, what torch's libraries do at exit is left out.

    To take them apart, in memory that is shared until it is written to, takes longer than most
    programs: 0.3 s of processor time. What is loaded from here on, which is ours and our kernels',
    does at exit what it does, and so does the interpreter: handlers run in reverse order.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    atexit.register(libc.fflush, None)  # which is left out too


def _become(request: dict[str, Any]) -> None:
    """Runs the program in the place of `__main__`; the interpreter then ends as ever."""
    os.chdir(request["folder"])
    for name in set(os.environ) - set(request["environment"]):
        del os.environ[name]
    os.environ.update(request["environment"])
    if request["workers"]:
        import prepared_worker

        prepared_worker.use(request["workers"])
        if not _PRELOADED:
            _leave_torch_whole()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["-c", *request["arguments"]]
    sys.path[0] = ""
    exec(compile(request["code"], "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    import torch  # noqa: F401 - what all this is for

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        sys.exit(f"importing torch started {threads - 1} threads, which forks would not have")
    gc.collect()
    gc.freeze()  # the children's collections leave alone, and unwritten, what is there now
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        program = _serve(requests)
    if program is not None:
        _become(program)
