"""What `eagercache run --report` says of a program: sums, pages, pictures and names."""

from __future__ import annotations

import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from eagercache.cli import programs
from eagercache.cli.reports import (
    program_report,
    report_page,
    report_picture,
    report_text,
    reported_process,
)
from rich.console import Console

pytestmark = pytest.mark.once


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
