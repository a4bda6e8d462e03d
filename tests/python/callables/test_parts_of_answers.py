"""Modules that answer with parts of one tensor, or with views of one another; their gradients."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PARTS = """
import copy, torch, eagercache
from eagercache.modules.manager import explain_module
torch.set_num_threads(1)

class Encoder(torch.nn.Module):  # of a variational autoencoder
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.two(self.one(x).relu()).chunk(2, 1)

class Autoencoder(Encoder):
    def forward(self, x):
        mean, spread = self.two(self.one(x).sigmoid()).sigmoid().chunk(2, 1)
        drawn = mean + torch.exp(spread / 2) * 0.1
        return self.one(torch.cat((drawn, mean), 1)), mean, spread

class Slices(Encoder):  # the rest of a token's features, whose gradient autograd computes from them
    def forward(self, x):
        made = self.two(self.one(x).relu()).sigmoid()
        return made[:, 1:4], made[1:, 5:]

class Overlaps(Encoder):
    def forward(self, x):
        made = self.two(self.one(x).relu()).sigmoid()
        return made[:, :5], made[:, 3:]

class Turned(Encoder):  # as CLIP's scores of images and of texts
    def forward(self, x):
        made = self.two(self.one(x).relu()).sigmoid() * 2
        return made[:3].sum(), made.t(), made, made[1:, 5:]

def nothing(parts):
    pass

def keeps(parts):
    for part in parts:
        part.retain_grad()

def hooks(parts):
    parts[-1].register_hook(lambda gradient: gradient * 3)

def doubles(parts):  # what others are views of
    parts[-2].mul_(2)

def writes(parts):  # what the backward has not kept
    parts[0].mul_(2)

def step(model, x, change):
    model.zero_grad()
    parts = model(x)
    try:
        change(parts)
        loss = sum((part.sin() * (i + 1)).sum() for i, part in enumerate(parts))
        if change is nothing:  # gradients of gradients
            weights = list(model.parameters())
            gradients = torch.autograd.grad(loss, weights, create_graph=True)
            loss = loss + sum(gradient.square().sum() for gradient in gradients)
        loss.backward()
    except RuntimeError as error:
        return str(error)[:60]
    lie = [(part.stride(), part.storage_offset(), part.untyped_storage().data_ptr() ==
            parts[-1].untyped_storage().data_ptr()) for part in parts]
    numbers = [loss, *parts, *(p.grad for p in model.parameters()),
               *(part.grad for part in parts if change is keeps)]
    return lie, [number.detach().clone() for number in numbers]

def equal(one, other):
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return one[0] == other[0] and all(
        torch.allclose(a, b, atol=1e-5 + 1e-6 * b.abs().max().item())  # of sums that cancel, too
        for a, b in zip(one[1], other[1], strict=True))

seen = {}
for kind in (Encoder, Autoencoder, Slices, Overlaps, Turned):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 8)
    other, changes = copy.deepcopy(model), (nothing, nothing, keeps, hooks)
    changes += (doubles if kind is Turned else writes,)
    native = [step(model, x, change) for change in changes]
    with eagercache.enable(ops=(), modules="auto", training=True, choose="always", on_miss="wait"):
        answers = [step(other, x, change) for change in changes]
        line = explain_module(other)[0]
    rows = [[equal(*both), *(str(one)[:60] for one in both)] for both in zip(answers, native)]
    seen[kind.__name__] = [rows, line]

# The backward reads what it keeps of the answer: a write is told as autograd tells it.
model = Autoencoder()
with eagercache.enable(ops=(), modules="auto", training=True, choose="always", on_miss="wait"):
    told = []
    for _ in range(3):
        whole, mean, spread = model(x)
        with torch.no_grad():
            mean.mul_(2)
        try:
            whole.sum().backward()
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
report(seen=seen, told=told)
"""


def test_parts_of_one_tensor_are_answered_with_their_gradients(cache: Path) -> None:
    found = run_program(PARTS, cache, fills=True)
    for kind in ("Encoder", "Autoencoder", "Slices"):
        rows, line = found["seen"][kind]
        assert "4 with gradients" in line, line
        assert all(same for same, *_ in rows[:-1]), (kind, rows)
    rows, line = found["seen"]["Overlaps"]
    assert all(same for same, *_ in rows), rows
    assert "what it returns shares elements with another output" in line
    rows, line = found["seen"]["Turned"]
    assert all(same for same, *_ in rows), rows
    assert "4 with gradients" in line
    assert all("modified by an inplace operation" in text for text in found["told"]), found["told"]
