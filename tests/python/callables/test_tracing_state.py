"""Forwards that ask whether they are being compiled: their kernels do what eager does."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn
from torch._dynamo import is_compiling

class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
    def asks(self):
        return torch.compiler.is_compiling()
    def forward(self, x):
        x = self.one(x).sin()
        return self.two(x * 100 if self.asks() else x)

class OfDynamo(Asks):
    def asks(self):
        return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()

class ByOlderNames(Asks):  # as libraries do that are to run with an older torch
    def asks(self):
        return torch.jit.is_scripting() or torch.jit.is_tracing() or is_compiling()

seen = {}
for kind in (Asks, OfDynamo, ByOlderNames):
    model, x = kind(), torch.randn(4, 8)
    other = copy.deepcopy(model)
    other(x).sum().backward()
    with eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"):
        with torch.no_grad():
            answers = [model(x) for _ in range(3)]
        answers += [model(x) for _ in range(3)]
        answers[-1].sum().backward()
        line = explain_module(model)[0]
    same = all(torch.allclose(answer, other(x), atol=1e-5) for answer in answers)
    same = same and torch.allclose(model.one.weight.grad, other.one.weight.grad, atol=1e-4)
    seen[kind.__name__] = [same, line]
report(seen=seen)
"""


def test_who_asks_whether_it_is_compiled_is_told_what_eager_tells(cache: Path) -> None:
    seen = run_program(PROGRAM, cache, timeout=600, fills=True)["seen"]
    for kind, (same, line) in seen.items():
        assert same, (kind, line)
        assert ": 4 by kernel, 2 by its forward" in line, (kind, line)
