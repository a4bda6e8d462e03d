"""Calls of modules with one tensor in two places: two arguments, or an argument and a weight."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import run_program

PROGRAM = """
import operator
import torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x, y):
        z = self.second(self.first(x).tanh() + 0.5) * y.sigmoid()
        return z + 1 if x is y else z.cos() * 2

class Tied(Two):
    def forward(self, x, y):
        return self.second(self.first(x).tanh() + 0.5) + y.sin() @ x.T

class Asks(Two):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 8))

    def forward(self, x, y):
        z = self.second(self.first(x).tanh() + 0.5) * y.sigmoid()
        return z + 1 if y is self.mask else z.cos() * 2

class AsksOfAll(Two):
    def forward(self, x, y):
        z = self.second(self.first(x).tanh() + 0.5) * y.sigmoid()
        found = any(operator.is_(y, one) for one in self.parameters())
        return z + 1 if found else z.cos() * 2

class LooksUp(Asks):
    def forward(self, x, y):
        z = self.second(self.first(x).tanh() + 0.5) * y.sigmoid()
        return z + {self.mask: 1, x: 2}.get(y, 3)

class AsksOfLists(Two):
    def forward(self, x, left, right):
        z = self.second(self.first(x).tanh() + 0.5)
        return z + 1 if left is right else z.cos() * 2

def hits(model):
    return sum(row.hits for part, row in manager.stats() if part is model)

def called(model, calls):
    off = 0.0
    for _ in range(3):
        for call in calls:
            answer = model(*call)
            core.set_answering(False)
            off = max(off, float((answer - model(*call)).abs().max()))
            core.set_answering(True)
    return [off, hits(model), [str(line) for line in explain_module(model)[:1]]]

x, y, z = (torch.randn(8, 8) for _ in range(3))
rows = {}
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    rows["same first"] = called(Two().eval(), [(x, x), (x, y), (y, y), (y, z)])
    rows["different first"] = called(Two().eval(), [(x, y), (x, x)])
    model = Tied().eval()
    rows["own"] = called(model, [(x, model.second.weight), (x, y)])
    model = Tied().eval()
    rows["own last"] = called(model, [(x, y), (x, model.second.weight)])
    model = Asks().eval()
    rows["asked last"] = called(model, [(x, y), (x, model.mask)])
    model = LooksUp().eval()
    rows["looked up last"] = called(model, [(x, y), (x, model.mask)])
    model, sizes = AsksOfLists().eval(), [1, 2]
    rows["lists asked last"] = called(model, [(x, [1, 2], [1, 2]), (x, sizes, sizes)])
    model = AsksOfAll().eval()
    weight = torch.nn.Parameter(y.clone())
    rows["parameter asked last"] = called(model, [(x, weight), (x, model.second.weight)])
report(rows=rows)
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each order of calls: the largest difference from eager, hits, the explanation."""
    path = tmp_path_factory.mktemp("same") / "cache"
    path.mkdir(mode=0o700)
    found = run_program(PROGRAM, path, fills=True)["rows"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("order", ["same first", "different first"])
def test_one_tensor_as_two_arguments_is_another_call_than_two(
    order: str, rows: dict[str, Any]
) -> None:
    off, hits, lines = rows[order]
    assert off < 1e-5, lines
    assert hits > 2, lines


@pytest.mark.parametrize(
    "order",
    [
        *("own", "own last", "asked last", "looked up last"),
        *("parameter asked last", "lists asked last"),
    ],
)
def test_what_is_the_same_object_is_no_other_arguments_kernel(
    order: str, rows: dict[str, Any]
) -> None:
    off, _, lines = rows[order]
    assert off < 1e-5, lines
