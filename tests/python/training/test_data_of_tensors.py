"""Modules that take the `data` of tensors: the memory of these, without gradients."""

from __future__ import annotations

from typing import Any

import pytest
from layer_cases import run_all_cases


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each case."""
    path = tmp_path_factory.mktemp("data") / "cache"
    path.mkdir(mode=0o700)
    return run_all_cases("DATA", path)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["reads", "follows", "clamps"])
def test_a_module_that_takes_the_data_of_tensors_has_a_kernel(
    name: str, training: bool, found: dict[str, Any]
) -> None:
    hits, wrong, lines = found[f"{name}, {training}"]
    assert wrong == 0, lines
    assert hits == 3, lines


def test_what_the_backward_reads_is_not_written_behind_it(found: dict[str, Any]) -> None:
    assert found["overtakes, False"][:2] == [3, 0]
    assert found["overtakes, True"][:2] == [0, 0]
