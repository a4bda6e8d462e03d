"""The compile service's processes: how they end, whose signals they get, what they are given."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment
from eagercache.service import cuda_gate
from eagercache.service.settings import ServiceSettings
from eagercache.service.worker_process import NICENESS, worker_environment
from misbehaving_worker import SOURCES, Answers, Bench, bench, call, gone, wait_until

__all__ = ["bench"]

pytestmark = pytest.mark.once


def test_a_forked_childs_service_does_nothing(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1), answers)
    assert service.wait(30)
    pid = os.fork()
    if pid == 0:
        mine = Answers()
        service.submit(call(2), mine)
        service.close()
        good = mine.all[0]["verdict"] == "failed" and service.wait(0.1)
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    service.submit(call(3), answers)
    assert service.wait(30)
    assert answers.by_id()[3]["verdict"] == "kernel"
    assert len(bench.pids("start")) == 1


PARENT = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from eagercache.service.service import CompileService
from eagercache.service.settings import ServiceSettings
service = CompileService(ServiceSettings(
    store_root="/nowhere", environment="", workers=1, worker_arguments=(sys.argv[1],),
    slots_folder=pathlib.Path(sys.argv[2] + ".slots"),
    extra_environment={"NOTES": sys.argv[2], "SOURCES": sys.argv[4]}))
service.submit({"id": 1, "op": "x", "overload": "", "do": "hang"}, print)
notes = pathlib.Path(sys.argv[2])
while not (notes.exists() and "child" in notes.read_text()):
    time.sleep(0.02)
if sys.argv[3] != "exit":
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["kill", "stopped", "interrupt", "exit"])
def test_the_users_process_leaves_nothing_behind_however_it_ends(bench: Bench, how: str) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PARENT,
            str(bench.script),
            str(bench.notes_path),
            how,
            SOURCES,
        ],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_until(lambda: bench.pids("child"), 60)
        if how == "stopped":  # the worker, when its parent dies
            os.kill(bench.pids("start")[0], signal.SIGSTOP)
        if how != "exit":
            parent.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
        parent.wait(60)
        assert wait_until(lambda: all(gone(p) for p in bench.pids("child")))
        assert wait_until(lambda: all(gone(p) for p in bench.pids("start")))
    finally:
        parent.kill()
        parent.wait()


def test_the_service_and_its_workers_take_no_processor_from_who_wakes_them(bench: Bench) -> None:
    policies = []
    service = bench.service()
    service.submit(call(0), lambda answer: policies.append(os.sched_getscheduler(0)))
    assert service.wait(30)
    (worker,) = bench.pids("start")
    assert [*policies, os.sched_getscheduler(worker)] == [os.SCHED_BATCH, os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, worker) == min(19, os.nice(0) + NICENESS)


def test_a_worker_that_somebody_waits_for_is_no_nicer_than_its_program(bench: Bench) -> None:
    service = bench.service(awaited=True)
    service.submit(call(0), lambda _: None)
    assert service.wait(30)
    (worker,) = bench.pids("start")
    assert os.getpriority(os.PRIO_PROCESS, worker) == os.nice(0)
    assert os.sched_getscheduler(worker) != os.SCHED_IDLE
    service.reconfigure(awaited=False)
    service.submit(call(1), lambda _: None)
    assert service.wait(30)
    assert bench.pids("start") == [worker]
    assert os.getpriority(os.PRIO_PROCESS, worker) == min(19, os.nice(0) + NICENESS)


def test_a_worker_ignores_the_terminals_interrupt(bench: Bench) -> None:
    service, answers = bench.service(), Answers()
    service.submit(call(1, "slow"), answers)
    assert wait_until(lambda: any(note.startswith("slow") for note in bench.notes), 30)
    (worker,) = bench.pids("start")
    assert os.getpgid(worker) == worker != os.getpgid(0)
    os.kill(worker, signal.SIGINT)
    assert service.wait(30)
    assert answers.all[0]["verdict"] == "kernel" and len(bench.pids("start")) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Popen has no process groups")
def test_a_worker_is_in_its_programs_session_where_being_nice_counts(bench: Bench) -> None:
    service = bench.service()
    service.submit(call(0), lambda answer: None)
    assert service.wait(30)
    (worker,) = bench.pids("start")
    assert os.getsid(worker) == os.getsid(0)
    autogroup = Path(f"/proc/{worker}/autogroup")
    if autogroup.exists():
        assert autogroup.read_text() == Path("/proc/self/autogroup").read_text()


def in_terminal(program: subprocess.Popen[bytes], terminal: int) -> None:
    """Reads what the terminal shows until the program ends, which is hung up then."""
    with contextlib.suppress(OSError):  # how a terminal says that nobody has it open
        while os.read(terminal, 1024):
            pass
    program.wait(60)


INTERRUPTED = """\
import fcntl, os, pathlib, signal, sys, termios, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C there is for this process's group from here on
from eagercache.service.service import CompileService
from eagercache.service.settings import ServiceSettings
service = CompileService(ServiceSettings(
    store_root="/nowhere", environment="", workers=1, worker_arguments=(sys.argv[1],),
    slots_folder=pathlib.Path(sys.argv[2] + ".slots"),
    extra_environment={"NOTES": sys.argv[2], "SOURCES": sys.argv[3]}))
