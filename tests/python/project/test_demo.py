"""What the demo (`examples/`) takes for an error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "examples"))

import demo_report

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("compiles", "failures", "digests", "again"),
    [
        (0, 0, ["a", "b"], False),
        (1, 0, ["a", "b"], True),
        (0, 1, ["a", "b"], True),
        (1, 0, ["a", "b", "c"], False),  # a kernel of its own beside the one of its class
        (1, 1, ["a", "b", "c"], True),
    ],
)
def test_the_second_process_may_compile_what_is_new_and_nothing_else(
    compiles: int, failures: int, digests: list[str], again: bool
) -> None:
    timing = demo_report.Timing.of([0.001, 0.002])
    second = demo_report.SecondProcess(
        timing, timing, 0.0, 0.0, 0.0, 10, compiles, failures, digests, []
    )
    assert second.compiled_again({"a", "b"}) == again
