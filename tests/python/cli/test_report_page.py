"""The report's page: what it says to do next, and what making it costs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from eagercache.cli.reports import program_report, report_page, report_picture

pytestmark = pytest.mark.once


def call(**more: Any) -> dict[str, Any]:
    return {
        **{"op": "aten::var", "dispatch_key": "CPU", "calls": 10, "hits": 8},
        **{"native_ns": 1e6, "kernel_ns": 2.5e5, "decision": "kernel", "reason": ""},
        **more,
    }


def part(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "wall_seconds": 4.0,
        "calls": list(calls),
        **{"aside": {}, "aside_reasons": {}, "modules": {}, "compiles": 1, "failures": 0},
        **{"not_yet": 0, "compile_seconds": 1.0, "command": ["x.py"], "environment": {}},
        **more,
    }


def steps_of(*calls: dict[str, Any]) -> list[str]:
    return list(report_page.next_steps(program_report.Report.of([part(*calls)])))


def test_an_operator_that_stays_native_is_told_with_its_reason() -> None:
    denied = "its last bit is not always native's in float64"
    native = {"decision": "native", "hits": 0, "reason": denied}
    (step,) = [
        step
        for step in steps_of(call(op="aten::pow", calls=1, **native), call())
        if "for good" in step
    ]
    assert "1 call of `aten::pow`" in step and denied in step
    undecided = call(decision="native", hits=0, reason="undecided")
    assert not any("for good" in step for step in steps_of(call(), undecided))
    slower = steps_of(call(decision="native", hits=0, reason="slower"))
    assert any("its kernel was slower" in step for step in slower)


def test_the_report_of_a_large_program_costs_less_than_a_second(tmp_path: Path) -> None:
    calls = [call(op=f"aten::op{i % 150}", calls=i) for i in range(1, 5001)]
    compiles = [
        {
            **{"op": "aten::op1", "began": i / 100, "ended": i / 100 + 0.5, "cpu_seconds": 1.0},
            **{"verdict": "kernel", "reason": ""},
        }
        for i in range(500)
    ]
    timeline = {
        **{"began_at": 0.0, "seconds": 6.0, "compiles": compiles},
        **{"steps": [(i, i / 1000) for i in range(4000)], "step_count": 4000},
        "samples": [(i / 100, i, 2 * i) for i in range(400)],
    }
    began = time.process_time()
    report = program_report.Report.of([part(*calls, timeline=timeline)] * 4)
    assert report_page.save_page(report, tmp_path / "page.html") == ""
    assert report_picture.save_picture(report, tmp_path / "picture.svg") == ""
    assert time.process_time() - began < 1.0
    assert (tmp_path / "page.html").stat().st_size < 4_000_000
