"""Modules that are called with objects, where gradients are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import run_program

PROGRAM = """
import copy, dataclasses, enum, torch, eagercache
from typing import Any
from eagercache.modules.manager import manager
from torch import nn

@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor
    scale: float = 1.5
    extra: Any = None
    power = 2.0
    def half(self):
        return self.x * 0.5
    @property
    def third(self):
        return self.x / 3

class Mode(enum.Enum):
    DOUBLE = 1

class Plain:
    def __init__(self, **fields):
        self.__dict__.update(fields)

MODE = Mode.DOUBLE

class Net(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(24, 24), nn.Linear(24, 24), nn.LayerNorm(24)
        self.reads = reads
    def forward(self, batch, more=None):
        h = self.norm(torch.tanh(self.a(batch.x)) * batch.mask)
        y = nn.functional.gelu(self.b(h * h.sigmoid())) * batch.scale
        if self.reads == "class":
            y = y + batch.half() * batch.power + batch.third
        if self.reads == "nested":
            y = y + batch.extra["rows"][0].x.tanh() * batch.extra["weight"]
        if self.reads == "keywords":
            y = y * more["z"].x
        if self.reads == "answer":
            return {"y": y, "given": batch, "mask": batch.mask}
        if self.reads == "mode" and batch.extra is Mode.DOUBLE:
            y = y * 2
        if self.reads == "count":
            batch.scale += 1
        if self.reads == "put":
            batch.extra = h
        return y

def call(net, forward, seed, rows=6):
    torch.manual_seed(seed)
    batch = Batch(torch.randn(rows, 24, requires_grad=seed % 2 == 1), torch.rand(rows, 24))
    if net.reads == "plain":
        batch = Plain(x=batch.x, mask=batch.mask, scale=0.5 + seed % 2, other=(1, "a"))
    if net.reads == "nested":
        batch.extra = {"rows": [Plain(x=torch.rand(rows, 24))], "weight": 0.25}
    if net.reads == "mode":
        batch.extra = MODE
    if net.reads == "keywords":
        return forward(batch, more={"z": Plain(x=torch.rand(rows, 24), word="w")}), batch
    return forward(batch), batch

def step(net, forward, seed, twice=False):
    answer, batch = call(net, forward, seed)
    y = answer["y"] if isinstance(answer, dict) else answer
    if net.reads == "answer":
        assert answer["given"] is batch and answer["mask"] is batch.mask
    net.zero_grad()
    if twice:
        slopes = torch.autograd.grad(y.square().mean(), list(net.parameters()), create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
    else:
        y.square().mean().backward()
    given = [batch.x.grad] if batch.x.requires_grad and batch.x.grad is not None else []
    put = [batch.extra] if isinstance(getattr(batch, "extra", None), torch.Tensor) else []
    return [y, *(p.grad for p in net.parameters()), *given, *put], batch.scale

def same(net, other, seed, twice=False):
    mine, scale = step(net, net, seed, twice)
    own, expected = step(other, other.forward, seed, twice)
    return scale == expected and len(mine) == len(own) and all(
        torch.allclose(a, b, atol=2e-6, rtol=1e-4) for a, b in zip(mine, own, strict=True))

def made(reads):
    torch.manual_seed(0)
    net = Net(reads)
    return net, copy.deepcopy(net)

def row(net):
    (found,) = [row for part, row in manager.stats() if part is net]
    return found
"""

STEPS = (
    PROGRAM
    + """
seen = {}
eagercache.enable((), modules=[Net], training=True, choose="always", on_miss=MISS)
for reads in ("plain", "class", "nested", "keywords", "answer"):
    net, other = made(reads)
    for seed in (0, 1):
        call(net, net, seed)
        eagercache.wait(200)
    equal = [same(net, other, seed, twice=seed == 4) for seed in range(2, 7)]
    seen[reads] = [all(equal), row(net).training_hits, row(net).reason]
report(seen=seen, compiles=eagercache.stats().compiles)
"""
)

OF_CLASSES = (
    PROGRAM
    + """
checks = {}
eagercache.enable((), modules=[Net], training=True, choose="always", on_miss="wait")
net, other = made("class")
same(net, other, 0), same(net, other, 0)
checks["by kernel"] = row(net).training_hits > 0

def again(times):  # as a notebook's cell that is run once more
    exec(f'''
@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor
    scale: float = 1.5
    extra: Any = None
    power = 2.0
    def half(self):
        return self.x * {times}
    third = property(lambda self: self.x * 7)
''', globals())
former = Batch
again(9)
checks["a class that is defined anew"] = same(net, other, 0)
checks["and its objects again"] = same(net, other, 0) and same(net, other, 0)
newer, Batch = Batch, former
checks["objects of the former one"] = same(net, other, 0)
Batch = newer
again(11)
checks["another one"] = same(net, other, 0)

net, other = made("mode")
same(net, other, 0), same(net, other, 0)
checks["of a member by kernel"] = row(net).training_hits > 0
class Mode(enum.Enum):
    DOUBLE = 1
checks["a member of a class that was defined anew"] = same(net, other, 0)
MODE = Mode.DOUBLE
checks["and of the new one"] = same(net, other, 0) and same(net, other, 0)

net, other = made("class")
Batch.half = lambda self: self.x * 4
checks["a method"] = same(net, other, 0)
Batch.power = 5.0
checks["an attribute of the class"] = same(net, other, 0)
Batch.third = property(lambda self: self.x * 8)
checks["a property"] = same(net, other, 0)
report(checks=checks)
"""
)

OF_OBJECTS = (
    PROGRAM
    + """
from eagercache.modules.manager import explain_module
checks = {}
eagercache.enable((), modules=[Net], training=True, choose="always", on_miss="wait")
net, other = made("nested")
same(net, other, 0), same(net, other, 0)
before = row(net).training_hits
def slopes(forward, own):  # what the objects hold when gradients are asked for is of later calls
    y, batch = call(own, forward, 0)
    held = batch.extra["rows"]
    batch.x, batch.scale, batch.extra["weight"] = torch.zeros(6, 24), 70.0, 3.0
    held[0].x = torch.zeros(6, 24)
    held.clear()
    first = torch.autograd.grad(y.square().mean(), list(own.parameters()), create_graph=True)
    return torch.autograd.grad(sum(f.square().sum() for f in first), list(own.parameters()))
checks["what they hold later"] = all(
    torch.allclose(a, b, atol=1e-6) for a, b in zip(slopes(net, net), slopes(other.forward, other)))
checks["by kernel"] = row(net).training_hits > before > 0
errors = []
for forward in (net, other.forward):
    y, batch = call(net, forward, 0)
    batch.mask.mul_(2)
    try:
        y.sum().backward()
    except RuntimeError as error:
        errors.append("modified by an inplace operation" in str(error))
checks["written before the backward"] = errors == [True, True]

refused = {}
for reads in ("count", "put"):
    net, other = made(reads)
    checks[reads] = all(same(net, other, seed) for seed in (0, 0, 1))
    refused[reads] = [row(net).training_hits, str(explain_module(net))]
report(checks=checks, refused=refused)
"""
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    cache = tmp_path_factory.mktemp("objects") / "cache"
    cache.mkdir(mode=0o700)
    return cache, run_program(STEPS.replace("MISS", '"wait"'), cache, fills=True, timeout=600)


def test_steps_by_kernel_equal_eager_whatever_is_read_of_objects(
    filled: tuple[Path, dict[str, Any]],
) -> None:
    for reads, (equal, hits, reason) in filled[1]["seen"].items():
        assert equal and hits >= 5, (reads, equal, hits, reason)


def test_another_process_has_their_kernels(filled: tuple[Path, dict[str, Any]]) -> None:
    again = run_program(STEPS.replace("MISS", '"native"'), filled[0])
    assert again["compiles"] == 0
    for reads, (equal, hits, reason) in again["seen"].items():
        assert equal and hits >= 5, (reads, equal, hits, reason)


def test_a_class_that_was_edited_since_has_new_kernels_for_all_calls(
    filled: tuple[Path, dict[str, Any]],
) -> None:
    edited = STEPS.replace("self.x * 0.5", "self.x * 0.75").replace("MISS", '"wait"')
    begin, end = edited.index('("plain"'), edited.index("):\n    net, other = made(reads)")
    seen = run_program(f'{edited[:begin]}("class",{edited[end:]}', filled[0], timeout=600)
    equal, hits, _ = seen["seen"]["class"]
    assert equal and hits >= 5 and seen["compiles"] == 2, seen


def test_what_their_classes_are_by_now_is_seen(filled: tuple[Path, Any]) -> None:
    checks = run_program(OF_CLASSES, filled[0], timeout=600)["checks"]
    assert all(checks.values()), checks


def test_what_becomes_of_objects_is_seen(filled: tuple[Path, Any]) -> None:
    seen = run_program(OF_OBJECTS, filled[0], timeout=600)
    assert all(seen["checks"].values()), seen["checks"]
    for hits, reason in seen["refused"].values():
        assert hits == 0 and "changes an object that it is called with" in reason
