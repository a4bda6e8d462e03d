"""Modules that compute with numbers of numpy: their kernels compute what eager does."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, math, warnings, numpy as np, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn
warnings.simplefilter("ignore")
GLOBAL = np.float32(0.25)

class Layers(nn.Module):
    bias = np.float64(0.5)
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
    def body(self, x):
        return self.two(self.one(x).sin())

class Scales(Layers):
    def __init__(self):
        super().__init__()
        self.number, self.width, self.flag = np.float32(0.1), np.int64(3), np.bool_(True)
    def forward(self, x):
        x = self.number * self.body(x) / self.width + self.bias
        return x[:, : self.width] * GLOBAL if self.flag else x

class Computes(Layers):  # in the precision that numpy has it
    def __init__(self):
        super().__init__()
        self.number = np.float16(0.1)
    def forward(self, x):
        x = self.body(x * (self.number * 3 + np.sqrt(self.number)))
        return x * math.sqrt(self.number.item()) * (2.0 if isinstance(self.number, float) else 3.0)

class Makes(Layers):  # of numpy's dtype
    def __init__(self):
        super().__init__()
        self.number = np.float64(0.1)
    def forward(self, x):
        return self.body(x) * torch.tensor(self.number)

class Returns(Makes):
    def forward(self, x):
        return self.body(x), self.number * 2

class Divides(Makes):  # and numpy warns, each time
    def forward(self, x):
        return self.body(x).clamp(max=np.float32(1) / (self.number - self.number))

def same(one, two):
    if isinstance(one, tuple):
        return type(one[1]) is type(two[1]) and same(one[0], two[0])
    return torch.allclose(one, two, atol=1e-5)

def assign(each, name, value):
    setattr(type(each) if name == "bias" else each, name, value)

seen = {}
CHANGES = [("number", np.float64(0.2)), ("width", np.int32(2)), ("flag", np.bool_(False))]
CHANGES += [("bias", np.float32(0.75)), ("number", 2.0)]
for kind in (Scales, Computes, Makes, Returns, Divides):
    model, x = kind(), torch.randn(4, 8)
    other = copy.deepcopy(model)
    checked = []
    with eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"):
        with torch.no_grad():
            checked += [same(model(x), other.forward(x)) for _ in range(3)]
        if kind in (Scales, Computes):
            for _ in range(3):
                answer, expected = model(x), other.forward(x)
                answer.sum().backward()
                expected.sum().backward()
                checked.append(same(answer, expected))
            checked.append(same(model.one.weight.grad, other.one.weight.grad))
        line = explain_module(model)[0]
        if kind is Scales:
            for change in CHANGES:
                for each in (model, other):
                    assign(each, *change)
                with torch.no_grad():
                    checked += [same(model(x), other.forward(x)) for _ in range(2)]
            GLOBAL = np.float32(0.5)
            model.flag = other.flag = np.bool_(True)
            with torch.no_grad():
                checked += [same(model(x), other.forward(x)) for _ in range(2)]
    seen[kind.__name__] = [checked, line]
report(seen=seen)
"""


def test_a_number_of_numpy_is_the_constant_that_it_is_in_eager(cache: Path) -> None:
    seen = run_program(PROGRAM, cache, timeout=600, fills=True)["seen"]
    for kind, (checked, line) in seen.items():
        assert all(checked), (kind, checked, line)
    for kind in ("Scales", "Computes"):
        assert ": 4 by kernel, 2 by its forward" in seen[kind][1], seen
    assert "gives tensor a number of numpy" in seen["Makes"][1], seen
    assert "returns a float64" in seen["Returns"][1], seen
    assert ": 0 by kernel" in seen["Divides"][1], seen
