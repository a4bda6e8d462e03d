"""A real model against native; `make models` has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import run_program

TESTS = str(Path(__file__).resolve().parent.parent.parent)

pytest.importorskip("transformers")


@pytest.mark.long
def test_a_model_answered_by_kernels_of_its_modules_gives_what_it_gives(cache: Path) -> None:
    result: dict[str, Any] = run_program(
        f"""
        sys.path.insert(0, {TESTS!r})
        import torch
        torch.set_num_threads(1)
        from models import equality
        found = equality.modules("transformers Llama")
        report(problems=found.problems, tensors=found.tensors, answered=found.answered)
        """,
        cache,
        timeout=600,
    )
    assert result["problems"] == []
    assert result["tensors"] == 1 and result["answered"]["hits"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama", "DistilBert"])
def test_a_model_trained_by_kernels_of_modules_stays_within_the_spread_of_eager_runs(
    cache: Path, name: str
) -> None:
    result: dict[str, Any] = run_program(
        f"""
        sys.path.insert(0, {TESTS!r})
        import torch
        torch.set_num_threads(1)
        from models import steps
        found = steps.training("transformers {name}", steps=5)
        report(problems=found.problems, distance=found.distance, answered=found.answered)
        """,
        cache,
        timeout=600,
        fills=True,
    )
    assert result["problems"] == []
    assert result["answered"]["hits"] >= 4  # its first call finds the kernels
    assert result["distance"]["answers"] > 0  # so they were no calls of eager


@pytest.mark.once
def test_runs_may_be_as_far_apart_as_those_of_eager_or_a_last_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TESTS)
    from models import steps

    def result(distance: float, spread: float) -> steps.Result:
        return steps.Result("", spread={"losses": spread}, distance={"losses": distance})

    assert result(distance=9e-7, spread=1e-6).ratio < 1 < result(distance=2e-6, spread=1e-6).ratio
    assert result(distance=1e-7, spread=0.0).ratio < 1 < result(distance=1e-6, spread=0.0).ratio


@pytest.mark.once
def test_what_processes_found_side_by_side_is_put_together_and_the_latest_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(TESTS)
    from models import side_by_side

    def row(name: str, value: int) -> dict[str, Any]:
        return {"name": name, "value": value}

    common = tmp_path / "steps.json"
    side_by_side.write(common, "2.11.0", 200, [row("a b", 1), row("c", 1)])
    part = side_by_side.part_of(common, "a b")
    part.parent.mkdir()
    side_by_side.write(part, "2.11.0", 200, [row("a b", 2)])
    side_by_side.write(side_by_side.part_of(common, "d"), "2.11.0", 200, [row("d", 2)])
    side_by_side.write(side_by_side.part_of(common, "e"), "2.11.0", 5, [row("e", 2)])
    found = side_by_side.merged(common, "2.11.0", 200)
    assert {r["name"]: r["value"] for r in found} == {"a b": 2, "c": 1, "d": 2}
    assert side_by_side.merged(common, "2.15.0", 200) == []
