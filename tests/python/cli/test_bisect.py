"""`eagercache bisect`: the kernel without which a failing command passes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from conftest import SHARED_CALLS, SHARED_OPS, clean_environment
from eagercache.cli.bisection import NothingToFind, bisect, smallest_set
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.once


def entry(key: str, op: str, kind: str = "kernel") -> dict[str, Any]:
    return {"key": key, "kind": kind, "facts": {"op": op}}


@given(st.integers(1, 40), st.data())
def test_the_smallest_set_passes_and_no_member_can_be_spared(count: int, data: Any) -> None:
    guilty = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=4))

    def passes_without(gone: set[int]) -> bool:
        return guilty <= gone

    assert set(smallest_set(range(count), passes_without)) == guilty


def test_one_culprit_among_many_is_found_in_few_runs() -> None:
    asked = []

    def passes_without(gone: set[int]) -> bool:
        asked.append(gone)
        return 700 in gone

    assert smallest_set(range(1024), passes_without) == [700]
    assert len(asked) <= 20


@given(st.integers(1, 20), st.data())
def test_alternatives_are_not_mistaken_for_necessities(count: int, data: Any) -> None:
    """It passes without either of two: one of them is the answer."""
    either = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2))
    found = smallest_set(range(count), lambda gone: bool(gone & set(either)))
    assert len(found) == 1
    assert found[0] in either


STORE = [
    *(entry(f"{n}", f"aten::op{n % 5}") for n in range(20)),
    entry("d", "aten::op1", "native"),
]


def test_the_operator_comes_first_and_then_its_kernel() -> None:
    asked: list[set[str]] = []

    def passes(without: Iterable[str]) -> bool:
        asked.append(set(without))
        return "13" in asked[-1]

    found = bisect(STORE, passes)
    assert found.operators == ("aten::op3",)
    assert [kernel["key"] for kernel in found.kernels] == ["13"]
    assert "d" not in set().union(*asked)  # decisions for native run nothing


@pytest.mark.parametrize(
    ("passing", "clause"), [(True, "passes with all kernels"), (False, "without any kernel too")]
)
def test_what_is_not_a_kernels_fault_is_said(passing: bool, clause: str) -> None:
    with pytest.raises(NothingToFind, match=clause):
        bisect(STORE, lambda without: passing)


def test_a_store_without_kernels_is_said() -> None:
    with pytest.raises(NothingToFind, match="no kernel"):
        bisect([entry("d", "aten::op1", "native")], lambda without: True)


@pytest.mark.long
def test_the_command_finds_the_kernel_that_a_program_fails_with(
    warm_cache: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        SHARED_CALLS
        + f"""
import eagercache, sys
eagercache.enable({SHARED_OPS}, choose="always")
torch.var(x, -1)
torch.softmax(x, -1)
eagercache.wait(60)
torch.var(x, -1)
torch.softmax(x, -1)
hits = {{name: row.hits for name, row in eagercache.stats().operators.items()}}
sys.exit(3 if hits["aten::var.correction"] else 0)
"""
    )
    before = sorted(path for path in warm_cache.rglob("*") if path.is_file())
    done = subprocess.run(
        [
            sys.executable, "-m", "eagercache", "bisect", "--json", "--dir", str(warm_cache),
            "--op", "var", "--op", "_softmax", "--", sys.executable, str(program),
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["operators"] == ["aten::var.correction"]
    assert [kernel["facts"]["op"] for kernel in found["kernels"]] == ["aten::var.correction"]
    assert found["runs"] <= 5
    assert sorted(path for path in warm_cache.rglob("*") if path.is_file()) == before
