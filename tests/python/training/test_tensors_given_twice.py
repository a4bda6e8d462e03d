"""Training of modules that get one tensor several times, as self-attention does."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import torch, eagercache
from torch import nn
from eagercache.modules.manager import manager
torch.set_num_threads(1)
torch.manual_seed(0)

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x, y, z=None):
        mixed = nn.functional.gelu(self.first(x)) * self.first(y).tanh()
        return self.last(mixed) + (0 if z is None else z.sin())

model = Pair()
eagercache.enable((), modules=[Pair], training=True, choose="always", on_miss="wait")
leaf = torch.randn(4, 8, requires_grad=True)
other = torch.randn(4, 8, requires_grad=True)

def once(call):
    made = leaf * 2
    return call(made, made)

def thrice(call):
    made = leaf * 2
    return call(made, other, z=made)

CALLS = {
    "a leaf": lambda call: call(leaf, leaf),
    "two": lambda call: call(leaf, other),
    "equal ones": lambda call: call(leaf * 2, leaf * 2),
    "what was computed": once,
    "beside another": thrice,
    "without gradients": lambda call: call(leaf.detach(), other.detach()),
}
right = {name: [] for name in CALLS}

def slopes(call, of, form):
    answer = form(call)
    return [answer.detach(), *torch.autograd.grad(
        answer.square().sum(), of, allow_unused=True, materialize_grads=True)]

def curvature(call, of, form):
    (slope,) = torch.autograd.grad(form(call).sum(), of[:1], create_graph=True)
    return [slope.detach(), *torch.autograd.grad(slope.square().sum(), of, allow_unused=True,
                                                 materialize_grads=True)]

for number in range(4):
    for name, form in CALLS.items():
        of = [leaf, other, *model.parameters()]
        measures = [slopes] if name == "without gradients" else [slopes, curvature]
        for measure in measures:
            mine, its = (measure(call, of, form) for call in (model, model.forward))
            same = [torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(mine, its)]
            right[name].append(all(same))
(row,) = [row for part, row in manager.stats() if part is model]
report(wrong=[name for name, seen in right.items() if not all(seen)], hits=row.training_hits)
"""


def test_a_tensor_that_is_given_twice_has_the_gradient_of_both(tmp_path: Path) -> None:
    seen = run_program(PROGRAM, tmp_path / "cache", timeout=600)
    assert seen["wrong"] == []
    assert seen["hits"] >= 2 * 4 * 4, seen
