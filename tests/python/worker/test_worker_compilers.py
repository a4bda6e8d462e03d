"""Workers whose compiler is broken, hangs, or is killed with the program."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment
from eagercache.base import environment
from eagercache.service.worker_process import NICENESS
from misbehaving_worker import gone, wait_until
from test_worker import VAR, Requests, with_digests

# A real compiler of kernels that are not what was asked for: put in front of the kernels' calls.
BAD_KERNEL = """\
for word in "$@"; do
  case "$word" in *kernels.cpp) sed -i 's/^  try {{$/  try {{ {statement}/' "$word";; esac
done
exec /usr/bin/g++ "$@"
"""

BROKEN_COMPILERS = {
    "makes a kernel that crashes": (
        BAD_KERNEL.format(statement="__builtin_trap();"),
        "was killed by signal 4 (SIGILL) in ",
        "deterministic",
    ),
    "makes a kernel that hangs": (
        BAD_KERNEL.format(statement="for (volatile int i = 0;; i = 1 - i) {{}}").replace(
            "{{}}", "{}"
        ),
        "did not answer within",
        "transient",
    ),
    "makes a kernel that is wrong": (
        BAD_KERNEL.format(statement="*static_cast<float*>(p[1]) = 12345.0f; return 0;"),
        "data)",
        "deterministic",
    ),
    "fails": (
        "echo 'fatal error: a broken compiler' >&2; exit 1",
        "a broken compiler",
        "deterministic",
    ),
    "killed": ("kill -KILL $$", "exited with -9", "transient"),
    "hangs": ("sleep 600", "did not answer within", "transient"),
}


LONG = (pytest.mark.long,)


def write_compiler(path: Path, command: str) -> None:
    """A compiler that says who it is and does ``command`` with everything else."""
    about = """\
#!/bin/sh
if [ "$1" = "-v" ] || [ "$1" = "--version" ]; then
  echo "Target: x86_64-linux-gnu" >&2
  echo "gcc version 12.9.0 (Broken)" >&2
  echo "g++ (Broken) 12.9.0"
  exit 0
fi
"""
    path.write_text(about + command + "\n")
    path.chmod(0o755)


@pytest.mark.once
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=() if how in ("fails", "makes a kernel that is wrong") else LONG)
        for how in BROKEN_COMPILERS
    ],
)
def test_a_broken_compiler_is_a_stored_failure(tmp_path: Path, how: str) -> None:
    command, reason, failure = BROKEN_COMPILERS[how]
    root = tmp_path / "store"
    root.mkdir(mode=0o700)
    compiler = tmp_path / "g++"
    write_compiler(compiler, command)
    text = environment.environment_text(cxx=str(compiler))
    timeout = 30.0 if failure == "transient" and how != "killed" else 300.0
    broken = Requests(root, environment=text, cxx=str(compiler), request_timeout=timeout)
    try:
        (description,) = with_digests([VAR], "always")
        (answer,) = broken.ask([description])
    finally:
        broken.service.close()
    assert (answer["verdict"], answer["failure"]) == ("failed", failure), answer
    assert reason in answer["reason"]
    entry = broken.store().find(description["digest"])
    assert (entry["kind"], entry["failure"]) == ("failed", failure)


def memory_of_this_machine() -> int:
    """Bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


BLOCKED = """
import pathlib, sys, time
import torch, eagercache
x = torch.randn(32, 48)
expected = x.sum(-1)
eagercache.enable(["sum.dim_IntList"])
while not pathlib.Path(sys.argv[1]).exists():
    assert torch.equal(x.sum(-1), expected)
    time.sleep(0.001)
for _ in range(1000):
    assert torch.equal(x.sum(-1), expected)
assert eagercache.stats().hits == 0 and not eagercache.wait(0.01)
print("blocked", flush=True)
time.sleep(600)
"""


@pytest.mark.once
def test_calls_go_on_while_the_compiler_is_blocked_and_a_killed_process_leaves_nothing(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pid"
    write_compiler(tmp_path / "g++", f"echo $$ $PPID > {pid_file}; exec sleep 600")
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    user = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(pid_file)],
        env=clean_environment(
            EAGERCACHE_DIR=str(root), EAGERCACHE_CXX=str(tmp_path / "g++"), TMPDIR=str(tmp_path)
        ),
        stdout=subprocess.PIPE,
    )
    try:
        assert user.stdout is not None and user.stdout.readline() == b"blocked\n"
        below = [int(pid) for pid in pid_file.read_text().split()]
        assert not any(gone(pid) for pid in below)
        for pid in below:  # the compiler and the worker
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + NICENESS)
            # Where memory ends, it is taken from them before it is taken from the program.
            assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
            limit, _ = resource.prlimit(pid, resource.RLIMIT_DATA)
            assert 0 < limit <= memory_of_this_machine() // 2  # -1 is no limit
            assert os.getpgid(pid) == below[1]
        user.kill()
        user.wait()
        assert wait_until(lambda: all(gone(pid) for pid in below))
    finally:
        user.kill()
        user.wait()


def assert_ends(pid: int, seconds: float) -> None:
    """That a process is gone within so many seconds; it is ended if not."""
    try:
        assert wait_until(lambda: gone(pid), seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# As a container's first process: what a program leaves behind is its child, and no orphaned group,
# which the kernel would wake by itself (setpgid(2)).
ADOPTING = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
sys.stdout.write(subprocess.run([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, text=True).stdout)
sys.stdout.flush()
sys.stdin.read()
"""
LEAVES_A_STOPPED_WORKER = """
import os, signal, time
from eagercache.service.settings import ServiceSettings
from eagercache.service.worker_process import WorkerProcess
process = WorkerProcess(ServiceSettings(store_root="/nowhere", environment="a: 1\\n"))
{stage}
os.kill(process.pid, signal.SIGSTOP)
child = os.fork() if {forks} else 0
if {forks} and child == 0:
    os.close(1)
    time.sleep(100)
print(process.pid, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("stage", ["", "time.sleep(0.3)", "process._read(120.0, 'start')"])
def test_a_worker_that_is_stopped_ends_with_its_program(stage: str, *, forks: bool) -> None:
    program = LEAVES_A_STOPPED_WORKER.format(stage=stage, forks=forks)
    adopting = subprocess.Popen(
        [sys.executable, "-c", ADOPTING, program],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert adopting.stdout is not None
    worker, child = map(int, adopting.stdout.readline().split())
    try:
        assert_ends(worker, 10)
        assert not (child and gone(child))
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        adopting.communicate(timeout=60)
