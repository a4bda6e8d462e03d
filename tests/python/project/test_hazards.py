"""Every hazard and every defect of the nearest relative has a test of its own.

tests/hazards.json maps them to tests; here the map is checked against the source, and the hazards
that no other file is about are tested.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import Program

ROOT = Path(__file__).resolve().parents[3]
ROWS: list[dict[str, Any]] = json.loads((ROOT / "tests" / "hazards.json").read_text())
DEFECTS = {
    *(f"A{n}" for n in range(1, 7)),
    *(f"B{n}" for n in range(1, 11)),
    *(f"D{n}" for n in range(1, 7)),
    *(f"E{n}" for n in range(1, 11)),
}


@cache
def _tests_in_the_tree() -> frozenset[str]:
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*_test.cc"):
        text = path.read_text()
        names.update(f"{s}.{n}" for s, n in re.findall(r"TEST(?:_[FP])?\((\w+),\s*(\w+)\)", text))
    for path in (ROOT / "tests").rglob("test_*.py"):
        names.update(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    for path in (ROOT / "tests").rglob("CMakeLists.txt"):
        names.update(re.findall(r"add_test\(NAME ([\w.]+)", path.read_text()))
    return frozenset(names)


def _enumerators(header: str, enum: str) -> set[str]:
    text = (ROOT / header).read_text()
    found = re.search(rf"enum class {enum}[^{{]*\{{(.*?)\}};", text, re.DOTALL)
    assert found is not None
    return set(re.findall(r"^\s*(k\w+)", found[1], re.MULTILINE))


@pytest.mark.once
@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_each_row_names_tests_that_exist(row: dict[str, Any]) -> None:
    assert row["tests"]
    assert set(row["tests"]) <= _tests_in_the_tree()


@pytest.mark.once
def test_the_map_has_every_defect_every_rule_and_every_section_once() -> None:
    ids = [row["id"] for row in ROWS]
    assert len(ids) == len(set(ids))
    assert set(ids) >= DEFECTS
    assert {f"5.{n}" for n in range(7)} <= {name[:3] for name in ids}
    rules = [rule for row in ROWS for rule in row.get("asides", [])]
    known = _enumerators("guards/builder/aside_reason.h", "AsideReason") - {"kNone"}
    assert sorted(rules) == sorted(known), "each rule by which calls step aside has one row"


def test_every_rule_that_can_be_left_out_is_in_the_map_and_the_other_way_round() -> None:
    mapped = {name for row in ROWS for name in row.get("mutations", [])}
    rows = re.findall(r"^  X\((\w+),", (ROOT / "guards/key/key_fields.h").read_text(), re.MULTILINE)
    names = re.findall(r'return "(\w+)";', (ROOT / "guards/builder/aside_reason.h").read_text())
    asides = set(names) - {"none", "unknown"}
    checks: set[str] = set()
    for folder in ("guards", "dispatcher"):
        for path in (ROOT / folder).rglob("*.[ch]*"):
            text = path.read_text()
            checks.update(".".join(m) for m in re.findall(r'left_out\("(\w+)", "(\w+)"\)', text))
    assert (
        len(rows) > 20
        and len(asides) == len(_enumerators("guards/builder/aside_reason.h", "AsideReason")) - 1
    )
    assert mapped == {*(f"field.{r}" for r in rows), *(f"aside.{a}" for a in asides), *checks}


def test_a_profiler_sees_the_operators_name_on_a_hit(warm_program: Program) -> None:
    result = warm_program(
        """
        torch.var(x, -1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.var(x, -1)
        report(names=[e.key for e in profile.key_averages()], hits=eagercache.stats().hits)
        """
    )
    assert "aten::var" in result["names"]
    assert result["hits"] == 2


def test_enabling_on_a_full_store_loads_nothing(warm_program: Program) -> None:
    result = warm_program(
        """
        before = eagercache.stats().loaded
        torch.var(x, -1)
        report(before=before, after=eagercache.stats().loaded)
        """
    )
    assert (result["before"], result["after"]) == (0, 1)
