"""Modules that draw random numbers in their forwards: the very numbers that eager draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_program
from eagercache.worker.graphs.dropout_masks import Noise, ranges_of_given
from eagercache.worker.inductor.commands import CompileRefused

PROGRAM = """
import contextlib, copy, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn
torch.set_num_threads(1)
F = nn.functional

class Sampled(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 16), nn.Linear(8, 8)
    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, -1)
        return self.decode((mean + torch.randn_like(mean) * (spread / 2).exp()).tanh()), mean.sin()

class Dropped(nn.Module):  # as where many answers of one model are compared
    def __init__(self):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)
    def forward(self, x):
        return self.two(self.drop(self.one(x).tanh()).sin())

class Gaps(Dropped):  # in what is dropped from, and elements that share their memory
    def forward(self, x):
        some = self.one(x).tanh()[:, ::2]
        shared = some[:, :1].expand(-1, 16)
        return self.two((self.drop(shared) + self.drop(some).repeat(1, 2)).sin())

class Diffused(nn.Module):  # a time for each row, by which a table is read
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
        self.register_buffer("left", torch.linspace(1, 0.01, 50))
    def forward(self, x):
        time, noise = torch.randint(0, 50, (x.shape[0],)).long(), torch.randn_like(x)
        left = self.left.gather(-1, time)[:, None]
        noisy = left.sqrt() * x + (1 - left).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noisy, time[:, None] / 50.0], 1)), noise)

class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores, self.codes = nn.Linear(8, 12), nn.Parameter(torch.randn(12, 8))
    def forward(self, x):
        return F.gumbel_softmax(self.scores(x).sin(), tau=0.7) @ self.codes

class Shaken(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        x = self.one(x).sin()
        kept = torch.zeros_like(x).uniform_(0, 1) < 0.7
        scale = torch.empty(x.shape[0], 1).uniform_(-0.5, 2.5)
        x = x * torch.where(kept, scale, 0.1) * torch.empty_like(x).normal_(1.0, 0.2)
        return self.two(x.tanh()).sin()

class Mixed(Shaken):
    def forward(self, x):
        part = torch.rand(())
        return self.one(x * part + (1 - part) * x[torch.randperm(x.size(0))]).sin()

class Hinted(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.one = nn.Embedding(10, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.one(x + self.table(torch.randint(10, (x.size(0),)))).tanh()

class Beyond(Hinted):  # the last row is not there
    def forward(self, x):
        return self.one(x + self.table(torch.randint(11, (x.size(0),)).clamp(max=9))).tanh()

class Looked(Hinted):  # which row is computed of the argument
    def forward(self, x):
        at = (x[:, 0].abs() * 100).long()
        return self.one(x + torch.randn_like(x) + self.table.weight[at]).tanh()

class ByData(Shaken):
    def forward(self, x):
        return self.one(torch.bernoulli(x.sigmoid())).sin()

class ByPython(Shaken):
    def forward(self, x):
        import random
        return self.one(x * torch.rand_like(x) + random.random()).sin()

def calls(model, x, trains):
    torch.manual_seed(5)
    found = []
    for number in range(7):
        given = x * 1000 if number == 5 and type(model) is Looked else x
        inference = number == 3 and not trains
        inference = torch.inference_mode() if inference else contextlib.nullcontext()
        autocast = torch.autocast("cpu", enabled=number == 4)
        try:
            with torch.set_grad_enabled(trains), inference, autocast:
                parts = model(given)
        except IndexError as error:
            found.append([str(error)[:40], torch.rand(3)])
            continue
        parts = parts if isinstance(parts, tuple) else (parts,)
        model.zero_grad()
        if trains:
            loss = sum(part.float().square().mean() for part in parts)
            if number == 6:  # gradients of gradients are of the same numbers
                weights = list(model.parameters())
                first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
                loss = sum(gradient.square().sum() for gradient in first if gradient is not None)
            loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([part.detach().clone() for part in parts] + gradients + [torch.rand(3)])
    return found

def alike(mine, its):
    if isinstance(mine, str) or isinstance(its, str):
        return mine == its
    return torch.allclose(mine, its, rtol=1e-2 if mine.dtype == torch.bfloat16 else 1e-4, atol=1e-4)

KINDS = [Sampled, Dropped, Gaps, Diffused, Chosen, Shaken, Mixed, Hinted, Beyond, Looked]
KINDS += [ByData, ByPython]
"""
COMPARED = """
import random
seen = {}
for kind in KINDS:
    model, x = kind(), torch.randn(5, 8).clamp(-0.09, 0.09)
    other = copy.deepcopy(model)
    random.seed(3)
    its = calls(model, x, TRAINS)
    random.seed(3)
    with eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"):
        mine = calls(other, x, TRAINS)
        line = explain_module(other)[0]
    same = [len(a) == len(b) and all(map(alike, a, b)) for a, b in zip(mine, its)]
    seen[kind.__name__] = [same, line]
report(seen=seen)
"""
# Of seven calls the first of a kind waits for its kernel: plain, in inference mode, under autocast.
TRAINED = {"Sampled", "Dropped", "Gaps", "Diffused", "Chosen", "Shaken"}
PLAIN = TRAINED | {
    "Mixed",
    "Hinted",
    "Looked",
}  # trained they would keep more of what they are given


@pytest.mark.parametrize("trains", [False, True], ids=["plain", "trained"])
def test_kernels_draw_what_eager_draws(cache: Path, trains: bool) -> None:
    program = f"TRAINS = {trains}\n" + PROGRAM + COMPARED
    seen: dict[str, Any] = run_program(program, cache, timeout=900, fills=True)["seen"]
    for kind, (same, line) in seen.items():
        assert all(same), (kind, same, line)
        if kind in (TRAINED if trains else PLAIN):
            assert ": 0 by kernel" not in line and "refused" not in line, (kind, line)
    assert "draws random numbers" in seen["ByData"][1], seen["ByData"]
    assert "random numbers that are not torch's" in seen["ByPython"][1], seen["ByPython"]


def test_an_index_that_is_drawn_is_known_to_be_inside() -> None:
    def drawn(kind: str, first: float, second: float) -> Noise:
        return Noise(kind, first, second, torch.int64, (4,), (1,), torch.device("cpu"))

    integers, permutation = drawn("integers", 2, 9), drawn("permutation", 4, 0)
    given = (0, 0, 5, 0)
    for noise, low, high in ((integers, -9, 9), (integers, 2, 9), (permutation, 0, 4)):
        assert ranges_of_given([given, (1, low, high, low)], 1, [noise]) == (given,)
    for noise, low, high in ((integers, 0, 8), (integers, 3, 9), (permutation, 0, 3)):
        with pytest.raises(CompileRefused, match="indexes with random numbers"):
            ranges_of_given([(1, low, high, low)], 1, [noise])
