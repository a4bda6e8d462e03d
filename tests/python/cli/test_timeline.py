"""The timelines of `eagercache run --report`: what they hold, and how they are drawn."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import clean_environment
from eagercache.cli.reports import ticks, timeline, timeline_picture

pytestmark = pytest.mark.once

# A loop of a tiny net; what it prints must be as without us.
TRAINING = """
import time, torch
torch.manual_seed(0)
net = torch.nn.Linear(8, 4)
steps = torch.optim.SGD(net.parameters(), lr=0.001)
for step in range(30):
    torch.var(torch.randn(16, 8), -1)
    steps.zero_grad()
    net(torch.randn(16, 8)).square().sum().backward()
    steps.step()
    time.sleep(0.01)
print(net.weight.sum().item())
"""

# A step that torch.compile traces, with a hook of ours in the optimizer.
COMPILED = """
import sys, torch
from eagercache.cli.reports.timeline import Timeline
seen = Timeline()
seen.begin()
weight = torch.ones(4, requires_grad=True)
steps = torch.optim.SGD([weight], lr=0.001)
weight.sum().backward()
torch.compile(steps.step, backend="eager")()
print(weight.sum().item(), len(seen.ended([])["steps"]))
"""


def run(words: list[str], cache: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=clean_environment(EAGERCACHE_DIR=str(cache), OMP_NUM_THREADS="1"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_report_says_when_steps_were_and_when_kernels_were_made(
    cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    native = run(["training.py"], cache, tmp_path)
    words = ["-m", "eagercache", "run", "--report", "--json", "--page", "page.html"]
    chosen = ["--op", "var.correction", "--on-miss", "wait", "--choose", "always"]
    done = run([*words, *chosen, "training.py"], cache, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == native.stdout
    said = json.loads(done.stderr[done.stderr.index("{") :])
    (found,) = said["timelines"]
    assert [number for number, _ in found["steps"]] == list(range(30)) and found["step_count"] == 30
    (compiled,) = found["compiles"]
    assert compiled["op"] == "aten::var.correction" and compiled["verdict"] == "kernel"
    assert 0 < compiled["began"] < compiled["ended"] < found["seconds"]
    _, hits, calls = found["samples"][-1]
    assert (hits, calls) == (29, 30)  # the first call was a miss, which waited
    page = (tmp_path / "page.html").read_text()
    assert "What happened when" in page and "30 steps of the optimizer" in page
    assert '<polyline class="steps"' in page and "://" not in page


def test_a_step_that_is_compiled_is_left_alone(cache: Path, tmp_path: Path) -> None:
    done = run(["-c", COMPILED], cache, tmp_path)
    assert done.returncode == 0, done.stderr
    total, steps = done.stdout.split()
    assert float(total) == pytest.approx(4 * 0.999) and int(steps) <= 1
    assert "Timeline" not in done.stderr and "timeline" not in done.stderr


def test_a_long_program_keeps_a_bounded_number_of_samples_and_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeline, "_counters", lambda: (1, 2))
    monkeypatch.setattr(timeline, "MOST_SAMPLES", 8)
    monkeypatch.setattr(timeline, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(timeline, "MOST_STEPS", 16)
    one = timeline.Timeline()
    one.begin()
    optimizer, other = object(), object()
    for _ in range(1000):
        one._note_step(optimizer, (), {})
    one._note_step(other, (), {})
    deadline = time.monotonic() + 30
    while one._pause < 0.004 and time.monotonic() < deadline:
        time.sleep(0.001)
    found = one.ended([])
    assert len(found["samples"]) <= 8 and one._pause >= 0.004
    numbers = [number for number, _ in found["steps"]]
    assert numbers == list(range(0, 1000, numbers[1])) and 8 <= len(numbers) <= 16
    assert found["step_count"] == 1000


def test_rates_and_lengths_of_steps_are_of_stretches() -> None:
    samples = [(0.0, 0, 0), (1.0, 10, 30), (1.0, 10, 30), (3.0, 50, 70)]
    assert timeline.rates(samples) == [(0.0, 1.0, 10.0, 20.0), (1.0, 3.0, 20.0, 0.0)]
    steps = [(0, 1.0), (1, 2.0), (3, 3.0), (4, 5.0)]
    assert timeline.step_lengths(steps, 2) == [(1.0, 3.0, pytest.approx(2 / 3)), (3.0, 5.0, 2.0)]
    assert timeline.step_lengths(steps[:1], 2) == []


def compiled(began: float, ended: float, **more: Any) -> dict[str, Any]:
    one = {"op": "aten::<b>", "verdict": "kernel", "reason": "", "cpu_seconds": 1.0}
    return {**one, "began": began, "ended": ended, **more}


def test_compiles_at_the_same_time_lie_in_rows_of_their_own() -> None:
    found = [compiled(0, 2), compiled(1, 3), compiled(2, 4), compiled(2.5, 3)]
    rows = timeline.lanes(found)
    assert [[one["began"] for one in row] for row in rows] == [[0, 2], [1], [2.5]]


def one_timeline(**more: Any) -> dict[str, Any]:
    return {
        "began_at": 100.0,
        "seconds": 4.0,
        "samples": [(0.0, 0, 0), (2.0, 10, 20), (4.0, 40, 50)],
        "steps": [(0, 1.0), (1, 2.0)],
        "step_count": 2,
        "compiles": [compiled(0, 3), compiled(1, 2, verdict="not yet")],
        **more,
    }


def test_a_picture_has_nothing_outside_of_it_and_no_text_as_markup() -> None:
    text = timeline_picture.timelines([one_timeline(), one_timeline(began_at=103.0)])
    HTMLParser().feed(text)
    assert "<b>" not in text and "aten::&lt;b&gt;" in text
    assert "process 2, from 3.0 s on" in text
    for left, width in re.findall(
        r'<rect class="\w+" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', text
    ):
        assert float(left) >= 90 and float(left) + float(width) <= 985.5
    assert timeline_picture.timelines([]) == ""
    empty = one_timeline(compiles=[], samples=[(0.0, 0, 0)], steps=[])
    assert timeline_picture.timelines([empty]) == ""


def test_many_processes_are_counted_and_the_longest_are_shown() -> None:
    text = timeline_picture.timelines([one_timeline() for _ in range(6)])
    assert text.count("<figure>") == timeline_picture.MOST_PROCESSES
    assert "2 shorter processes without a picture" in text


@pytest.mark.parametrize(
    ("seconds", "tick"), [(0.05, 0.005), (1.0, 0.1), (7.0, 1.0), (162.0, 20.0), (5000.0, 500.0)]
)
def test_marks_are_round_numbers(seconds: float, tick: float) -> None:
    assert ticks.tick(seconds) == pytest.approx(tick)


def test_what_a_service_answered_is_on_the_clock_of_the_process() -> None:
    one = timeline.Timeline()
    now = time.monotonic()
    answer = SimpleNamespace(
        op="aten::var", began=now, ended=now + 1, verdict="native", reason="r", cpu_seconds=0.5
    )
    (found,) = one.ended([answer])["compiles"]
    assert found["ended"] - found["began"] == pytest.approx(1) and 0 <= found["began"] < 60
