"""Forwards that ask whether they are being compiled: their kernels do what eager does."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn
from torch._dynamo import is_compiling
from transformers.utils.import_utils import is_torchdynamo_compiling

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

class ThroughTransformers(Asks):  # whose own code alone is traced as under a compiler
    def asks(self):
        return is_torchdynamo_compiling()

seen = {}
for kind in (Asks, OfDynamo, ByOlderNames, ThroughTransformers):
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


MODES = """
import copy, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn
from torch.utils.checkpoint import checkpoint

class Saves(nn.Module):  # as diffusers' models, whose flag is off without anybody's doing
    def __init__(self):
        super().__init__()
        self.one, self.two, self.checkpointing = nn.Linear(8, 8), nn.Linear(8, 8), False
    def forward(self, x):
        x = self.one(x).sin()
        if torch.is_grad_enabled() and self.checkpointing:
            return checkpoint(self.two, x, use_reentrant=False)
        return self.two(x)

class Differs(Saves):
    def forward(self, x):
        x = self.one(x).sin()
        return self.two(x * 2 if torch.is_grad_enabled() else x)

seen = {}
for kind in (Saves, Differs):
    model, x = kind(), torch.randn(4, 8)
    other = copy.deepcopy(model).requires_grad_(False)
    with eagercache.enable((), modules=[kind], on_miss="wait", choose="always"):
        with torch.no_grad():
            same = [torch.allclose(model(x), other(x), atol=1e-5) for _ in range(3)]
        model.requires_grad_(False)  # gradients are recorded, and none are needed
        same += [torch.allclose(model(x), other(x), atol=1e-5) for _ in range(3)]
        line = explain_module(model)[0]
    seen[kind.__name__] = [all(same), line]
report(seen=seen)
"""


def test_a_kernel_that_answers_with_gradients_recorded_and_not_is_right_in_both(
    cache: Path,
) -> None:
    seen = run_program(MODES, cache, timeout=600, fills=True)["seen"]
    for kind, (same, line) in seen.items():
        assert same, (kind, line)
    assert ": 5 by kernel, 1 by its forward" in seen["Saves"][1], seen
    assert "asks whether gradients are recorded" in seen["Differs"][1], seen


CLOSES = """
import torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn

class Closes(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        members = set(("sin", "cos", self.__class__.__name__))
        def activate(name, value):
            return value.sin() if name in members else value.cos()
        return self.two(activate("sin", self.one(x)) + activate("tan", x))

model, x = Closes(), torch.randn(4, 8)
with torch.no_grad():
    expected = model(x)
    with eagercache.enable((), modules=[Closes], on_miss="wait", choose="always"):
        same = [torch.allclose(model(x), expected, atol=1e-5) for _ in range(3)]
        line = explain_module(model)[0]
report(same=all(same), line=line)
"""


def test_a_nested_function_that_closes_over_a_set_reads_no_order(cache: Path) -> None:
    seen = run_program(CLOSES, cache, timeout=600, fills=True)
    assert seen["same"] and ": 2 by kernel, 1 by its forward" in seen["line"], seen


def test_what_stands_around_a_modules_call_steps_aside_in_a_process_that_traces(
    cache: Path,
) -> None:
    said = run_program(
        """
        import torch._dynamo  # which then takes note of what a module is called by
        import eagercache
        from eagercache.worker.modules.exported import export_strictly
        from torch import nn

        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(8, 8)
            def forward(self, x):
                return self.inner(x).sin()

        with eagercache.enable((), modules="auto", on_miss="native"):
            pass
        module, x = Around(), torch.randn(2, 8)
        program, _ = export_strictly(module, (x,), {})
        report(equal=torch.equal(program.module()(x), module(x)))
        """,
        cache,
    )
    assert said["equal"] is True
