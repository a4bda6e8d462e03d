"""Functions that keep what they return, which eager does not compute anew and a trace does."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import run_program
from eagercache.worker.compat.cached_calls import is_pure

PROGRAM = """
import functools, math, sys
import torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager

base = 1.0

@functools.lru_cache(maxsize=8)
def root(number):
    return math.sqrt(number) + sum(range(number))

@functools.cache
def table(size):
    return [float(number) for number in range(size)]

@functools.cache
def based(number):
    return base * number

@functools.cache
def product(one, other):
    return one * other

product(1, 2)  # and what is equal and of another type gets that

class Mixed(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * len(str(product(1.0, 2)))

class Pure(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * root(5) + 1

class Kept(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * table(5)[2] + 1

class Based(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * based(3) + 1

class Limited(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * (2 if sys.getrecursionlimit() < 5000 else 3) + 1

class Assigned(torch.nn.Module):  # where torch asks for a signature, and Python for the limit
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(8))

    def forward(self, x):
        y = torch.tanh(x) * self.kept + 1
        self.kept = self.kept
        return y

handlers = {}

def twice(x):  # which no code names
    return torch.tanh(x) * 2 + 1

handlers["a"] = twice
again = (lambda x: torch.tanh(x) * 5).__code__

class Registered(torch.nn.Module):
    def forward(self, x):
        return handlers["a"](x)

def rebase(value, forget=False):
    global base
    base = value
    if forget:
        based.cache_clear()

changes = {
    Pure: [root.cache_clear],
    Kept: [lambda: table(5).reverse(), lambda: table(5).__setitem__(2, 9.0)],
    Assigned: [],
    Limited: [lambda: sys.setrecursionlimit(9000)],
    Registered: [
        lambda: setattr(twice, "__code__", again),
        lambda: handlers.update(a=lambda x: x * 3),
        lambda: handlers.update(a=torch.sin),
    ],
    Based: [lambda: rebase(7.0, True), lambda: rebase(1.0)],
    Mixed: [product.cache_clear],
}
torch.set_num_threads(1)
x = torch.linspace(-1, 1, 32).view(4, 8)
rows = {}
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for kind, made in changes.items():
        model, wrong = kind(), []
        for change in [lambda: None, *made]:
            change()
            calls = [model(x) for _ in range(3)]
            core.set_answering(False)
            expected = model(x)
            core.set_answering(True)
            wrong += [not torch.allclose(answer, expected) for answer in calls]
        hits = sum(row.hits for part, row in manager.stats() if part is model)
        rows[kind.__name__] = [hits, wrong, str(explain_module(model)[:1])]
report(rows=rows)
"""


def test_what_was_kept_is_never_another_ones(cache: Any) -> None:
    rows = run_program(PROGRAM, cache, timeout=300, fills=True)["rows"]
    assert not any(wrong for row in rows.values() for wrong in row[1]), rows
    kept = ["Pure", "Assigned", "Registered"]  # a script's own functions travel by value
    assert [name for name, row in rows.items() if row[0]] == kept, rows
    for name in ("Kept", "Based", "Mixed"):
        assert "which keeps what it returned before" in rows[name][2], rows


NUMBER = 2.0
SPACE = SimpleNamespace(number=2.0)


def _with_cell() -> Callable[[int], float]:
    number = 2.0
    return lambda x: x * number


def _writes(x: int) -> int:
    global NUMBER
    NUMBER = 3.0
    return x


def _imports(x: int) -> object:
    import os

    return os.environ.get(str(x))


@pytest.mark.parametrize(
    ("function", "pure"),
    [
        (lambda x: math.sqrt(x) + sum(range(x)), True),
        (lambda x, by=2: max(y * by for y in (1, 2, x)), True),
        (lambda x: x * NUMBER, False),
        (lambda x: x * SPACE.number, False),
        (lambda x: [(lambda y: y * NUMBER)(y) for y in range(x)], False),
        (lambda x: id(x), False),
        (lambda x, by=[2]: x * by[0], False),
        (_with_cell(), False),
        (_writes, False),
        (_imports, False),
    ],
)
def test_only_what_reads_nothing_is_the_same_at_all_times(function: Any, pure: bool) -> None:
    assert is_pure(functools.cache(function)) is pure
