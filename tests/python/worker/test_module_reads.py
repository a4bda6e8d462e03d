"""Forwards that branch on what a tensor tells beside its values, or set it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from conftest import run_program
from eagercache.callables.module_identity import Unfit
from eagercache.worker.modules.reads import Reads

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

class MadeNeeds(Tail):
    def asks(self, x):
        return self.line(x).requires_grad

class RecordedNeeds(Tail):
    def asks(self, x):
        with torch.enable_grad():
            made = self.line(x)
        return made.requires_grad

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

class Mode(Tail):
    def asks(self, x):
        return torch.is_grad_enabled()

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
needs = (Needs, MadeNeeds, RecordedNeeds, OwnNeeds)
for kind in (*needs, OwnGradient, Version, Leaf, View, Kind, Given, OwnGiven, Mode):
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
        ("MadeNeeds", True),
        ("RecordedNeeds", False),
        ("OwnNeeds", False),
        ("OwnGradient", False),
        ("Version", False),
        ("Leaf", False),
        ("View", False),
        ("Kind", True),
        ("Given", True),
        ("OwnGiven", False),
        ("Mode", False),
    ],
)
def test_what_no_key_holds_is_not_branched_on(rows: dict[str, Any], name: str, met: bool) -> None:
    row = rows[name]
    assert row["far"] < 1e-4, row["lines"]
    assert (row["hits"] > 0) is met, row["lines"]


@pytest.mark.parametrize("gradients", [True, False, None])
def test_what_was_made_may_be_asked_whether_it_needs_gradients_where_the_key_says_it(
    gradients: bool | None,
) -> None:
    """Calls of a function may need gradients or none, by one key."""
    given = torch.ones(2, requires_grad=True)
    with torch.no_grad(), Reads([given], gradients=gradients) as reads:
        assert not (given * 2).requires_grad
    with pytest.raises(Unfit) if gradients is None else contextlib.nullcontext():
        reads.check()


SETS = """
import torch, eagercache
from torch import nn
from eagercache.modules.manager import explain_module, manager

class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        y = self.last(torch.tanh(self.first(x)))
        self.sets(x)
        return y

class Freezes(Tail):
    def sets(self, x):
        self.first.requires_grad_(False)

class Clears(Tail):
    def sets(self, x):
        self.zero_grad()

class ClearsOne(Tail):
    def sets(self, x):
        self.last.weight.grad = None

class Needs(Tail):
    def sets(self, x):
        x.requires_grad_()

def found(model, training, ready):
    x, parameters = torch.linspace(-1, 1, 32).view(4, 8), list(model.parameters())
    for parameter in parameters:
        parameter.requires_grad_(training or not ready)
        parameter.grad = None if ready else torch.ones_like(parameter)
    x.requires_grad_(ready and not training)
    with torch.set_grad_enabled(training):
        model(x)
    return [[t.requires_grad, t.grad is None] for t in (x, *parameters)]

rows = {}
for kind in (Freezes, Clears, ClearsOne, Needs):
    for training in (False, True):
        torch.manual_seed(0)
        model = kind()
        eager = found(model, training, False)
        enabled = dict(modules="auto", training=True, on_miss="wait", choose="always")
        with eagercache.enable((), **enabled):
            for _ in range(3):
                found(model, training, True)  # there it changes nothing
            mine = [found(model, training, False) for _ in range(4)]
            lines = explain_module(model)
        rows[f"{kind.__name__} {training}"] = [eager, mine, lines]
report(rows=rows)
"""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each forward left of its tensors, by itself and with kernels, and the explanation."""
    path = tmp_path_factory.mktemp("sets") / "cache"
    path.mkdir(mode=0o700)
    found: dict[str, Any] = run_program(SETS, path, timeout=600, fills=True)["rows"]
    return found


@pytest.mark.parametrize("name", ["Freezes", "Clears", "ClearsOne", "Needs"])
@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_sets_of_its_tensors_is_set(
    sets: dict[str, Any], name: str, training: bool
) -> None:
    eager, mine, lines = sets[f"{name} {training}"]
    assert mine == [eager] * 4, lines
