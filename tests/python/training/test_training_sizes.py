"""Training whose sizes change from step to step: two kernels for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run_program

PROGRAM = """
import copy, torch, eagercache
from eagercache.modules.manager import manager
from torch import nn

class Layers(nn.Module):  # an argument with a gradient, and masks
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.drop = nn.Dropout(0.2)
    def forward(self, x):
        return self.last(self.drop(self.norm(nn.functional.silu(self.first(x)))))
    def example(self, rows, length):
        return (torch.randn(rows, length, 8, requires_grad=True),)

class Language(nn.Module):  # rows that indices choose, attention, a loss beside its logits
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.mix, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 50)
        self.places = nn.Embedding(128, 16)
    def forward(self, words, labels):
        rows, length = words.shape
        x = self.words(words) + self.places(torch.arange(length))
        mixed = self.mix(x).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*mixed, is_causal=True)
        x = self.norm(x + self.out(seen.transpose(1, 2).reshape(rows, length, 16)))
        logits = self.head(nn.functional.gelu(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
    def example(self, rows, length):
        return torch.randint(0, 50, (rows, length)), torch.randint(0, 50, (rows, length))

class Pictures(nn.Module):  # buffers that it writes
    def __init__(self):
        super().__init__()
        self.filters, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
    def forward(self, x):
        return self.last(torch.relu(self.norm(self.filters(x))).mean((2, 3)))
    def example(self, rows, length):
        return (torch.randn(rows, 3, 12, 4 + length),)

def step(module, forward, given, seed):
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]
    module.zero_grad()
    torch.manual_seed(seed)
    answers = forward(*given)
    answers = answers if isinstance(answers, tuple) else (answers,)
    drawn = torch.get_rng_state()
    answers[0].square().mean().backward()
    gradients = [p.grad for p in module.parameters()] + [x.grad for x in given if x.requires_grad]
    return [*answers, *gradients, *module.buffers()], drawn

def same(module, other, given, seed):
    mine, drawn = step(module, module, given, seed)
    own, expected = step(other, other.forward, given, seed)
    return torch.equal(drawn, expected) and all(
        a.stride() == b.stride() and torch.allclose(a, b, atol=2e-6, rtol=1e-4)
        for a, b in zip(mine, own, strict=True))

# No size comes twice while there is no kernel: it would get one of its own, if the module was
# looked at quickly enough for its first call to count.
SIZES = [(3, 5), (4, 7), (2, 9), (2, 2), (3, 17), (16, 33), (5, 64), (3, 5), (4, 7), (2, 100)]
"""

FILL = (
    PROGRAM
    + """
seen = {}
for kind in (Layers, Language, Pictures):
    torch.manual_seed(0)
    module = kind()
    other, rows = copy.deepcopy(module), []
    with eagercache.enable((), modules=[kind], training=True, choose="always"):
        for seed, sizes in enumerate(SIZES):
            rows.append(same(module, other, module.example(*sizes), seed))
            eagercache.wait(900)
        (hits,) = [row.training_hits for part, row in manager.stats() if part is module]
    seen[kind.__name__] = [rows, hits]
report(seen=seen, compiles=eagercache.stats().compiles)
"""
)

AGAIN = (
    PROGRAM
    + """
torch.manual_seed(0)
module = Layers()
other = copy.deepcopy(module)
eagercache.enable((), modules=[Layers], training=True, on_miss="native", choose="always")
first = [same(module, other, module.example(7, 23), 3) for _ in range(2)]
eagercache.wait(60)
checks = {}
checks["answers"] = all(same(module, other, module.example(n, 3 * n), n) for n in (5, 11, 40))

def penalty(own, forward, x):  # the gradient of a gradient
    torch.manual_seed(1)
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(forward(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), own.parameters(), allow_unused=True)
x = module.example(6, 13)[0]
pairs = list(zip(penalty(module, module, x), penalty(other, other.forward, x), strict=True))
checks["penalty"] = any(a is not None for a, _ in pairs) and all(
    (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-5)) for a, b in pairs)

answer = module(x)  # two calls of other sizes are under way at once
beside = module(module.example(3, 4)[0])
beside.sum().backward()
answer.sum().backward(retain_graph=True)
answer.sum().backward()
try:
    answer.sum().backward()
except RuntimeError as error:
    checks["twice"] = "second time" in str(error)

answer = module(x)
with torch.no_grad():
    module.last.weight.mul_(2)
    other.last.weight.mul_(2)
try:
    answer.sum().backward()
except RuntimeError as error:
    checks["written"] = "modified by an inplace operation" in str(error)
checks["afterwards"] = same(module, other, module.example(9, 8), 5)
(row,) = [row for part, row in manager.stats() if part is module]
report(first=first, checks=checks, hits=row.training_hits, compiles=eagercache.stats().compiles)
"""
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A store that steps of changing sizes have filled, and what was seen meanwhile."""
    path = tmp_path_factory.mktemp("sizes") / "cache"
    path.mkdir(mode=0o700)
    yield path, run_program(FILL, path, timeout=900, fills=True)


def test_steps_of_all_sizes_share_a_kernel_and_are_right(
    filled: tuple[Path, dict[str, Any]],
) -> None:
    seen = filled[1]["seen"]
    for kind, (rows, hits) in seen.items():
        assert all(rows), (kind, rows)
        # The first call has the module looked at, and the second size asks for the kernel of all.
        assert hits >= len(rows) - (3 if kind != "Pictures" else 4), (kind, hits)
    assert filled[1]["compiles"] <= len(seen) + 1


def test_another_process_has_the_kernel_for_sizes_that_nobody_had(
    filled: tuple[Path, dict[str, Any]],
) -> None:
    again = run_program(AGAIN, filled[0], timeout=300)
    assert all(again["first"])
    assert again["checks"] == dict.fromkeys(
        ("answers", "penalty", "twice", "written", "afterwards"), True
    )
    assert again["compiles"] == 0
    assert again["hits"] >= 8
