"""Operators that the program implements anew are called, not what a kernel has inside."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_program

pytestmark = pytest.mark.once

PROGRAM = """
import torch, eagercache
from eagercache.modules.manager import manager

class Model(torch.nn.Module):
    def forward(self, x):
        return (x.relu() * 2).tanh() + 1

model, x = Model().eval(), torch.randn(4, 8)
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for _ in range(4):
        first = model(x)
    torch.vmap(torch.square)(x)  # PyTorch then registers implementations of its own
    model(x)
    hits = [row.hits for part, row in manager.stats() if part is model]
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", lambda x: x * 0 + 5, "CPU")
    during = model(x)
    library._destroy()
    after = model(x)
    torch.library.impl("aten::relu", "CPU", lambda x: x * 0 + 7)  # by a library of PyTorch's
    again = model(x)
report(hits=hits, during=bool((during == (torch.full((4, 8), 5.0) * 2).tanh() + 1).all()),
       after=torch.allclose(first, after),
       again=bool((again == (torch.full((4, 8), 7.0) * 2).tanh() + 1).all()))
"""


def test_an_operator_implemented_anew_is_called(cache: Path) -> None:
    found = run_program(PROGRAM, cache, fills=True)
    assert found["hits"] == [4]
    assert found["during"] and found["after"] and found["again"], found


FUNCTION = """
import torch, eagercache

@eagercache.op("demo::scaled")
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2 + 1

@eagercache.op("demo::later")
def later(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 3 + 1

x, given = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
def hits():
    return eagercache.stats().hits

with eagercache.enable(["demo::scaled"], on_miss="wait", choose="always"):
    for _ in range(3):
        first = scaled(x)
        scaled(given).sum().backward()
    answered = hits()
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", lambda x: x * 0 + 5, "CPU")
    during = [scaled(x), scaled(given).detach(), later(x) - 5]
    later(x)
    aside = hits()
    library._destroy()
    after = scaled(x)
    later(x)
    later(x)
report(answered=answered, aside=aside, again=hits(), after=torch.equal(first, after),
       during=[bool((answer == 11).all()) for answer in during])
"""


def test_a_function_that_names_an_operator_implemented_anew_calls_it(cache: Path) -> None:
    found = run_program(FUNCTION, cache, fills=True)
    assert found["answered"] > 2 and found["aside"] == found["answered"], found
    assert found["during"] == [True, True, True], found
    assert found["after"] and found["again"] > found["aside"] + 1, found
