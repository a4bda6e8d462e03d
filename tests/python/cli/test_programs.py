"""`eagercache run` and `record`: programs run unchanged, and their children; errors are told."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from conftest import PACKAGE_ROOT, clean_environment
from eagercache.calls import trace
from eagercache.cli import main as cli
from eagercache.cli import program, programs
from eagercache.cli.reports import (
    program_report,
    report_page,
    report_picture,
    report_text,
    reported_process,
)
from rich.console import Console

pytestmark = pytest.mark.once

# A script that says what it sees, and starts children in every way that Python has.
SCRIPT = """
import json, multiprocessing, os, runpy, subprocess, sys
import torch
import eagercache

def count(n):
    torch.sin(torch.ones(n))
    return eagercache.is_enabled()

if __name__ == "__main__":
    torch.cos(torch.ones(3))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(count, [4])
        pool.close()
        pool.join()  # a worker that is terminated writes nothing
    code = "import torch, eagercache; torch.exp(torch.ones(5)); print(eagercache.is_enabled())"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    print(json.dumps({
        "argv": sys.argv, "name": __name__, "file": os.path.basename(__file__),
        "main": sys.modules["__main__"].__dict__.get("count") is count,
        "spawned": spawned, "started": started.stdout.strip(), "stderr": started.stderr,
        "theirs": os.environ.get("SITECUSTOMIZE_RAN"), "enabled": eagercache.is_enabled(),
    }))
    sys.exit(7)
