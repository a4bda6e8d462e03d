"""What a forward reads of the world is guarded: in the program, and in the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import module_world
import pytest
from conftest import run_program

HERE = str(Path(__file__).parents[1] / "zoos")

PROGRAM = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, module_world
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
x = torch.linspace(-1, 1, 32).view(4, 8)

def hits(model):
    return sum(row.hits for part, row in manager.stats() if part is model)

def off_by(model):
    answers = []
    for _ in range(3):
        answers.append(model(x))
    core.set_answering(False)
    eager = model(x)
    core.set_answering(True)
    return max(float((answer - eager).abs().max()) for answer in answers)

rows, own = {{}}, dict(vars(torch.Tensor))
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for name, change in module_world.CASES.items():
        model = module_world.made(name)
        if {first}:
            change(model)
        before = off_by(model)
        had = hits(model)
        lines = explain_module(model)[:1]
        if not {first}:
            change(model)
        rows[name] = [had, max(before, off_by(model)), lines]
        for patched in set(vars(torch.Tensor)) - set(own):  # all others would have no kernel
            delattr(torch.Tensor, patched)
report(rows=rows)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the programs."""
    path = tmp_path_factory.mktemp("world") / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(scope="module")
def changed_within(store: Path) -> dict[str, Any]:
    """Each case: hits before the change, the largest difference from eager, the explanation."""
    program = PROGRAM.format(here=HERE, first=False)
    rows = run_program(program, store, timeout=500, fills=True)["rows"]
    assert isinstance(rows, dict)
    return rows


@pytest.fixture(scope="module")
def changed_before(store: Path, changed_within: dict[str, Any]) -> dict[str, Any]:
    """The same for a second program that makes the changes before its first call."""
    program = PROGRAM.format(here=HERE, first=True)
    rows = run_program(program, store, timeout=500, fills=True)["rows"]
    assert isinstance(rows, dict)
    return rows


@pytest.mark.parametrize("name", module_world.CASES)
def test_a_change_of_the_world_is_noticed(name: str, changed_within: dict[str, Any]) -> None:
    had, difference, lines = changed_within[name]
    assert difference < 1e-4, lines
    assert (had > 0) == (name in module_world.KERNELS), lines


@pytest.mark.once
@pytest.mark.parametrize("name", module_world.CASES)
def test_another_program_of_another_world_gets_its_own_answers(
    name: str, changed_before: dict[str, Any]
) -> None:
    _, difference, lines = changed_before[name]
    assert difference < 1e-4, lines


def test_a_guard_of_torchs_own_call_holds_where_ours_stands_in_its_place(store: Path) -> None:
    # Dynamo guards it on Python 3.12, where a class calls `super().__call__`.
    program = """
import torch, eagercache
from eagercache.callables.guard_rows import GuardRow, describe, resolve

class Layer(torch.nn.Linear):
    def __call__(self, *args):
        return super().__call__(*args)

layer = Layer(2, 2)
path = (("self", ""), ("type", ""), ("attr", "__mro__"), ("item", 2), ("attr", "__call__"))
own = resolve(path, layer)
row = GuardRow(path, "value", None, describe(own, "value", None, layer)).to_row()
held = []
with eagercache.enable((), modules="auto"):
    held.append(GuardRow.from_row(row).holds(layer))
    replaced = torch.nn.Module.__call__
    torch.nn.Module.__call__ = lambda self, x: x
    held.append(GuardRow.from_row(row).holds(layer))
    torch.nn.Module.__call__ = replaced
report(held=held, ours=replaced is not own)
"""
    found = run_program(program, store)
    assert (found["held"], found["ours"]) == ([True, False], True)


def test_a_value_at_the_address_of_the_one_before_it_is_noticed(store: Path) -> None:
    # From Python 3.13 on dictionaries have no version that would tell.
    program = """
import torch, eagercache
from eagercache.modules.manager import manager
torch.set_num_threads(1)

class Scales(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.scale = scale

    def forward(self, x):
        scale = self.scale[0] if isinstance(self.scale, tuple) else self.scale
        return (self.linear(x) * scale).relu()

x = torch.linspace(-1, 1, 32).view(4, 8)
right, alike, hits = [], 0, []
for made in (lambda number: (number,), lambda number: number + 0.5):
    model = Scales(made(2.0))
    with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
        for _ in range(3):
            model(x)
        hits.append(sum(row.hits for part, row in manager.stats() if part is model))
        for number in range(3, 9):
            address = id(model.__dict__["scale"])
            del model.__dict__["scale"]
            model.__dict__["scale"] = value = made(float(number))
            alike += id(value) == address
            scale = value[0] if isinstance(value, tuple) else value
            del value
            wanted = torch.nn.functional.linear(x, model.linear.weight, model.linear.bias) * scale
            right.append(torch.allclose(model(x), wanted.relu(), atol=1e-4))
report(right=right, alike=alike, hits=hits)
"""
    found = run_program(program, store, fills=True)
    assert all(found["right"]), found
    assert min(found["hits"]) >= 2 and found["alike"] >= 1, found
