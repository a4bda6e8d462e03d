"""Forwards that branch on what a tensor tells beside its values."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import run_program

MODELS = """
import torch, eagercache
from torch import nn
from eagercache.modules.manager import explain_module, manager

class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.line.bias.own_mark = 5.0
    def forward(self, x):
        return torch.tanh(self.line(x)).sin() * (2.0 if self.asks(x) else 3.0)

class Needs(Tail):
    def asks(self, x):
        return x.requires_grad

class OwnNeeds(Tail):
    def asks(self, x):
        return self.line.weight.requires_grad

class OwnGradient(Tail):
    def asks(self, x):
        return self.line.weight.grad is None

class Version(Tail):
    def asks(self, x):
        return x._version == 0

class Leaf(Tail):
    def asks(self, x):
        return x.is_leaf

class View(Tail):
    def asks(self, x):
        return x._base is None

class Kind(Tail):
    def asks(self, x):
        return isinstance(x, nn.Parameter)

class Given(Tail):
    def asks(self, x):
        return getattr(x, "mark", 1.0) == 1.0

class OwnGiven(Tail):
    def asks(self, x):
        return getattr(self.line.bias, "own_mark", 1.0) == 1.0

torch.manual_seed(0)
plain, written, given = torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 8)
written.add_(1).add_(1)
given.mark = 7.0
needing = torch.randn(4, 8).requires_grad_()
calls = [plain, written, needing, needing * 1, torch.randn(9, 8)[4:8], given]
calls.append(nn.Parameter(torch.randn(4, 8)))

def answers(model):
    found = []
    for call in calls:
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                found.append(model(call).tolist())
    return found
"""

RUN = """
rows = {}
for kind in (Needs, OwnNeeds, OwnGradient, Version, Leaf, View, Kind, Given, OwnGiven):
    model = kind()
    with eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
        for order in (calls, calls[::-1]):
            for call in order:
                for mode in (torch.no_grad, torch.inference_mode):
                    for _ in range(2):
                        with mode():
                            model(call)
        mine = [answers(model)]
        model.line.weight.grad = torch.ones(8, 8)
        mine.append(answers(model))
        model.line.weight.grad = None
        model.requires_grad_(False)
        mine.append(answers(model))
        hits = [row.hits for part, row in manager.stats() if part is model]
        lines = explain_module(model)
    eager = [answers(model.requires_grad_())]
    model.line.weight.grad = torch.ones(8, 8)
    eager.append(answers(model))
    model.line.weight.grad = None
    eager.append(answers(model.requires_grad_(False)))
    far = [(torch.tensor(a) - torch.tensor(b)).abs().max().item() for a, b in zip(mine, eager)]
    rows[kind.__name__] = {"far": max(far), "hits": hits[0], "lines": lines}
report(rows=rows)
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How far each model's answers were off with kernels, and how many kernels gave."""
    path = tmp_path_factory.mktemp("reads") / "cache"
    path.mkdir(mode=0o700)
    found: dict[str, Any] = run_program(MODELS + RUN, path, timeout=600, fills=True)["rows"]
    return found


@pytest.mark.parametrize(
    ("name", "met"),
    [
        ("Needs", False),
        ("OwnNeeds", False),
        ("OwnGradient", False),
        ("Version", False),
        ("Leaf", False),
        ("View", False),
        ("Kind", True),
        ("Given", True),
        ("OwnGiven", False),
    ],
)
def test_what_no_key_holds_is_not_branched_on(rows: dict[str, Any], name: str, met: bool) -> None:
    row = rows[name]
    assert row["far"] < 1e-4, row["lines"]
    assert (row["hits"] > 0) is met, row["lines"]
