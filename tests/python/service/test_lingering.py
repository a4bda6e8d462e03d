"""Programs that end before their kernels are made, and the process that goes on with them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import Program, clean_environment, with_prepared_workers
from eagercache.cli import main as cli
from eagercache.runtime import open_requests
from eagercache.service import lingering

pytestmark = pytest.mark.once

SHORT = """
import time, torch, eagercache
from eagercache.runtime.session import session
from eagercache.service import lingering, workers
lingering.COMMAND = (*lingering.COMMAND, "--whatever-the-load")

class Silent(workers.WorkerProcess):  # never answers, however soon a kernel could be there
    def _exchange(self, frame, count, settings):
        time.sleep(600)

workers.WorkerProcess = Silent
eagercache.enable(ops=["aten::tanh"], choose="always")
x = torch.randn(64, 96)
end = time.monotonic() + 60
while time.monotonic() < end and not eagercache.stats().hits:
    torch.tanh(x)
    if session.service is not None and session.service.unanswered():
        break  # before its kernel is there
print("hits", eagercache.stats().hits > 0, flush=True)
"""


def _run_in_pipes(*words: str, **variables: str) -> str:
    """What `python words` prints. Returns when nobody holds the other ends of its pipes."""
    return subprocess.run(
        [sys.executable, *words],
        env=with_prepared_workers(clean_environment(**variables)),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def _ours(cache: Path) -> list[str]:
    """The processes that name the store or have it open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(cache) in words:
            found.append(words)
    return found


def test_the_second_run_of_a_short_program_has_kernels(program: Program, cache: Path) -> None:
    said = _run_in_pipes("-c", SHORT, EAGERCACHE_DIR=str(cache), EAGERCACHE_LINGER="100")
    assert said == "hits False\n"
    assert lingering.running(cache) is not None  # and holds no end of the program's pipes
    end = time.monotonic() + 100
    while (lingering.running(cache) is not None or _ours(cache)) and time.monotonic() < end:
        time.sleep(0.1)
    assert _ours(cache) == []
    assert list((cache / "PENDING").glob("*.json")) == []
    # Its first hit ends it, and nothing is compiled in it.
    assert program(SHORT, EAGERCACHE_ON_MISS="native")["stdout"] == "hits True\n"


def test_without_a_process_warm_compiles_what_is_pending(program: Program, cache: Path) -> None:
    assert program(SHORT, fills=True)["stdout"] == "hits False\n"  # EAGERCACHE_LINGER=0
    assert lingering.running(cache) is None
    said = _run_in_pipes("-m", "eagercache", "warm", "--dir", str(cache), "--json")
    report = json.loads(said)
    assert [one["verdict"] for one in report["outcomes"]] == ["kernel"] and report["left"] == 0
    again = CliRunner().invoke(cli.main, ["warm", "--dir", str(cache)])
    assert again.exit_code == 0 and "no program left anything" in again.output


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("pass", 1),  # and the block's `enable` is undone by then
        ("eagercache.freeze()", 0),
        ("eagercache.enable(on_miss='native')", 0),
    ],
)
def test_what_does_not_compile_leaves_nothing(
    program: Program, cache: Path, change: str, left: int
) -> None:
    code = f"""
        import torch, eagercache
        from eagercache.runtime.session import session
        with eagercache.enable(ops=["aten::tanh"]):
            x = torch.randn(64, 96)
            while session.service is None or not session.service.unanswered():
                torch.tanh(x)
        {change}
    """
    program(code)
    assert len(list(cache.glob("PENDING/*.json"))) == left


@pytest.mark.parametrize(
    ("wish", "variables", "expected"),
    [
        (0.0, {}, False),
        (5.0, {"CI": "1"}, True),
        (None, {"CI": "true"}, False),
        (None, {"PYTEST_CURRENT_TEST": "x"}, False),
        (None, {}, True),
    ],
)
def test_who_lets_a_process_linger(
    wish: float | None,
    variables: dict[str, str],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_requests.sys, "modules", {})
    assert open_requests.may_linger(wish, variables) is expected
