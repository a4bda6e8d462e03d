"""`eagercache estimate`: what a program's native calls come to with gains that were measured."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import PACKAGE_ROOT
from eagercache.cli import main as cli
from eagercache.cli.estimate import lines_of
from eagercache.cli.estimates.estimation import TABLE, Estimate, saved_of_call

pytestmark = pytest.mark.once

SOURCE = {"source": "bench/results/x.md", "commit": "abc"}
GAINS: dict[str, Any] = {
    "operators of": SOURCE,
    "operators": {"aten::var": [[10.0, 0.5, 0.4, 0.6], [100.0, 0.8, 0.7, 0.9]]},
    "modules": {
        "inference": {**SOURCE, "low": 1.25, "middle": 2.0, "high": 4.0},
        "training": {**SOURCE, "low": 1.0, "middle": 1.25, "high": 2.0},
    },
}

SCRIPT = """
import sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    def forward(self, x):
        return torch.var(self.inner(x), -1)

net = Net()
with torch.no_grad():
    for _ in range(20):
        net(torch.ones(64, 32))
for _ in range(5):
    net(torch.ones(64, 32)).sum().backward()
import eagercache
print("enabled", eagercache.is_enabled(), sys.argv[1:])
sys.exit(3)
"""


def call(native_ns: float | None, calls: int = 1, **more: Any) -> dict[str, Any]:
    return {
        **{"op": "aten::var", "dispatch_key": "CPU", "calls": calls, "native_ns": native_ns},
        **more,
    }


def process(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"wall_seconds": 2.0, "calls": calls, "modules": [], "backward_seconds": 0.0, **more}


def test_a_call_is_bounded_by_the_calls_beside_it_that_were_measured() -> None:
    rows = GAINS["operators"]["aten::var"]
    between = saved_of_call(rows, 20.0)
    assert between.low == pytest.approx(20 * 0.1) and between.high == pytest.approx(20 * 0.6)
    assert between.middle == pytest.approx(20 * 0.5)  # of the nearer one
    assert saved_of_call(rows, 80.0).middle == pytest.approx(80 * 0.2)
    below = saved_of_call(rows, 5.0)
    assert (below.low, below.high) == (pytest.approx(5 * 0.4), pytest.approx(5 * 0.6))
    far = saved_of_call(rows, 1000.0)
    assert far.low == 0.0 and far.middle == pytest.approx(200.0)


def test_what_would_lose_gains_nothing() -> None:
    slower = saved_of_call([[10.0, 1.2, 1.1, 1.3]], 10.0)
    assert (slower.low, slower.middle, slower.high) == (0.0, 0.0, 0.0)


def test_what_is_unknown_counts_as_no_gain() -> None:
    estimate = Estimate.of(
        [
            process(
                call(20_000.0, 1_000),
                call(5e8, op="aten::odd"),
                call(None, 7, dispatch_key="CUDA"),
            )
        ],
        GAINS,
    )
    odd, var, cuda = estimate.operators
    assert (odd.name, odd.known, odd.saved.high) == ("aten::odd", False, 0.0)
    assert var.saved.high == pytest.approx(0.012)
    assert (cuda.name, cuda.untimed, cuda.known) == ("aten::var @CUDA", 7, False)
    shares = estimate.shares(estimate.operators)
    assert shares["time"] == pytest.approx(0.26) and shares["known"] == pytest.approx(0.01)
    assert shares["high"] == pytest.approx(0.006)
    said = list(lines_of(estimate))
    assert "no outermost module was called" in said and not any("overlap" in x for x in said)


def test_modules_take_their_share_of_the_backward_pass() -> None:
    rows = [
        {"name": "a.Net", "gradients": True, "calls": 4, "seconds": 0.3},
        {"name": "a.Loss", "gradients": True, "calls": 4, "seconds": 0.1},
        {"name": "a.Net", "gradients": False, "calls": 2, "seconds": 0.2},
    ]
    estimate = Estimate.of([process(modules=rows, backward_seconds=0.8)], GAINS)
    by_name = {part.name: part for part in estimate.modules}
    trained = by_name["a.Net (training)"]
    assert trained.seconds == pytest.approx(0.9)
    assert trained.saved.low == 0.0 and trained.saved.high == pytest.approx(0.45)
    assert by_name["a.Net"].saved.middle == pytest.approx(0.1)
    said = list(lines_of(estimate))
    assert any("--training" in line for line in said) and "no operator was called" in said


def test_a_program_runs_natively_and_nothing_is_compiled(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGERCACHE_DIR", str(cache))
    monkeypatch.setenv("PYTHONPATH", PACKAGE_ROOT)
    Path("script.py").write_text(SCRIPT)
    done = CliRunner().invoke(cli.main, ["estimate", "--json", "script.py", "--lr", "1"])
    assert done.exit_code == 3, done.output
    said = json.loads(done.stderr[done.stderr.index("{") :])
    assert said["processes"] == 1 and not list(cache.rglob("*.so"))
    operators = {row["name"]: row for row in said["operators"]}
    assert operators["aten::var.correction"]["calls"] == 25
    assert operators["aten::var.correction"]["saved"]["middle"] > 0
    modules = {row["name"]: row["calls"] for row in said["modules"]}
    assert modules == {"__main__.Net": 20, "__main__.Net (training)": 5}  # and none below
    assert 0 <= said["shares"]["operators"]["low"] <= said["shares"]["operators"]["high"] < 1
    assert all(" at " in source for source in said["sources"])


def test_an_error_goes_where_the_estimate_does() -> None:
    done = CliRunner().invoke(cli.main, ["estimate", "--json", "no-such-program.py"])
    assert (done.exit_code, done.stdout) == (2, "")  # which is a program's
    assert json.loads(done.stderr)["exit_code"] == 2


def test_the_table_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Path(__file__).parent.parent.parent.parent / "bench" / "usual_gains.py"
    if not bench.exists():
        pytest.skip("no sources beside the package")
    assert runpy.run_path(str(bench))["table"]() == TABLE.read_text()
    table = json.loads(TABLE.read_text())
    for rows in table["operators"].values():
        for native_us, share, low, high in rows:
            assert native_us > 0 and low <= share <= high
    for row in table["modules"].values():
        assert 1.0 <= row["low"] <= row["middle"] <= row["high"]
