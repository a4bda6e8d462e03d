"""Modules that keep tensors in lists, tuples and dicts, which they read in their forwards."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

MODULES = """
import copy, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tables = [torch.ones(8), torch.arange(8.0)]
    def body(self, x):
        return self.two(self.one(x).sin())

def run(kind, changes, checked, training):
    model, x = kind(), torch.randn(4, 8)
    other = copy.deepcopy(model)
    lines = []
    for gradients in (False, True) if training else (False,):
        with (
            torch.set_grad_enabled(gradients),
            eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"),
        ):
            for _ in range(3):
                checked.append(torch.allclose(model(x), other.forward(x), atol=1e-5))
            if gradients:
                for each in (model, other.forward):
                    each(x).sum().backward()
                checked.append(torch.allclose(model.one.weight.grad, other.one.weight.grad))
            lines.append(explain_module(model)[0])
            for change in changes if not gradients else ():
                for each in (model, other):
                    change(each)
                for _ in range(2):
                    checked.append(torch.allclose(model(x), other.forward(x), atol=1e-5))
    return lines
"""

READS = (
    MODULES
    + """
class InList(Layers):
    def forward(self, x):
        for table in self.tables:
            x = x + table
        return self.body(x)

class InParts(Layers):  # nested, by keys, and shared with a part
    def __init__(self):
        super().__init__()
        self.named = {"a": [torch.full((8,), 0.5), (torch.arange(8.0), 2)], 1: self.tables[0]}
        self.two.heads = self.tables
    def forward(self, x):
        for key, value in self.named.items():
            x = x + (value[0] * value[1][0] * value[1][1] if key == "a" else value)
        return self.body(x * self.two.heads[1])

def set_item(module):
    module.tables[1] = torch.full((8,), 3.0)

def put_in(module):
    module.named["b"] = torch.full((8,), 4.0)

def rename(module):
    module.named["a"] = module.named.pop("a")

CHANGES = {
    InList: [
        lambda module: module.tables[0].mul_(2),
        set_item,
        lambda module: module.tables.append(torch.full((8,), 2.0)),
        lambda module: module.tables.reverse(),
        lambda module: module.tables.pop(),
        lambda module: setattr(module, "tables", [torch.zeros(8)]),
        lambda module: module.tables.clear(),
    ],
    InParts: [
        lambda module: module.named["a"][1][0].mul_(2),
        lambda module: module.named.__setitem__(1, torch.zeros(8)),
        lambda module: module.named["a"].__setitem__(1, (torch.ones(8), 3)),
        rename,
        set_item,
        lambda module: setattr(module.two, "heads", [torch.ones(8), torch.zeros(8)]),
    ],
}
seen = {}
for kind, changes in CHANGES.items():
    checked = []
    seen[kind.__name__] = [checked, run(kind, changes, checked, training=True)]
report(seen=seen)
"""
)


def test_tensors_in_containers_are_inputs_of_a_kernel_and_their_changes_are_noticed(
    cache: Path,
) -> None:
    seen = run_program(READS, cache, timeout=600, fills=True)["seen"]
    for kind, (checked, lines) in seen.items():
        assert all(checked), (kind, checked, lines)
        assert ": 2 by kernel, 1 by its forward" in lines[0], (kind, lines)
        assert "with gradients refused" not in lines[1], (kind, lines)
        assert "with gradients" in lines[1], (kind, lines)


WRITES = (
    MODULES
    + """
class Assigns(Layers):
    def forward(self, x):
        self.tables[0] = self.body(x).detach().mean(0)
        return self.body(x + self.tables[0])

class Swaps(Layers):
    def forward(self, x):
        self.tables[0], self.tables[1] = self.tables[1], self.tables[0]
        return self.body(x + self.tables[0])

class Turns(Layers):  # and answers the same
    def forward(self, x):
        self.tables.reverse()
        return self.body(x + self.tables[0] + self.tables[1])

class Writes(Layers):
    def forward(self, x):
        self.tables[0].add_(1)
        return self.body(x + self.tables[0])

class Large(Layers):
    def __init__(self):
        super().__init__()
        self.tables = [torch.ones(8), torch.zeros(5 << 20)]
    def forward(self, x):
        return self.body(x + self.tables[0])

seen = {}
for kind in (Assigns, Swaps, Turns, Writes, Large):
    checked = []
    seen[kind.__name__] = [checked, run(kind, (), checked, training=True)]
report(seen=seen)
"""
)


def test_a_forward_that_changes_such_a_container_is_left_to_eager(cache: Path) -> None:
    seen = run_program(WRITES, cache, timeout=600, fills=True)["seen"]
    for kind, (checked, lines) in seen.items():
        assert all(checked), (kind, checked, lines)
        assert all(": 0 by kernel" in line for line in lines), (kind, lines)
    for kind in ("Assigns", "Swaps", "Turns"):
        assert all("changes attributes of its own" in line for line in seen[kind][1]), seen[kind]
    assert "inside a container" in seen["Large"][1][0], seen
