"""Modules that are called with tensors of which `expand` stores each number once."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import torch, eagercache
from torch import nn
from eagercache.modules.manager import manager
torch.set_num_threads(1)
torch.manual_seed(0)

class Rays(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 3)
    def forward(self, places, directions):
        x = self.first(torch.cat([places.sin(), directions.cos()], -1))
        return self.last(nn.functional.gelu(x)).sigmoid()

model, right = Rays(), []
eagercache.enable((), modules=[Rays], training=True, choose="always", on_miss="wait")
for number in range(6):
    places = torch.randn(16, 8, 3)
    directions = torch.randn(16, 3, requires_grad=number % 2 == 0)
    expanded = directions[:, None].expand(16, 8, 3)
    answers = []
    for call in (model, model.forward):
        answer = call(places, expanded)
        of = [model.first.weight, *([directions] if directions.requires_grad else [])]
        answers.append([answer.detach(), *torch.autograd.grad(answer.square().sum(), of)])
    with torch.no_grad():
        answers[0].append(model(places, expanded))
        answers[1].append(model.forward(places, expanded))
    right.append(all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*answers, strict=True)))
(row,) = [row for part, row in manager.stats() if part is model]
report(right=right, hits=row.hits, training_hits=row.training_hits)
"""


def test_expanded_arguments_have_kernels_with_gradients_and_without(tmp_path: Path) -> None:
    seen = run_program(PROGRAM, tmp_path / "cache", timeout=600)
    assert seen["right"] == [True] * 6
    assert seen["training_hits"] >= 2 and seen["hits"] - seen["training_hits"] >= 3, seen
