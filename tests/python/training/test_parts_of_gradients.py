"""Training of modules whose gradients autograd lays out as parts of other tensors."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import torch, eagercache
from torch import nn
from eagercache.modules.manager import manager
torch.set_num_threads(1)
torch.manual_seed(0)

class Attention(nn.Module):  # additive: what it attends to, and how much
    def __init__(self):
        super().__init__()
        self.mix, self.score = nn.Linear(32, 16), nn.Linear(16, 1, bias=False)
    def forward(self, query, keys):
        both = torch.cat([query[:, None].expand_as(keys), keys], -1)
        weights = self.score(self.mix(both).tanh()).squeeze(-1).softmax(-1)
        return (weights[:, None] @ keys).squeeze(1), weights

model = Attention()
eagercache.enable((), modules=[Attention], training=True, choose="always", on_miss="wait")
OUTPUTS = {"both": (1.0, 1.0), "the first": (1.0, 0.0), "the second": (0.0, 1.0)}
wrong = []
for number in range(3):
    query = torch.randn(4, 16, requires_grad=True)
    keys = torch.randn(4, 7, 16, requires_grad=True)
    for name, weights in OUTPUTS.items():
        for leaves in (True, False):
            seen = []
            for call in (model, model.forward):
                query.grad = keys.grad = None
                given = (query, keys) if leaves else (query * 2, keys * 2)
                outputs = [w * part.square().sum() for w, part in zip(weights, call(*given)) if w]
                sum(outputs).backward()
                seen.append([query.grad, keys.grad])
            for mine, its in zip(*seen):
                if mine.stride() != its.stride() or not torch.allclose(mine, its, atol=1e-5):
                    wrong.append([name, leaves, list(mine.stride()), list(its.stride())])
(row,) = [row for part, row in manager.stats() if part is model]
report(wrong=wrong, hits=row.training_hits)
"""


def test_leaves_get_the_gradients_and_layouts_that_autograd_gives_them(tmp_path: Path) -> None:
    seen = run_program(PROGRAM, tmp_path / "cache", timeout=600)
    assert seen["wrong"] == []
    assert seen["hits"] >= 12, seen
