"""Modules that choose and add rows by indices of the call, as networks on graphs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layer_zoo
import pytest
from conftest import run_program
from layer_cases import HERE, run_all_cases


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the programs."""
    path = tmp_path_factory.mktemp("graphs") / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(scope="module")
def found(store: Path) -> dict[str, Any]:
    """What came of each case."""
    return run_all_cases("GRAPHS", store)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", layer_zoo.GRAPHS)
def test_a_module_that_indexes_with_its_arguments_has_a_kernel(
    name: str, training: bool, found: dict[str, Any]
) -> None:
    hits, wrong, lines = found[f"{name}, {training}"]
    assert wrong == 0, lines
    assert hits == 3, lines


BAD = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, layer_zoo
from eagercache.base.load import core
from eagercache.modules.manager import manager
torch.set_num_threads(1)

def outcome(model, x, index):
    model.zero_grad()
    try:
        answer = model(x, index)
    except (IndexError, RuntimeError) as error:
        return type(error).__name__
    answer.square().sum().backward()
    return [answer.detach(), *(p.grad for p in model.parameters())]

def is_close(a, b):
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in zip(a, b))

rows = {{}}
with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
    for name in ("picks", "selects", "sends"):
        make, arguments = layer_zoo.GRAPHS[name]
        model, (x, index) = make(), arguments()
        for _ in range(3):
            model(x, index)
        for value in (-1, -6, -7, 6, 1 << 40, 5):
            other = index.clone().view(-1)
            other[3] = value
            other = other.view_as(index)
            hits = sum(row.hits for part, row in manager.stats() if part is model)
            mine = outcome(model, x, other)
            answered = sum(row.hits for part, row in manager.stats() if part is model) - hits
            core.set_answering(False)
            eager = outcome(model, x, other)
            core.set_answering(True)
            raised = mine if isinstance(mine, str) else ""
            rows[f"{{name}} {{value}}"] = [is_close(mine, eager), answered, raised]
report(rows=rows)
"""


def test_an_index_outside_is_eagers_to_raise_for(store: Path, found: dict[str, Any]) -> None:
    rows = run_program(BAD.format(here=HERE), store, timeout=500, fills=True)["rows"]
    assert all(same for same, *_ in rows.values()), rows
    for name, (_, answered, raised) in rows.items():
        kind, value = name.split()
        counted = kind == "picks" and value in ("-1", "-6")  # the others' kernels may not count
        assert answered == (value == "5" or counted), rows
        least = 0 if kind == "selects" else -6
        assert bool(raised) == (not least <= int(value) < 6), rows
