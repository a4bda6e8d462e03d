"""Compiling ahead of time: what, in which order, within which budget, and never twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import clean_environment
from eagercache import _C
from eagercache.ahead import warm
from eagercache.ahead.budget import Budget
from eagercache.ahead.experience import Experience
from eagercache.ahead.report import WarmReport
from eagercache.base import config, environment
from eagercache.calls import trace
from eagercache.cli import main as cli

pytestmark = pytest.mark.once

STATE = {
    "default_dtype": "float32",
    "deterministic": False,
    "deterministic_warn_only": False,
    "fill_uninitialized_memory": False,
    "num_threads": 1,
}

PROGRAM = """
import torch
x = torch.arange(600.0).reshape(20, 30)
i = torch.arange(800.0).reshape(1, 8, 10, 10)
for _ in range(7):
    torch.var(x, -1)
    torch.nn.functional.avg_pool2d(i, 3)
    torch.softmax(x, -1)
    torch.nn.functional.silu(x)
"""
# The same at the end of a process that says what became of its calls.
COUNTED = (
    PROGRAM
    + """
import eagercache, json
s = eagercache.stats()
print(json.dumps([s.hits, s.misses, s.pending, s.native, s.compiles, s.outstanding]))
"""
)


def tensor(sizes: Sequence[int], name: str = "self") -> dict[str, Any]:
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    return {
        "kind": "tensor",
        "name": name,
        "dtype": "float32",
        "device": "cpu",
        "sizes": list(sizes),
        "strides": strides,
        "wrapped": False,
        "aligned": True,
    }


def line(op: str, size: int, calls: int, **more: Any) -> str:
    row = {"op": op, "overload": "", "dispatch_key": "CPU", "state": STATE, "calls": calls}
    return json.dumps({**row, "args": [tensor([size])], **more})


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    """abs is worth most, then sin of 9, sin of 5 and cos; one call is of no key, one of a GPU."""
    path = tmp_path / "trace"
    trace.append_section(
        path,
        [
            line("aten::cos", 3, 1, native_ns=1_000),
            line("aten::sin", 9, 10, native_ns=8_000),
            line("aten::sin", 5, 10, native_ns=7_000),
            line("aten::abs", 7, 100, native_ns=5_000),
            line("aten::abs", 0, 100),
            line("aten::mm", 4, 100),
            line("aten::abs", 6, 3, dispatch_key="CUDA"),
        ],
    )
    return path


class FakeExecutor:
    """Answers at once, by publishing decisions for native or as it is told."""

    def __init__(self, cache: Path, answer: Callable[[str], dict[str, Any]] | None = None) -> None:
        text = environment.environment_text(cxx=config.read_settings().cxx)
        self.store = _C.Store(str(cache), text)
        self.answer = answer
        self.asked: list[str] = []
        self.closed = False

    def submit(
        self, description: dict[str, Any], on_done: Callable[[dict[str, Any]], None]
    ) -> None:
        sizes = description["args"][0]["sizes"]
        name = f"{description['op'].removeprefix('aten::')}{sizes[0]}"
        self.asked.append(name)
        if self.answer is not None and (told := self.answer(name)):
            on_done(told)
            return
        facts = {"op": description["op"], "reason": "slower"}
        self.store.publish({"key": description["digest"], "kind": "native", "facts": facts})
        on_done({"verdict": "native", "reason": "slower", "found": False, "seconds": {"a": 1.5}})

    def close(self) -> None:
        self.closed = True


def warm_up(path: Path, cache: Path, executor: FakeExecutor, **more: Any) -> WarmReport:
    return warm.warm_up(path, cache_dir=cache, executor=executor, device="cpu", **more)


def test_the_largest_gain_goes_first_and_what_was_found_out_changes_the_rest(
    small_trace: Path, cache: Path
) -> None:
    executor = FakeExecutor(cache)
    # One at a time: each is larger than what may be under way.
    report = warm_up(small_trace, cache, executor, workers=1)
    assert executor.asked == ["abs7", "sin9", "sin5", "cos3"]
    assert executor.closed and report.ok
    assert [e.state for e in report.entries if e.call.name == "aten::abs"] == [
        "compiled",
        "ineligible",
    ]
    assert {e.reason for e in report.entries if e.state == "ineligible"} >= {
        "a tensor has no elements"
    }
    assert report.count(state="compiled", verdict="native") == 4
    assert not any(e.description["dispatch_key"] == "CUDA" for e in report.entries)


def test_operators_that_native_keeps_are_worth_less_than_before() -> None:
    experience = Experience([])
    before = experience.share_saved("aten::sin")
    experience.add({"kind": "native", "facts": {"op": "aten::sin"}})
    facts = {"op": "aten::var", "native_ns": "100", "kernel_ns": "10", "seconds_prove": "3"}
    experience.add({"kind": "kernel", "facts": facts})
    assert experience.share_saved("aten::sin") < before < experience.share_saved("aten::var")
    assert experience.seconds("aten::var", []) == 3.0
    assert experience.seconds("aten::var", [tensor([1000, 1000])]) > 3.0


def test_a_second_time_nothing_is_compiled(small_trace: Path, cache: Path) -> None:
    warm_up(small_trace, cache, FakeExecutor(cache))
    again = FakeExecutor(cache)
    report = warm_up(small_trace, cache, again)
    assert again.asked == []
    assert report.count(state="found") == 4 and report.ok


def test_a_dry_run_compiles_nothing_and_says_what_it_would_take(
    small_trace: Path, cache: Path
) -> None:
    executor = FakeExecutor(cache)
    report = warm_up(small_trace, cache, executor, dry_run=True)
    assert executor.asked == []
    assert report.count(state="left") == 4
    assert report.seconds > 0 and report.bytes > 0


def test_operators_are_chosen_by_name(small_trace: Path, cache: Path) -> None:
    executor = FakeExecutor(cache)
    warm_up(small_trace, cache, executor, ops=["sin"])
    assert sorted(executor.asked) == ["sin5", "sin9"]
    executor = FakeExecutor(cache)
    warm_up(small_trace, cache, executor, skip=["abs"])
    assert executor.asked == ["cos3"]


def test_of_an_operator_log_only_default_operators_are_compiled(
    tmp_path: Path, cache: Path
) -> None:
    log = tmp_path / "log.txt"
    log.write_text(
        "Operator: aten.abs.default\ncnt: 2, ((T([4], f16),), {})\n"
        "Operator: aten.acosh.default\ncnt: 2, ((T([4], f16),), {})\n"
    )
    (tmp_path / "LICENSE").write_text("Anybody may.")
    executor = FakeExecutor(cache)
    warm_up(tmp_path, cache, executor)
    assert executor.asked == ["abs4"]
    warm_up(log, cache, executor, ops=["acosh"])
    assert executor.asked == ["abs4", "acosh4"]


def test_a_budget_of_time_ends_the_run_and_leaves_the_rest(small_trace: Path, cache: Path) -> None:
    class Stuck(FakeExecutor):
        def submit(self, description: Any, on_done: Any) -> None:
            self.asked.append(description["op"])

    executor = Stuck(cache)
    report = warm_up(small_trace, cache, executor, budget=3.0, workers=1)
    assert executor.asked and executor.closed
    assert report.count(state="left") == 4
    assert report.seconds >= 3.0 and report.ok
    # What would not be done in time is not begun.
    executor = Stuck(cache)
    warm_up(small_trace, cache, executor, budget=0.5, workers=1)
    assert executor.asked == []


def test_a_budget_of_bytes_ends_the_run(small_trace: Path, cache: Path) -> None:
    executor = FakeExecutor(cache)
    report = warm_up(small_trace, cache, executor, budget=Budget(bytes=1))
    assert executor.asked == [] and report.count(state="left") == 4
    report = warm_up(small_trace, cache, executor, budget="1GB")
    assert report.count(state="compiled") == 4
    assert 0 < report.bytes < 100_000


@pytest.mark.parametrize(
    ("text", "seconds", "size"),
    [
        ("120", 120.0, None),
        ("90s", 90.0, None),
        ("2min", 120.0, None),
        ("1.5h", 5400.0, None),
        ("2GB", None, 2 << 30),
        ("500MB", None, 500 << 20),
    ],
)
def test_budgets_are_read(text: str, seconds: float | None, size: int | None) -> None:
    assert Budget.parse(text) == Budget(seconds, size)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["warm", *arguments])


@pytest.fixture
def fake_service(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[str], Any]], None]:
    def use(answer: Callable[[str], Any]) -> None:
        monkeypatch.setattr(warm, "compile_service", lambda *_, **__: FakeExecutor(cache, answer))

    use(lambda name: {})
    return use


def test_the_command_tells_what_was_done_and_why(
    small_trace: Path, cache: Path, fake_service: Any
) -> None:
    fake_service(
        lambda name: (
            {"verdict": "failed", "reason": "error of 9 ulp", "failure": "deterministic"}
            if name == "cos3"
            else {}
        )
    )
    done = run(str(small_trace), "--dir", str(cache), "--device", "cpu")
    assert done.exit_code == 0, done.output  # another run would not change it
    assert "error of 9 ulp" in done.output
    assert "3 that native keeps, 1 failed, 2 that no kernel can be made for" in done.output
    rows = json.loads(run(str(small_trace), "--dir", str(cache), "--json").stdout)
    assert rows["ok"] and {row["state"] for row in rows["entries"]} >= {"found", "ineligible"}
    dry = run(str(small_trace), "--dir", str(cache), "--dry-run")
    assert dry.exit_code == 0 and "1 to compile" in dry.output


def test_a_failure_that_another_run_may_mend_is_exit_code_1(
    small_trace: Path, cache: Path, fake_service: Any
) -> None:
    fake_service(
        lambda name: {"verdict": "failed", "reason": "no space left", "failure": "transient"}
    )
    done = run(str(small_trace), "--dir", str(cache), "--device", "cpu")
    assert done.exit_code == 1
    assert "no space left" in done.output and "4 failed" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no trace nowhere"),
        (["{script}"], "is neither a trace of `eagercache record` nor an operator log"),
        (["{trace}", "--budget", "soon"], "the budget 'soon' is neither a time"),
        (["{trace}", "--budget", "10m"], "the budget '10m' is neither a time"),
        (["{trace}", "--op", "aten::nonsense"], "there is no operator 'aten::nonsense'"),
        (["{newer}"], "is of version 9 and this eagercache reads 1"),
        (["{folder}"], "there is no trace in "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    small_trace: Path, cache: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "script.py").write_text("import torch\n")
    (tmp_path / "newer").write_text('{"eagercache_trace":9}\n')
    places = {
        "script": str(tmp_path / "script.py"),
        "trace": str(small_trace),
        "newer": str(tmp_path / "newer"),
        "folder": str(tmp_path / "folder"),
    }
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("no trace\n")
    done = run(*[text.format(**places) for text in arguments], "--dir", str(cache))
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.startswith("Error: ") and done.output.count("\n") == 1


def test_a_gpu_that_is_not_there_is_one_line_and_exit_code_2(
    small_trace: Path, cache: Path
) -> None:
    if _C.has_cuda_driver():
        pytest.skip("NOT RUN: this machine has a driver")
    done = run(str(small_trace), "--device", "cuda", "--dir", str(cache))
    assert done.exit_code == 2 and "no CUDA driver" in done.output


def _eagercache(*words: str, cache: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagercache", *words],
        env=clean_environment(EAGERCACHE_DIR=str(cache)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def _manifests(cache: Path) -> dict[str, tuple[int, int]]:
    """Every published verdict, with what changes when it is made again."""
    files = [p for p in cache.glob("v1/*/m/*/*") if p.is_file()]
    return {p.name: (p.stat().st_ino, p.stat().st_ctime_ns) for p in files}


@pytest.mark.long
def test_record_warm_killed_warm_and_run_compile_every_key_once(
    cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "counted.py").write_text(COUNTED)
    path = str(tmp_path / "trace")
    recorded = _eagercache("record", path, "--", "program.py", cache=cache, cwd=tmp_path)
    assert recorded.returncode == 0, recorded.stderr
    assert "28 calls recorded" in recorded.stderr and "4 keys" in recorded.stderr
    assert _manifests(cache) == {}

    words = ["warm", path, "--choose", "always", "--device", "cpu", "--json"]
    killed = subprocess.Popen(
        [sys.executable, "-m", "eagercache", *words, "--workers", "1"],
        env=clean_environment(EAGERCACHE_DIR=str(cache)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not _manifests(cache) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = _children(killed.pid)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    _wait_for_the_end_of(workers)  # one that just publishes may do so
    first = _manifests(cache)
    assert first, "it was killed before anything was published"

    finished = _eagercache(*words, cache=cache)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = json.loads(finished.stdout)["entries"]
    assert {row["verdict"] for row in rows} == {
        "kernel"
    }  # a loaded machine may not decide which is faster
    assert {row["digest"] for row in rows if row["state"] == "found"} == set(first)
    assert {row["digest"] for row in rows if row["state"] == "compiled"} == set(
        _manifests(cache)
    ) - set(first)
    assert {name: _manifests(cache)[name] for name in first} == first

    third = _eagercache(
        "run", "--choose", "always", "--on-miss", "wait", "counted.py", cache=cache, cwd=tmp_path
    )
    assert third.returncode == 0, third.stderr
    hits, misses, pending, native, compiles, outstanding = json.loads(third.stdout)
    assert (hits, misses, pending, native, compiles, outstanding) == (28, 0, 0, 0, 0, 0)


def _children(pid: int) -> list[Path]:
    """Directories in /proc of the processes that this one's threads started."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [Path("/proc") / child for text in lists for child in text.split()]


def _wait_for_the_end_of(processes: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while any(process.exists() for process in processes):
        if time.monotonic() > deadline:
            pytest.fail(f"still there: {processes}")
        time.sleep(0.1)
