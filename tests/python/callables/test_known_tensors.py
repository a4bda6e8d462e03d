"""Modules that make tensors of numbers alone, and ask what these hold: axes, masks, labels."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, sys, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.first = nn.Linear(8, 6), 1

class Axes(Layer):  # as losses of segmentation name them
    def forward(self, x):
        axes = torch.arange(self.first, x.dim()).tolist()
        return self.layer(x).sin().sum(axes)

class Pairs(Layer):  # all but those of a row with itself
    def forward(self, x):
        rows = F.normalize(self.layer(x), dim=1)
        others = torch.eye(len(x)).bool()
        others[0, self.first] = True
        others.logical_not_()
        return (rows @ rows.T).exp()[others][: 2 * len(x)].view(len(x), -1)

class Pulls(Layer):  # NT-Xent, whose labels are made of numbers
    def forward(self, x):
        rows, half = F.normalize(self.layer(x), dim=1), len(x) // 2
        scores = (rows @ rows.T).masked_fill(torch.eye(len(x)).bool(), -torch.inf)
        labels = torch.cat([torch.arange(half) + half, torch.arange(half)])
        return F.cross_entropy(scores / self.first, labels)

class Loops(Layer):  # a graph's edges, and one from each node to itself
    def forward(self, x, edges):
        nodes = torch.arange(len(x))
        start, end = torch.cat([edges, torch.stack([nodes, nodes])], 1)
        scale = torch.zeros(len(x)).index_add(0, end, torch.ones(len(end))).rsqrt()
        rows = self.layer(x)[start] * (scale[start] * scale[end] * self.first)[:, None]
        return torch.zeros(len(x), 6).index_add(0, end, rows)

class Marked(Layer):  # what the mask holds is the call's
    def forward(self, x):
        mask = torch.zeros(len(x), dtype=torch.bool)
        mask[:1] = x[:1, 0] > 0
        return self.layer(x) * float(mask.sum() + self.first)

class Through(Layer):  # and so it is when another name is written
    def forward(self, x):
        counts = torch.zeros(2, 2)
        counts.view(4)[1:].unsqueeze(0).add_(x[0, 0].sign())
        return self.layer(x) * counts.sum().item()

class Reused(Layer):  # a list that is changed, of a tensor that is changed
    def forward(self, x):
        counts = torch.arange(3)
        found = counts.tolist()
        found.append(self.first)
        counts.mul_(3)
        return self.layer(x) * (sum(found) * int(counts[2]))

def calls(module, other, given, trains):
    checked = []
    for sign in (1, -1, 1, -1):
        one, two = ([given[0].mul(sign).requires_grad_(trains), *given[1:]] for _ in range(2))
        with torch.set_grad_enabled(trains):
            answer, expected = module(*one), other.forward(*two)
        checked.append(torch.allclose(answer, expected, atol=1e-5))
        if trains:
            for result in (answer, expected):
                result.square().sum().backward()
            pairs = zip([one[0], *module.parameters()], [two[0], *other.parameters()])
            checked += [torch.allclose(a.grad, b.grad, atol=1e-3) for a, b in pairs]
    return checked

seen = {}
edges = torch.randint(4, (2, 5))
for kind in (Axes, Pairs, Pulls, Loops, Marked, Through, Reused):
    torch.manual_seed(0)
    module = kind()
    other, checked = copy.deepcopy(module), []
    given = (torch.randn(4, 8), edges) if kind is Loops else (torch.randn(4, 8),)
    with eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"):
        for trains in (False, True):
            checked += calls(module, other, given, trains)
        lines = explain_module(module)
        module.first = other.first = 0 if kind is Axes else 2
        checked += calls(module, other, given, False)
        if kind is Loops:
            given[1][0, 0] = 4  # no node's: eager raises, and so does the module
            for each in (module, other.forward):
                try:
                    each(*given)
                    checked.append(False)
                except (IndexError, RuntimeError):
                    pass
    seen[kind.__name__] = [checked, lines[0]]
report(seen=seen)
"""


def test_what_such_tensors_hold_is_a_constant(cache: Path) -> None:
    for _ in range(2):  # the second process finds the kernels of the first
        seen = run_program(PROGRAM, cache, timeout=900, fills=True)["seen"]
        for kind, (checked, line) in seen.items():
            assert all(checked), (kind, checked, line)
        for kind in ("Axes", "Pairs", "Pulls", "Loops", "Reused"):
            assert "4 with gradients" in seen[kind][1] or "3 with gradients" in seen[kind][1], seen
            assert "refused" not in seen[kind][1], seen
