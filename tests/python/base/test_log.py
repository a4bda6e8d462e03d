"""EAGERCACHE_LOG: one line per event, in one form, from C++ and Python alike."""

from __future__ import annotations

import logging
import re

import pytest
from conftest import Program
from eagercache.base import log

pytestmark = pytest.mark.once

EVENT = re.compile(
    r"eagercache: (info|debug): event=\w+(?: \w+=(?:[^\s\"=]+|\"(?:[^\"\\]|\\.)*\"))*"
)
CALLS = "eagercache.enable(['var.correction'], on_miss='native', choose='always')\n" + (
    "torch.var(x, -1); torch.var(x, -1)\ntorch.var(x[:7], -1)\neagercache.disable()"
)


def lines_of(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("eagercache: ")]


@pytest.mark.parametrize(
    ("level", "expected", "absent"),
    [
        ("info", ["enable", "verdict", "disable"], ["load", "miss"]),
        ("debug", ["enable", "verdict", "load", "miss", "disable"], []),
        ("warning", [], ["enable", "verdict", "load", "miss", "disable"]),
    ],
)
def test_each_event_is_one_line_that_grep_finds(
    warm_program: Program, level: str, expected: list[str], absent: list[str]
) -> None:
    lines = lines_of(warm_program(CALLS, EAGERCACHE_LOG=level)["stderr"])
    for line in lines:
        assert EVENT.fullmatch(line), line
    for name in expected:
        assert any(f" event={name} " in f"{line} " for line in lines), (name, lines)
    for name in absent:
        assert not any(f" event={name} " in f"{line} " for line in lines), (name, lines)


def test_a_verdict_names_the_operator_the_decision_and_the_reason(warm_program: Program) -> None:
    lines = lines_of(warm_program(CALLS, EAGERCACHE_LOG="info")["stderr"])
    verdicts = [line for line in lines if "event=verdict" in line]
    assert any("op=aten::var.correction decision=kernel digest=" in line for line in verdicts)
    assert any(
        "decision=native" in line and 'reason="not in the store' in line for line in verdicts
    )


def test_values_with_spaces_and_quotes_stay_one_field(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="eagercache"):
        log.event(logging.INFO, "tried", text='a "b"\nc=d', path="/x/y", nothing=None, empty="")
        log.event(logging.DEBUG, "unheard")
    (record,) = caplog.records
    assert record.getMessage() == 'event=tried text="a \\"b\\" c=d" path=/x/y'
    assert EVENT.fullmatch("eagercache: info: " + record.getMessage())
