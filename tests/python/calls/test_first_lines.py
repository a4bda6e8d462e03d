"""What calls, counts and errors are in words."""

from __future__ import annotations

import pytest
from eagercache.calls.texts import first_line, named_line

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("one line", "one line", "ValueError: one line"),
        ("\n  the first \nthe second", "the first", "ValueError: the first"),
        ("the first\r\nthe second", "the first", "ValueError: the first"),
        ("", "ValueError", "ValueError: no message"),
        (" \n\t\n", "ValueError", "ValueError: no message"),
        ("x" * 1000, "x" * 240, "ValueError: " + "x" * 240),
    ],
)
def test_an_error_is_its_first_line_that_says_something(text: str, line: str, named: str) -> None:
    error = ValueError(text)
    assert first_line(error) == line and named_line(error) == named


def test_a_line_is_cut_off_where_it_is_wanted_and_its_kind_is_not() -> None:
    error = RuntimeError("0123456789")
    assert first_line(error, 4) == "0123" and named_line(error, 4) == "RuntimeError: 0123"
