"""What people read says no plural of one: counts of things are told with `counted`."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

PACKAGE = Path(__file__).resolve().parents[3] / "python_hooks" / "eagercache"
FOLDERS = ("cli", "frontend", "ahead", "runtime", "modules")
# A key that begins with the same characters as others is one of two at least.
NEVER_ONE = {"entries begin with "}


def counts_of_things(text: str) -> Iterator[str]:
    """What follows a ``len(...)`` in an f-string and is a plural."""
    for node in ast.walk(ast.parse(text)):
        values = node.values if isinstance(node, ast.JoinedStr) else []
        for value, after in itertools.pairwise(values):
            if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            called = value.value.func if isinstance(value.value, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == "len":
                words = str(after.value).removeprefix(" ")
                if re.match(r"[a-z]+s\b", words):
                    yield words


def test_things_are_counted_with_their_singular() -> None:
    files = [path for name in FOLDERS for path in sorted((PACKAGE / name).rglob("*.py"))]
    found = [words for path in files for words in counts_of_things(path.read_text())]
    assert set(found) == NEVER_ONE


def test_a_plural_of_one_is_found() -> None:
    assert list(counts_of_things('f"{len(rows)} rows of {len(names):,} names and {n} more"')) == [
        "rows of ",
        "names and ",
    ]


def test_the_glossary_is_short() -> None:
    text = (PACKAGE.parents[1] / "docs" / "reference" / "glossary.md").read_text()
    words = re.findall(r"^\*\*(.+?)\.\*\*", text, re.MULTILINE)
    assert 0 < len(words) <= 25
