"""Modules that hold tensors without elements: banks to be filled, `Linear(0, n)`."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, warnings, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn
warnings.simplefilter("ignore")

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.two(self.one(x).sin())

class Unused(Layers):  # as MONAI's attention, which keeps its weights where somebody asks for them
    def __init__(self):
        super().__init__()
        self.weights = torch.Tensor()

class Bank(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 8))
        self.register_buffer("scale", torch.zeros(0))
    def forward(self, x):
        x = self.one(x).sin()
        if self.scale.numel():
            x = x * 2
        return self.two(torch.cat([self.bank, x]))

class Weights(Layers):
    def __init__(self):
        super().__init__()
        self.rows, self.rest = nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.zeros(0))
        self.none = nn.Linear(0, 8)
    def forward(self, x):
        y = self.two(torch.cat([self.rows, self.one(x).sin()])) + self.rest.sum()
        return y + self.none(x[:, :0])

class Written(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 8))
    def forward(self, x):
        self.bank.add_(1)
        return super().forward(x)

def equal(one, two):
    return one is two is None or one is not None and torch.allclose(one, two, atol=1e-5)

seen = {}
for kind in (Unused, Bank, Weights, Written):
    model, x = kind(), torch.randn(4, 8)
    other = copy.deepcopy(model)
    expected = other(x)
    expected.sum().backward()
    with eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"):
        with torch.no_grad():
            answers = [model(x) for _ in range(3)]
        answers += [model(x) for _ in range(3)]
        answers[-1].sum().backward()
        line = explain_module(model)[0]
        for each in (model, other):  # it has elements now
            name = "scale" if kind is Bank else "weights"
            setattr(each, name, torch.ones(1))
        with torch.no_grad():
            later = equal(model(x), other(x))
    same = all(equal(answer, expected) for answer in answers)
    pairs = zip(model.parameters(), other.parameters())
    seen[kind.__name__] = [same, all(equal(a.grad, b.grad) for a, b in pairs), later, line]
report(seen=seen)
"""


def test_tensors_without_elements_are_compared_and_handed_on_as_others(cache: Path) -> None:
    seen = run_program(PROGRAM, cache, timeout=600, fills=True)["seen"]
    for kind, (same, gradients, later, line) in seen.items():
        assert same and gradients and later, (kind, same, gradients, later, line)
        assert ": 4 by kernel, 2 by its forward" in line, (kind, line)