answers = []
service.submit({"id": 1, "op": "x", "overload": "", "digest": "0", "do": "slow"}, answers.append)
interrupts = 0
while not (answers and interrupts):
    try:
        time.sleep(0.02)
    except KeyboardInterrupt:
        interrupts += 1
pathlib.Path(sys.argv[2] + ".end").write_text(f"{interrupts} {answers[0]['verdict']}")
service.close()
"""


def test_ctrl_c_in_a_terminal_is_for_the_program_alone(bench: Bench) -> None:
    terminal, programs_end = os.openpty()
    arguments = [str(bench.script), str(bench.notes_path), SOURCES]
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *arguments],
        env=clean_environment(),
        stdin=programs_end,
        stdout=programs_end,
        stderr=programs_end,
    )
    os.close(programs_end)
    try:
        assert wait_until(lambda: any(note.startswith("slow") for note in bench.notes), 60)
        os.write(terminal, b"\x03")
        in_terminal(program, terminal)
    finally:
        program.kill()
        program.wait()
        os.close(terminal)
    assert Path(f"{bench.notes_path}.end").read_text() == "1 kernel"
    assert len(bench.pids("start")) == 1


@pytest.mark.parametrize(
    ("variable", "mode", "kept"),
    [
        ("PYTHONDONTWRITEBYTECODE", 0o700, True),
        ("PYTHONDONTWRITEBYTECODE", 0o777, False),
        ("PYTHONPYCACHEPREFIX", 0o700, False),
    ],
)
def test_workers_keep_bytecode_that_nobody_else_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, mode: int, kept: bool
) -> None:
    tmp_path.chmod(mode)
    # As in an image whose packages have none.
    monkeypatch.setattr("torch.__file__", str(tmp_path / "torch" / "__init__.py"))
    settings = ServiceSettings(store_root=str(tmp_path), environment="")
    environment = worker_environment(settings, {variable: "1"})
    assert (environment.get("PYTHONPYCACHEPREFIX") == str(tmp_path / "PYTHON")) == kept
    dropped = kept or variable != "PYTHONDONTWRITEBYTECODE"
    assert ("PYTHONDONTWRITEBYTECODE" not in environment) == dropped


def test_bytecode_that_is_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = (
        tmp_path / "torch/_inductor/__pycache__" / f"lowering.{sys.implementation.cache_tag}.pyc"
    )
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    monkeypatch.setattr("torch.__file__", str(tmp_path / "torch" / "__init__.py"))
    settings = ServiceSettings(store_root=str(tmp_path), environment="")
    environment = worker_environment(settings, {"PYTHONDONTWRITEBYTECODE": "1"})
    assert "PYTHONPYCACHEPREFIX" not in environment


def test_the_workers_environment_is_neutral() -> None:
    settings = ServiceSettings(store_root="", environment="")
    environ = {
        "HOME": "/h",
        "LD_PRELOAD": "x.so",
        "OMP_NUM_THREADS": "1",
        "EAGERCACHE_CHOOSE": "always",
        "TORCHINDUCTOR_CACHE_DIR": "/x",
        "PYTHONPATH": "/mine",
    }
    kept = worker_environment(settings, environ)
    assert kept["HOME"] == "/h" and kept["EAGERCACHE_INSIDE_WORKER"] == "1"
    assert kept["CUDA_VISIBLE_DEVICES"] == ""
    assert kept["PYTHONPATH"].endswith(f"{os.pathsep}/mine")
    for name in ("LD_PRELOAD", "OMP_NUM_THREADS", "EAGERCACHE_CHOOSE", "TORCHINDUCTOR_CACHE_DIR"):
        assert name not in kept


@pytest.mark.parametrize(
    ("gpu", "visible", "expected"),
    [(None, None, ""), (0, None, "0"), (3, None, "3"), (1, "5,GPU-7", "GPU-7"), (2, "4", "2")],
)
def test_a_worker_sees_the_calls_gpu_alone(
    gpu: int | None, visible: str | None, expected: str
) -> None:
    settings = ServiceSettings(store_root="/nowhere", environment="", gpu=gpu)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert worker_environment(settings, environ)["CUDA_VISIBLE_DEVICES"] == expected


def test_a_call_is_described_to_a_worker_as_one_on_its_first_gpu() -> None:
    tensor = {"kind": "tensor", "device": "cuda:3", "sizes": [4]}
    number = {"kind": "tensor", "device": "cpu", "sizes": []}
    description = {
        "args": [
            number,
            {"kind": "tensor_list", "elements": [tensor]},
            {"kind": "device", "device": "cuda:3"},
        ],
        "digest": "cuda:3 is not a device here",
    }
    assert cuda_gate.gpu_of(description) == 3
    there = cuda_gate.on_first_gpu(description)
    assert cuda_gate.gpu_of(there) == 0 and there["args"][2]["device"] == "cuda:0"
    assert cuda_gate.gpu_of({"args": description["args"][2:]}) == 3  # as `torch.zeros` has it
    assert there["digest"] == description["digest"] and there["args"][0] == number
    assert tensor["device"] == "cuda:3"
