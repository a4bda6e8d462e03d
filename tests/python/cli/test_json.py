"""What entries of a store are in JSON: numbers are numbers, and what is JSON is unfolded."""

from __future__ import annotations

import json

import pytest
from eagercache.cli.common import entries_as_json, facts_as_json, print_json

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0", 0), ("-12", -12), ("1993.70", 1993.7), ("1.675e+07", 1.675e7), ("5e-05", 5e-5)),
        *(("12e45678", "12e45678"), ("1234567890123456", "1234567890123456"), ("007", "007")),
        *(("1e+999", "1e+999"), ("nan", "nan"), ("12.2.0", "12.2.0"), ("", ""), ("٣", "٣")),
        *(('{"a": [1]}', {"a": [1]}), ("[NaN]", "[NaN]"), ("{no", "{no")),
        ("[" * 90_000, "[" * 90_000),
    ],
)
def test_what_a_fact_is_in_json(text: str, value: object) -> None:
    found = facts_as_json({"fact": text})["fact"]
    assert (type(found), found) == (type(value), value)
    json.dumps(found, indent=2, allow_nan=False)


def test_deep_facts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for depth in range(50, 1200, 23):
        text = "[" * depth + "]" * depth
        print_json(entries_as_json([{"key": "a", "facts": {"call": text}}]))
        (row,) = json.loads(capsys.readouterr().out)
        shown = row["facts"]["call"]
        assert shown == text or json.dumps(shown) == text