"""


def eagercache(
    *words: str, cache: Path, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagercache", *words],
        env=clean_environment(EAGERCACHE_DIR=str(cache), **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    return folder


def test_a_script_runs_as_ever_with_its_children_and_all_is_recorded(
    cache: Path, folder: Path
) -> None:
    # A sitecustomize of the environment's own is run as without us.
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(
        "import os; os.environ['SITECUSTOMIZE_RAN'] = str(os.getpid())"
    )
    path = os.pathsep.join([str(theirs), PACKAGE_ROOT])
    words = ["record", "trace", "--", "script.py", "--flag", "-m", "x"]
    done = eagercache(*words, cache=cache, folder=folder, PYTHONPATH=path)
    assert done.returncode == 7, done.stderr
    said = json.loads(done.stdout)
    assert said["argv"] == ["script.py", "--flag", "-m", "x"]
    assert (said["name"], said["file"], said["main"]) == ("__main__", "script.py", True)
    assert said["enabled"] and said["spawned"] == [True] and said["started"] == "True", said
    assert said["theirs"]
    recorded = trace.Trace()
    trace.read(folder / "trace", recorded)
    names = sorted(call.name for call in recorded.calls.values())
    assert names == ["aten::cos", "aten::exp", "aten::sin"]
    assert "3 calls recorded; trace holds 3 keys" in done.stderr

    # Once more, into the same file.
    again = eagercache(
        "record", "--append", "--json", "trace", "script.py", cache=cache, folder=folder
    )
    assert again.returncode == 7
    counted = json.loads(again.stderr[again.stderr.index("{") :])
    assert counted == {"calls": 3, "keys": 3, "sections": 3, "trace": "trace"}


def test_run_takes_modules_and_reports(cache: Path, folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__main__.py").write_text(
        "import sys, torch\n"
        "for _ in range(40): torch.sin(torch.ones(1000))\n"
        "print(sys.argv[1:], torch.sin(torch.zeros(1)).item())\n"
    )
    words = ["run", "--report", "--on-miss", "native", "-m", "package", "--report", "x"]
    done = eagercache(*words, cache=cache, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--report', 'x'] 0.0\n"
    assert "aten::sin" in done.stderr and "41" in done.stderr
    assert "cost: 0 compiles" in done.stderr
    (picture,) = folder.glob("eagercache-report-package-*-*.svg")
    assert f"picture: {picture.name}" in done.stderr
    assert "aten::sin" in picture.read_text()
    (page,) = folder.glob("eagercache-report-package-*-*.html")
    assert f"page: {page.name}" in done.stderr and page.stem == picture.stem
    assert "aten::sin" in page.read_text()


def test_run_enables_training_of_modules_when_told(cache: Path, folder: Path) -> None:
    (folder / "training.py").write_text(
        "import torch\nfrom eagercache.runtime.session import session\n"
        "print(session.configuration.training)\n"
    )
    words = ["run", "--on-miss", "native", "--modules", "auto"]
    for more, said in (["--training"], "True\n"), ([], "False\n"):
        done = eagercache(*words, *more, "training.py", cache=cache, folder=folder)
        assert (done.stdout, done.stderr) == (said, "")


def test_run_hands_signals_on_and_tells_how_the_program_ended(cache: Path, folder: Path) -> None:
    (folder / "waits.py").write_text(
        "import pathlib, signal, sys, time, torch\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(120)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-m", "eagercache", "run", "--report", "--json", "waits.py"],
        env=clean_environment(EAGERCACHE_DIR=str(cache)),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 9, stderr
    assert json.loads(stderr[stderr.index("{") :])["processes"] == 1


def test_a_program_that_cannot_have_eagercache_runs_all_the_same(cache: Path, folder: Path) -> None:
    (folder / "plain.py").write_text("import torch; print(torch.sin(torch.zeros(1)).item())")
    cache.chmod(0o777)  # a store that others may write is refused
    done = eagercache("run", "plain.py", cache=cache, folder=folder)
    assert done.returncode == 0 and done.stdout == "0.0\n"
    assert "no kernel store can be used" in done.stderr


def test_a_program_without_torch_is_left_alone(folder: Path) -> None:
    (folder / "small.py").write_text(
        "import sys; print(sorted({'eagercache', 'torch', 'typing'} & set(sys.modules)))"
    )
    environ = program.environment_of(program.Settings(), clean_environment())
    code = program.run([sys.executable, str(folder / "small.py")], environ)
    assert code == 0
    done = subprocess.run(
        [sys.executable, str(folder / "small.py")],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing.py"], "there is no program nothing.py"),
        (["run", "--op", "aten::nonsense", "script.py"], "there is no operator 'aten::nonsense'"),
        (["run", "--skip", "nonsense", "script.py"], "there is no operator"),
        (["run", "--training", "script.py"], "--training is about whole modules; say which"),
        (["record", "script.py", "--", "script.py"], "script.py exists and is no trace"),
        (["record", "no/folder/trace", "script.py"], "no/folder/trace cannot be written"),
        (["record", "trace", "--"], "there is no program"),
        (["record", "trace", "nothing.py"], "there is no program nothing.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert done.output.startswith("Error: ") and done.output.count("\n") == 1
    assert (folder / "script.py").read_text() == SCRIPT


def test_missing_arguments_and_unknown_values_are_exit_code_2() -> None:
    for arguments in (["run"], ["record", "trace"], ["run", "--on-miss", "never", "x.py"]):
        assert CliRunner().invoke(cli.main, arguments).exit_code == 2


def test_nothing_recorded_is_exit_code_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("EAGERCACHE_ON_MISS", raising=False)
    (folder / "empty.py").write_text("print('here')")
    done = CliRunner().invoke(cli.main, ["record", "trace", "empty.py"])
    assert done.exit_code == 1
    assert "nothing was recorded" in done.output
    assert capfd.readouterr().out == "here\n"


def part(**more: Any) -> dict[str, Any]:
    call = {
        "op": "aten::var",
        "dispatch_key": "CPU",
        "calls": 10,
        "hits": 8,
        "native_ns": 1e6,
        "kernel_ns": 2.5e5,
        "decision": "kernel",
    }
    return {
        "wall_seconds": 1.0,
        "calls": [{**call, **more}],
        "aside": {"aten::var": 3},
        "aside_reasons": {"dtype": 3},
        "modules": {
            "torch.nn.Sequential": {
                "modules": 2,
                "hits": 7,
                "native": 3,
                "not_yet": 1,
                "refused": 0,
                "seconds_saved": 0.5,
            }
        },
        "compiles": 2,
        "failures": 0,
        "not_yet": 1,
        "command": ["script.py", "<x>"],
        "environment": {"torch": "2"},
        "compile_seconds": 4.0,
    }


def test_a_report_adds_up_times_and_processes() -> None:
    report = program_report.Report.of([part(), part(calls=2, hits=0, kernel_ns=None)])
    (row,) = report.rows
    assert (row.calls, row.hits) == (12, 8)
    assert row.native == pytest.approx(12e-3)
    assert row.now == pytest.approx(2e-3 + 8 * 0.25e-3 + 2e-3)
    assert row.by_native == 0 and row.undecided == pytest.approx(4e-3)
    assert row.saved == pytest.approx(8 * 0.75e-3) and row.lost == 0
    assert report.seconds_saved() == pytest.approx(row.saved + 2 * 0.5)
    assert report.modules["torch.nn.Sequential"]["hits"] == 14
    text = " ".join(report_text.report_lines(report))
    assert "2 processes" in text and "4 compiles" in text and "6 calls stepped aside" in text
    # A hit of unknown time is in the counts, not in the times.
    unknown = program_report.Report.of([part(kernel_ns=None)])
    assert unknown.rows[0].native == 0 and unknown.rows[0].untimed == 10


def test_calls_that_step_aside_and_modules_have_shares_of_the_time() -> None:
    aside = {"dispatch_key": "CPU", "rule": "dtype", "timed": 25, "native_ns": 1e6}
    asides = [
        {"op": "aten::var", "calls": 100, **aside},
        {"op": "my::op", "calls": 3, **aside, "timed": 0, "native_ns": 0},
        {"op": "aten::sin", "calls": 10, **aside, "rule": "overlap"},
    ]
    parts = [{**part(), "asides": asides}, {**part(), "asides": asides[:1]}]
    parts[0]["modules"]["torch.nn.Sequential"]["seconds_by_kernels"] = 0.25
    report = program_report.Report.of(parts)
    assert report.seconds_aside() == {"dtype": pytest.approx(0.2), "overlap": pytest.approx(0.01)}
    assert [(row.op, row.calls, row.timed, row.seconds) for row in report.asides] == [
        ("aten::var", 200, 50, pytest.approx(0.2)),
        ("aten::sin", 10, 25, pytest.approx(0.01)),
        ("my::op", 3, 0, None),
    ]
    text = report_page.page_of(report)
    assert "stepped aside by rule, about (dtype 0.20, overlap 0.01): 0.21 s" in text
    assert "whole modules, answered by kernels: 0.25 s" in text
    rest = 2.0 - report.total().now - 0.25 - 0.21
    assert f"waiting: {rest:.2f} s" in text
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", text)]
    assert sum(widths) == pytest.approx(100, abs=0.1)
    assert "a tensor has a rare dtype" in text
    assert "(dtype 6), about 0.21 s natively" in " ".join(report_text.report_lines(report))


def test_forks_and_processes_that_were_killed_are_counted_apart() -> None:
    forks = [{"fork": True, "wall_seconds": seconds} for seconds in (1.0, 2.5)]
    report = program_report.Report.of([part(), {**part(), "ended": False}, *forks])
    assert (report.processes, report.cut_off, report.forks) == (2, 1, 2)
    assert report.fork_seconds == 3.5 and report.process_seconds == 2.0
    said = report.processes_text()
    assert "2 processes, of which 1 was ended" in said and "2 forked children" in said
    assert said in report_page.page_of(report)
    assert said in list(report_text.report_lines(report))
    assert program_report.Report.of([part()]).processes_text() == "1 process"


def test_a_report_tells_not_yet_from_failed_and_native() -> None:
    verdicts = ("not yet", "failed", "native", "kernel")
    report = program_report.Report.of([part(decision=one, hits=0) for one in verdicts])
    (row,) = report.rows
    assert row.decisions == dict.fromkeys(verdicts, 1)
    assert row.by_native == pytest.approx(20e-3) and row.undecided == pytest.approx(20e-3)
    stream = io.StringIO()
    report_text.print_report(report, Console(file=stream, width=160))
    (line,) = (line for line in stream.getvalue().splitlines() if "aten::var" in line)
    assert line.strip("│ ").split()[-7::2] == ["1"] * 4
    assert "not yet" in stream.getvalue() and "torch.nn.Sequential" in stream.getvalue()
    assert "4 kernels were not made yet" in stream.getvalue()
    assert "eagercache record TRACE -- script.py" in stream.getvalue()


def test_a_kernel_that_loses_is_told(tmp_path: Path) -> None:
    report = program_report.Report.of([part(native_ns=1e6, kernel_ns=2e6)])
    (row,) = report.rows
    assert row.saved == 0 and row.lost == pytest.approx(8e-3)
    assert any("leave it out with `--skip`" in step for step in report_page.next_steps(report))


def test_a_page_stands_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    report = program_report.Report.of([part(), part(op="aten::<b>", native_ns=5.0, hits=0)])
    assert report_page.save_page(report, page) == ""
    text = page.read_text()
    parser = HTMLParser()
    parser.feed(text)
    assert "://" not in text and "src=" not in text and "prefers-color-scheme: dark" in text
    assert "aten::&lt;b&gt;" in text and "script.py &lt;x&gt;" in text and "<b>::" not in text
    assert "torch.nn.Sequential" in text and "dtype" in text and "warm TRACE" in text
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", text)]
    assert sum(widths) == pytest.approx(100, abs=0.1)
    assert "cannot be written" in report_page.save_page(report, tmp_path / "no" / "page.html")
    assert "No process reported" in report_page.page_of(program_report.Report.of([]))


def test_a_long_report_ends_with_the_rest_in_one_row() -> None:
    parts = [part(op=f"aten::op{i}", native_ns=1e6 + i) for i in range(60)]
    report = program_report.Report.of(parts)
    shown = report.shown_rows()
    assert len(shown) == program_report.MOST_ROWS
    assert shown[-1].op == f"{60 - program_report.MOST_ROWS + 1} more"
    assert sum(row.calls for row in shown) == 600


def test_a_missing_matplotlib_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = program_report.Report.of([part()])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    problem = report_picture.save_picture(report, tmp_path / "picture.png")
    assert "matplotlib is not installed (pip install matplotlib)" in problem
    assert report_picture.save_picture(report, tmp_path / "picture.svg") == ""
    monkeypatch.undo()
    assert report_picture.save_picture(report, tmp_path / "picture.png") == ""
    for name in ("picture.png", "picture.svg"):
        nowhere = report_picture.save_picture(report, tmp_path / "no" / name)
        assert "cannot be written" in nowhere


def test_a_picture_has_a_bar_for_native_and_one_for_now() -> None:
    row = program_report.Report.of([part(op="aten::<b>")]).rows[0]
    tree = ElementTree.fromstring(report_picture.picture_of([row]))
    bars = {
        bar.attrib["class"]: float(bar.attrib["width"])
        for bar in tree.iter("{http://www.w3.org/2000/svg}rect")
        if float(bar.attrib["width"]) > 12
    }
    assert bars["now"] / bars["native"] == pytest.approx(row.now / row.native, abs=0.01)
    assert "aten::<b>" in [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["folder/train.py", "x"], "train"),
        (["-m", "package.train"], "package.train"),
        (["--", "-m", "package.train"], "package.train"),
        (["-c", "import os; print('a/b')"], "command"),
        (["-"], "stdin"),
        (["bash", "-c", "x"], "bash"),
        (["."], "program"),
    ],
)
def test_a_report_has_the_name_of_its_program(words: list[str], name: str) -> None:
    assert programs._name_of(tuple(words), False) == name
    assert programs._name_of(("package.train", "x"), True) == "package.train"


def test_a_gain_is_of_times_that_were_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"op": "aten::abs", "overload": "", "dispatch_key": "CPU", "calls": 4}
    recorded = [
        (json.dumps({**call, "digest": digest, "native_ns": 9000}), 3) for digest in ("a", "b")
    ]
    kernel, native = (
        SimpleNamespace(
            digest=digest,
            native_ns=200.0,
            kernel_ns=kernel_ns,
            decision=decision,
            reason="",
            facts={"bytes": "1000", "copy_gbps": "20"},
            op="aten::abs",
            overload="",
            dispatch_key="CPU",
            call={},
            gigabytes_per_second=10.0,
        )
        for digest, kernel_ns, decision in (("a", 100.0, "kernel"), ("b", None, "native"))
    )
    monkeypatch.setattr("eagercache.base.load.core.recorded_calls", lambda: recorded)
    monkeypatch.setattr("eagercache.frontend.report.kernels", lambda: [kernel, native])
    calls = reported_process.process_report(1.0)["calls"]
    # The program saw 9,000 ns; the kernel's 100 ns were measured beside 200.
    assert [call["native_ns"] for call in calls] == [200.0, 9000]
    (row,) = program_report.Report.of([part() | {"calls": calls}]).rows
    assert row.gigabytes_per_second == pytest.approx(10) and row.share_of_copy == pytest.approx(0.5)
