"""Compile workers that are forked from a process which has imported Inductor.

A worker is started by exec, and its imports cost six seconds of processor time. Programs that fill
a store for other tests, or ask what its kernels answer, can do without: a service in them gets a
fork, with a session, an environment and descriptors of its own, that goes on as `python -m
eagercache.worker` does. What the first kernel of a worker brings about has happened before it, for
a graph that is of no test. Tests of how workers start, live and end take none.

They also leave each other the headers that they precompile, which a worker of its own makes anew
for each store, or does without for its first kernels: five seconds a kernel, or more. And they link
containers against empty libraries of the names of torch's: to read the symbols of torch's own takes
a quarter of a second each time. What is made finds its symbols when it is loaded. The wrappers of
containers, which call kernels and no more, are compiled without optimizing: in half the time, of
which most goes into functions that are compiled elsewhere. What one of them has compiled another
does not compile again (compiled_before.py).

Run as a script with the number of a listening Unix socket and a folder for these headers, which
several such processes may share. Each connection asks for one worker: a frame (4 bytes of length,
JSON) with the descriptors of its stdin, stdout and stderr. The answers are a line with its process
id and one with its wait status; where the asker goes, so does it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Preparer:
    """The forking process. Workers are started by `use` in programs.

    ``headers`` is the folder for what they precompile, where others share it.
    """

    def __init__(self, environment: dict[str, str], headers: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = str(Path(self._folder.name) / "workers")
        site = _site_of(self.address)
        site.mkdir()
        (site / "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
            f"import prepared_worker\nprepared_worker.use({self.address!r})\nsys.path.pop()\n"
        )
        if headers is None:
            headers = Path(self._folder.name) / "headers"
            headers.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.address)
            listening.listen(8)
            # What a worker for CPU starts with, where it is read by an import.
            more = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno()), str(headers)],
                env={**environment, **more, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,
            )

    def close(self) -> None:
        """Ends it and what workers there are."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._folder.cleanup()


def _site_of(address: str) -> Path:
    """The folder in PYTHONPATH with which a process does `use(address)` when it starts."""
    return Path(address).parent / "site"


