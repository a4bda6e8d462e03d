"""Modules with `one_hot`, as losses of segmentation: a class outside raises, as in eager."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, torch, eagercache
import torch.nn.functional as F
from eagercache.modules.manager import explain_module
from torch import nn

class Dice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 5)
    def classes(self, labels):
        return F.one_hot(labels, 5)
    def forward(self, x, labels):
        chances, rows = self.one(x).softmax(-1), self.classes(labels)
        return 1 - 2 * (chances * rows).sum(0) / (chances + rows).sum(0)

class Computed(Dice):
    def classes(self, labels):
        return F.one_hot(labels * 2 - 2, 5)

class Counted(Dice):
    def classes(self, labels):
        return F.one_hot(labels)

def answer(module, x, labels):
    try:
        return module(x, labels)
    except RuntimeError as error:
        return str(error)

def same(one, two):
    return one == two if isinstance(one, str) or isinstance(two, str) else torch.allclose(one, two)

seen = {}
x, labels = torch.randn(4, 8), torch.tensor([1, 2, 3, 3])
for kind in (Dice, Computed, Counted):
    model, checked, lines = kind(), [], []
    other = copy.deepcopy(model)
    labels[0] = 4 if kind is Counted else 1
    for gradients in (False, True):
        with (
            torch.set_grad_enabled(gradients),
            eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"),
        ):
            for outside in (None, None, None, 5, -1, 0):
                given = labels.clone()
                if outside is not None:
                    given[0] = outside
                checked.append(same(answer(model, x, given), answer(other.forward, x, given)))
            if gradients and kind is Dice:
                for each in (model, other.forward):
                    each(x, labels).sum().backward()
                checked.append(torch.allclose(model.one.weight.grad, other.one.weight.grad))
            lines.append(explain_module(model)[0])
    seen[kind.__name__] = [checked, lines]
report(seen=seen)
"""


def test_a_class_outside_of_a_one_hot_raises_where_kernels_answer(cache: Path) -> None:
    seen = run_program(PROGRAM, cache, timeout=600, fills=True)["seen"]
    for kind, (checked, lines) in seen.items():
        assert all(checked), (kind, checked, lines)
    evaluated, trained = seen["Dice"][1]
    assert ": 3 by kernel" in evaluated and "index_range" in evaluated, evaluated
    assert "4 with gradients" in trained, trained
    assert ": 0 by kernel" not in seen["Computed"][1][0], seen
    assert ": 0 by kernel" in seen["Counted"][1][1], seen
