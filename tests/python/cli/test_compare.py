"""`eagercache compare`: whole processes by turns, what they say together, and how it is said."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import PACKAGE_ROOT
from eagercache.cli import main as cli
from eagercache.cli.compared_output import compare_outputs, distance, numbers_of
from eagercache.cli.comparison import Comparison, Ratio, progress_of
from eagercache.cli.comparison_text import lines_of
from eagercache.cli.measured_process import Run, measured
from eagercache.cli.program import Settings
from eagercache.cli.progress_bars import BarReader

pytestmark = pytest.mark.once


def run_of(seconds: float, **more: Any) -> Run:
    return Run(seconds=seconds, **{"program_bytes": 1000, "notes": [{"hits": 5}], **more})


def comparison_of(pairs: list[tuple[float, float]], cold: float = 5.0, **more: Any) -> Comparison:
    return Comparison(
        run_of(9.0),
        run_of(cold, **more),
        [(run_of(native), run_of(kernels, **more)) for native, kernels in pairs],
    )


# ---- the program, run ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGERCACHE_DIR", str(cache))
    monkeypatch.setenv("PYTHONPATH", PACKAGE_ROOT)
    return tmp_path


def compare(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["compare", "--runs", "1", *words])


def test_a_program_runs_both_ways_by_turns_and_is_not_changed(folder: Path) -> None:
    (folder / "script.py").write_text(
        "import os, pathlib, sys, time, torch\n"
        "with open('runs', 'a') as file:\n"
        "    print('eagercache' in sys.modules, file=file)\n"
        "print(sys.argv[1:], sys.stdin.read(), torch.sin(torch.ones(4)).sum().item())\n"
        "print('took', time.time(), 's')\n"
        "print('bar 3/4', end='\\r', file=sys.stderr)\n"
    )
    (folder / "text").write_text("hello")
    words = ["--on-miss", "native", "--input", "text", "--json", "script.py", "--json", "-m", "3"]
    done = compare(*words)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    # Native, the first with kernels, and a pair.
    assert (folder / "runs").read_text().split() == ["False", "True", "False", "True"]
    assert len(said["native_seconds"]) == len(said["warm_seconds"]) == 1
    assert said["exit_codes"] == {"native": [0], "kernels": [0]}
    assert said["ratio_low"] is None and "single pair" in said["verdict"]
    output = said["output"]
    assert output["same"] and output["lines"] == 2 and output["numbers"] == 2
    assert output["changing"] == 1  # the time
    memory = said["memory"]
    assert memory["native_bytes"][0] > 1 << 26 and memory["warm_bytes"][0] > 1 << 26
    assert memory["gpu_ratio"] is None
    assert said["hits"] == said["not_yet"] == 0


@pytest.mark.parametrize(
    ("words", "variables", "child"),
    [
        (["eagercache.service.linger_main"], {}, False),
        ([], {"EAGERCACHE_INSIDE_WORKER": "1"}, False),
        ([], {"EAGERCACHE_INSIDE_WORKER": "1"}, True),  # a compiler, with another environment
    ],
)
def test_what_compiles_behind_a_program_is_waited_for_and_no_memory_of_the_program(
    tmp_path: Path, words: list[str], variables: dict[str, str], child: bool
) -> None:
    # The program has ended by then, and what it started has its stdout and stderr.
    holds = "import time; time.sleep(1); held = b'x' * (300 << 20); time.sleep(1.5)"
    command = [sys.executable, "-I", "-c", holds]
    if child:
        starts = f"import subprocess; subprocess.run({command!r}, env={{}})"
        command = [sys.executable, "-I", "-c", starts]
    (tmp_path / "script.py").write_text(
        "import os, subprocess, time\n"
        f"subprocess.Popen({command + words!r}, env={{**os.environ, **{variables!r}}},\n"
        "    start_new_session=True)\n"
        "time.sleep(0.5)\n"
    )
    began = time.monotonic()
    program = [sys.executable, str(tmp_path / "script.py")]
    run = measured(program, Settings(native=True), os.environ, settle=30.0)
    assert time.monotonic() - began > 2.5 > 1.5 > run.seconds and not run.workers_left
    assert run.worker_bytes > 300 << 20 > run.program_bytes > 0


def test_a_program_without_torch_is_compared_and_told_so(folder: Path) -> None:
    (folder / "plain.py").write_text("print('sum', 1 + 2)")
    done = compare("plain.py")
    assert done.exit_code == 0, done.output
    assert "MB" in done.stdout and "active in no process" in done.stdout
    assert "in a single pair of runs" in done.stdout.splitlines()[-1]


def test_a_program_that_fails_both_ways_keeps_its_exit_code(folder: Path) -> None:
    (folder / "fails.py").write_text(
        "import sys; print('said'); print('wrong', file=sys.stderr); sys.exit(5)"
    )
    done = compare("fails.py")
    assert done.exit_code == 5
    assert "said" in done.stderr and "wrong" in done.stderr and done.stdout == ""
    assert "exit code 5, natively and with kernels" in done.stderr


def test_an_exit_code_of_kernels_alone_is_an_error(folder: Path) -> None:
    (folder / "differs.py").write_text(
        "import sys, torch; sys.exit(4 if 'eagercache' in sys.modules else 0)"
    )
    done = compare("--json", "differs.py")
    assert done.exit_code == 1
    said = json.loads(done.stdout)
    assert said["exit_code"] == 1 and "exit code 4 with kernels" in said["error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "there is no program nothing.py"),
        (["--fresh", "--dir", ".", "script.py"], "--fresh and --dir name two caches"),
        (["--training", "script.py"], "--training is about whole modules"),
        (["--runs", "0", "script.py"], "Invalid value for '--runs'"),
    ],
)
def test_bad_usage_is_one_line(folder: Path, words: list[str], message: str) -> None:
    (folder / "script.py").write_text("")
    done = CliRunner().invoke(cli.main, ["compare", *words])
    assert done.exit_code == 2 and message in done.output and done.output.count("\n") == 1


# ---- what runs say together ---------------------------------------------------------------------


def test_a_ratio_has_the_interval_of_its_pairs() -> None:
    ratio = Ratio.of_pairs([(2.0, 1.0), (2.2, 1.0), (1.8, 1.0)])
    assert ratio.value == pytest.approx((2.0 * 2.2 * 1.8) ** (1 / 3))
    assert ratio.low < ratio.value < ratio.high and ratio.low * ratio.high == pytest.approx(
        ratio.value**2
    )
    assert ratio.sign == 1
    assert Ratio.of_pairs([(1.0, 2.0), (1.1, 2.0), (0.9, 2.0)]).sign == -1
    assert Ratio.of_pairs([(1.0, 1.1), (1.1, 1.0)]).sign == 0
    assert Ratio.of_pairs([(2.0, 1.0)]).sign == 0  # one pair says nothing of the spread


def test_the_verdict_is_honest_in_plain_words() -> None:
    faster = comparison_of([(2.0, 1.0), (2.02, 1.0), (1.98, 1.0)]).verdict()
    assert faster.startswith("x2.00 faster (1.9") and "from the second process on" in faster
    assert faster.endswith("1.00 of its memory")
    slower = comparison_of([(1.0, 2.0), (1.01, 2.0), (0.99, 2.0)]).verdict()
    assert slower.startswith("slower: x0.50 of native's speed (0.4")
    open_ = comparison_of([(1.0, 1.1), (1.1, 1.0), (1.0, 1.0)]).verdict()
    assert open_.startswith("no difference in speed that 3 pairs of runs can tell: x1.00 (0.")
    assert "may be chance" in comparison_of([(2.0, 1.0)]).verdict()


def test_what_the_first_process_lost_is_paid_by_later_ones() -> None:
    pairs = [(2.0, 1.0)] * 3
    # 3 s lost, 1 s saved in each second of later runs.
    assert comparison_of(pairs, cold=5.0).paid_after() == pytest.approx(5.0 + 3.0)
    assert comparison_of(pairs, cold=1.5).paid_after() == 1.5
    assert comparison_of([(1.0, 2.0)] * 3).paid_after() is None
    assert comparison_of([(1.0, 1.01), (1.02, 1.0), (1.0, 1.0)]).paid_after() is None


def test_progress_is_seen_by_the_lines_that_both_print() -> None:
    native = Run(seconds=10.0, times=[1.0, 2.0, 4.0, 6.0, 8.0])
    slow_first = Run(seconds=7.0, times=[2.0, 4.0, 5.0, 5.5, 6.5])
    progress = progress_of([native], [slow_first])
    assert progress is not None
    assert (progress.lost, progress.turn, progress.even) == (2.0, 4.0, 5.5)
    behind = progress_of([native], [Run(seconds=12.0, times=[2.0, 4.0, 5.0, 8.0, 10.0])])
    assert behind is not None and behind.even is None and behind.turn == 12.0
    ahead = progress_of([native], [Run(seconds=8.0, times=[0.5, 1.0, 3.0, 5.0, 7.0])])
    assert ahead is not None and ahead.lost == 0.0
    few = Run(seconds=10.0, times=[1.0, 2.0])
    assert progress_of([few], [few]) is None
    at_the_end = Run(seconds=10.0, times=[9.0, 9.1, 9.2, 9.3, 9.4])
    assert progress_of([at_the_end], [at_the_end]) is None


def test_progress_is_seen_by_bars_where_there_are_no_lines() -> None:
    def run(seconds: float, steps: int, rate: float) -> Run:
        return Run(seconds=seconds, steps=[(n, 1.0 + n / rate) for n in range(1, steps + 1, 3)])

    native, kernels = run(11.5, 100, 10.0), run(6.5, 100, 20.0)
    kernels.steps = [(done, seconds + 2.0) for done, seconds in kernels.steps]
    progress = progress_of([native], [kernels])
    assert progress is not None
    assert progress.lost == pytest.approx(1.95, abs=0.01) and progress.turn < 3.2
    assert progress.even is not None and 4.9 < progress.even < 5.3
    assert progress_of([native], [run(6.5, 97, 20.0)]) is None  # not equally far at the end


def test_steps_are_read_of_the_longest_bar() -> None:
    reader = BarReader()
    reader.feed(b"epoch 0/2\r 0/100 at 3/4/2024\r 10/1", 1.0)
    reader.feed(b"00\r 50/100\r100/100\n", 2.0)
    reader.feed(b"epoch 1/2\r 1/100 [1.5/2]\r", 3.0)
    assert reader.steps == [(10, 2.0), (50, 2.0), (100, 2.0), (101, 3.0)]


def test_what_is_not_made_yet_is_told_with_the_remedy() -> None:
    unfinished = comparison_of([(1.0, 1.0)] * 2, notes=[{"hits": 0, "compiles": 1, "not_yet": 3}])
    text = "\n".join(lines_of(unfinished, "script.py"))
    assert "kernels were still being made in 2 of 2 later processes" in text
    assert "3 kernels were not made yet" in text
    assert "`eagercache record TRACE -- script.py`" in text and "`eagercache warm TRACE`" in text
    assert "active in no process" in "\n".join(lines_of(comparison_of([(1, 1)], notes=[]), "x"))


# ---- output -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text", "numbers"),
    [
        ("loss: 0.25, step 3/10", "loss: #, step #/#", [0.25, 3.0, 10.0]),
        ("layer3.weight v1.2.3", "layer3.weight v1.2.3", []),
        ("took 1.5s, 20%", "took # s, # %", [1.5, 20.0]),
        ("tensor([-1.0e-3, 2.])", "tensor([#, #])", [-0.001, 2.0]),
        ("1,234 calls", "# calls", [1234.0]),
        ("nan and -inf", "# and #", [math.nan, -math.inf]),
    ],
)
def test_numbers_are_told_from_text(line: str, text: str, numbers: list[float]) -> None:
    found = numbers_of(line)
    assert found[0] == text
    assert [distance(*pair) for pair in zip(found[1], numbers, strict=True)] == [0.0] * len(numbers)


def test_a_distance_is_a_share_of_the_larger_number() -> None:
    assert distance(2.0, 1.0) == distance(1.0, 2.0) == 0.5
    assert distance(math.nan, math.nan) == distance(0.0, -0.0) == 0.0
    assert distance(1.0, math.nan) == distance(1.0, math.inf) == math.inf


def test_outputs_are_compared_line_by_line() -> None:
    native = [["loss 1.0", "took 2.0 s", "done"], ["loss 1.0", "took 3.0 s", "done"]]
    same = compare_outputs(native, [["loss 1.0", "took 9.0 s", "done"]])
    assert same.same and (same.lines, same.numbers, same.changing) == (3, 1, 1)
    other = compare_outputs(native, [["loss 1.0", "x", "done"], ["loss 1.5", "took 9 s", "oh"]])
    assert not other.same and other.differing == 1
    assert other.largest is not None
    assert (other.largest.line, other.largest.kernels_number) == (1, 1.5)
    assert other.largest.relative == pytest.approx(1 / 3)
    assert other.text is not None and (other.text.line, other.text.kernels) == (2, "x")
    assert compare_outputs(native, [["loss 1.0"]]).missing == 2
    infinite = compare_outputs([["1"], ["1"]], [["nan"]])
    assert json.dumps(infinite.as_dict(), allow_nan=False)


def test_lines_that_change_between_native_runs_say_nothing() -> None:
    native = [["seed 1", "end"], ["other words", "end"]]
    result = compare_outputs(native, [["third words", "end"]])
    assert result.same and result.changing == 1