def with_workers(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for programs whose compile workers, and their children's, come from there."""
    paths = [str(_site_of(address)), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def use(address: str) -> None:
    """From here on compile workers of this process and its children are forks of the preparer's."""
    os.environ.update(with_workers(address, os.environ))
    real = subprocess.Popen

    class Popen(real):  # type: ignore[type-arg]
        def __new__(cls, args: Any, *rest: Any, **settings: Any) -> Any:
            if list(args[1:3]) == ["-m", "eagercache.worker"]:
                return _PreparedWorker(address, args[3:], settings["env"], settings["cwd"])
            return super().__new__(cls)

    subprocess.Popen = Popen  # type: ignore[misc]


class _PreparedWorker:
    """As much of subprocess.Popen as the compile service uses."""

    def __init__(
        self, address: str, arguments: Sequence[str], environment: dict[str, str], folder: str
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        theirs_in, mine_in = os.pipe()
        mine_out, theirs_out = os.pipe()
        mine_err, theirs_err = os.pipe()
        theirs = [theirs_in, theirs_out, theirs_err]
        request = {
            "arguments": list(arguments),
            "environment": environment,
            "folder": folder,
        }
        body = json.dumps(request).encode()
        socket.send_fds(self._connection, [struct.pack("<I", len(body))], theirs)
        self._connection.sendall(body)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin = os.fdopen(mine_in, "wb")
        self.stdout = os.fdopen(mine_out, "rb")
        self.stderr = os.fdopen(mine_err, "rb")
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(int(self._answers.readline()))
        return self.returncode


class _Server:
    """Forks a worker for every connection. Returns from `run` in a worker alone."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._events = selectors.DefaultSelector()
        self._events.register(listening, selectors.EVENT_READ, self._accept)
        self._events.register(0, selectors.EVENT_READ, self._end)
        self._child: dict[str, Any] | None = None
        self._running = True

    def run(self) -> dict[str, Any] | None:
        """The request, in the worker that it asks for; None at the end."""
        while self._running:
            for key, _ in self._events.select():
                key.data()
                if self._child is not None:
                    return self._child
        return None

    def _end(self) -> None:
        self._running = False

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        body = b""
        while len(head) == 4 and len(body) < struct.unpack("<I", head)[0]:
            if not (part := connection.recv(1 << 20)):
                break
            body += part
        if len(head) < 4 or len(body) < struct.unpack("<I", head)[0]:  # the asker has ended
            for descriptor in descriptors:
                os.close(descriptor)
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            self._events.close()
            self._child = json.loads(body)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the asker has ended: `_abandon` is next
            connection.sendall(f"{pid}\n".encode())
        ended = os.pidfd_open(pid)
        self._events.register(
            ended, selectors.EVENT_READ, lambda: self._reap(pid, ended, connection)
        )
        self._events.register(
            connection, selectors.EVENT_READ, lambda: self._abandon(pid, connection)
        )

    def _reap(self, pid: int, ended: int, connection: socket.socket) -> None:
        _, status = os.waitpid(pid, 0)
        self._events.unregister(ended)
        os.close(ended)
        with contextlib.suppress(KeyError, ValueError):
            self._events.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(f"{status}\n".encode())
        connection.close()

    def _abandon(self, pid: int, connection: socket.socket) -> None:
        if connection.fileno() < 0:
            return  # the worker's end was among the same events
        self._events.unregister(connection)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _share_headers(folder: Path) -> None:
    """Precompiled headers are taken from `folder`, and made there at once where there are none."""
    from eagercache.worker.inductor import bare, compile, container

    container.KERNELS_BEFORE_HEADERS = bare.UNITS_BEFORE_HEADER = 0
    unfinished = folder / "unfinished"

    class Commands(container.BuildCommands):
        def _with_header(self, words: list[str], step: str) -> list[str]:
            if step == "wrapper":
                words = ["-O0" if word == "-O1" else word for word in words]
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if unfinished.exists():  # by a worker that was killed
                    for made in (*folder.glob("*/*.gch"), *folder.glob("wrapper*/*.o")):
                        made.unlink()
                unfinished.touch()
                try:
                    return super()._with_header(words, step)
                finally:
                    unfinished.unlink()

    class Tools(compile.Tools):
        def __init__(self, compiler: Any, isa: Any, private: Any, store: Any = None) -> None:
            super().__init__(compiler, isa, private, folder)
            self.commands = Commands(compiler, isa, folder)

    compile.Tools = Tools  # type: ignore[misc]


def _shorten_timings() -> None:
    """Kernels that are wanted `always` are timed no longer than a figure takes.

    No time decides anything about them, and workers take turns at half a second for each kernel:
    eight seconds where other tests disturb it.
    """
    from eagercache.worker.jobs import kinds
    from eagercache.worker.timing import timing

    whole, make = (timing.TIME_BUDGET, timing.NOISY_TIME_BUDGET), kinds.make_job

    def make_job(request: Mapping[str, Any], core: Any) -> Any:
        always = request.get("choose") == "always"
        timing.TIME_BUDGET, timing.NOISY_TIME_BUDGET = (0.02, 0.05) if always else whole
        return make(request, core)

    kinds.make_job = make_job


def _become(request: dict[str, Any], parent: int, headers: Path, compiler: str) -> None:
    """Runs the worker in the place of `__main__`."""
    import compiled_before

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    _share_headers(headers)
    compiled_before.use(headers, compiler)
    _shorten_timings()
    sys.argv = ["worker", *request["arguments"][:-1], str(parent)]
    runpy.run_module("eagercache.worker.main", run_name="__main__", alter_sys=True)


def _warm_up() -> str:
    """What the first kernels of a worker bring about: imports, and tables of rewrites.

    A graph is lowered, of which nothing is compiled, and a module is traced. Returns the compiler.
    """
    import sympy.physics.units  # noqa: F401 - of the first expression that is printed
    import torch
    from eagercache.base.load import core
    from eagercache.base.toolchain import find_compiler, pick_isa
    from eagercache.worker.compat import aot_inductor
    from eagercache.worker.inductor.compile import Tools
    from eagercache.worker.jobs import function_job, module_job  # noqa: F401 - by name otherwise
    from tqdm import tqdm

    class Small(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return ((x @ x).tanh() * 2,)

    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0  # or it would start a thread
    x = torch.zeros(8, 8)
    graph = torch.fx.symbolic_trace(Small())
    compiler = find_compiler()
    tools = Tools(compiler, pick_isa(core.host_cpu_features()), None)
    aot_inductor.kernel_compile_command(compiler.path)  # now that the instruction set is known
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        tools.read_texts(graph, (x,), Path(folder), lambda wrapper, kernel: None)
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        torch.export.export(Small(), (x,), strict=True)
    torch._dynamo.reset()
    tqdm.monitor_interval = interval
    return compiler.path


if __name__ == "__main__":
    import torch._inductor.compile_fx

    compiler = _warm_up()
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        sys.exit("what it begins with started threads, which forks would not have")
    gc.collect()
    gc.freeze()
    me = os.getpid()
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        worker = _Server(listening).run()
    if worker is not None:
        _become(worker, me, Path(sys.argv[2]), compiler)
