"""Attributes that get an equal object, and what is changed inside of that one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import run_program
from eagercache.callables.guard_rows import GuardRow
from eagercache.modules.guarded_places import GuardedRows
from eagercache.modules.watched_rows import Unwatchable

# How one is made, how it is read, and what is changed inside of it.
KINDS = {
    "an object": ("Plain", "HELD.value", "held.value = 3.0"),
    "a dict with attributes": ("Dict", "HELD.value", "held.value = 3.0"),
    "a list with attributes": ("List", "HELD.value", "held.value = 3.0"),
    "a tuple with attributes": ("attributes_of_a_tuple", "HELD.value", "held.value = 3.0"),
    "a closure": ("a_closure", "HELD(1.0)", "held.__closure__[0].cell_contents[0] = 3.0"),
    "a function": ("a_function", "HELD.value", "held.value = 3.0"),
    "a class": ("a_class", "HELD.value", "held.value = 3.0"),
    "a class by its name": ("one_with_a_name", "HELD.value", "held.value = 3.0"),
    "in a list": ("(lambda value: [Plain(value)])", "HELD[0].value", "held[0].value = 3.0"),
    "in a tuple": ("(lambda value: (Plain(value), 1))", "HELD[0].value", "held[0].value = 3.0"),
    "a method": ("(lambda value: Plain(value).method)", "HELD(1.0)", "held.__self__.value = 3.0"),
    "a namespace": (
        "(lambda value: types.SimpleNamespace(value=value))",
        "HELD.value",
        "held.value = 3.0",
    ),
}

PROGRAM = """
import types
import torch, eagercache
from torch import nn
from eagercache.base.load import core
from eagercache.modules import look_budget
from eagercache.modules.manager import manager
look_budget.SHARE = 1e9  # more changes than any program makes
torch.set_num_threads(1)

class Plain:
    def __init__(self, value):
        self.value = value
    def method(self, x):
        return x * self.value
class Dict(dict):
    def __init__(self, value):
        self.value = value
class List(list):
    def __init__(self, value):
        self.value = value
class Tuple(tuple):
    pass
def attributes_of_a_tuple(value):
    made = Tuple((1.0,))
    made.value = value
    return made
def a_closure(value):
    cell = [value]
    return lambda x: x * cell[0]
def a_function(value):
    def function(x):
        return x
    function.value = value
    return function
class Named:
    value = 2.0
def a_class(value):
    return type("Kind", (), {"value": value})
def one_with_a_name(value):
    Named.value = value
    return Named

kinds = KINDS

class World(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.part = nn.Linear(8, 8), nn.Identity()
        for number, (make, _) in enumerate(kinds.values()):
            setattr(self if number % 2 else self.part, f"held_{number}", make(2.0))
    def forward(self, x):
        y = self.dense(x).tanh()
        BODY
        return y

def hits():
    return sum(row.hits for part, row in manager.stats() if part is model)

def call():
    with torch.no_grad():
        return model(x)

def settles():
    for _ in range(8):
        before = hits()
        call()
        if hits() > before:
            return True
    return False

def eager():
    core.set_answering(False)
    answer = call()
    core.set_answering(True)
    return answer

torch.manual_seed(0)
model, x = World().eval(), torch.randn(4, 8)
eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
made = settles()
# Nothing else is compiled: a kernel that answers is of the values before.
eagercache.enable(ops=(), modules="auto", on_miss="native", choose="always")
rows = []
for number, (name, (make, change)) in enumerate(kinds.items()):
    model = World().eval()  # one alone is given up after so many changes
    began = settles()
    owner = model if number % 2 else model.part
    setattr(owner, f"held_{number}", make(2.0))
    answered = began and settles()
    held = getattr(owner, f"held_{number}")
    exec(change)
    mine = [call() for _ in range(3)]
    right = all(torch.allclose(one, eager(), rtol=1e-4, atol=1e-6) for one in mine)
    setattr(owner, f"held_{number}", make(2.0))
    rows.append([name, answered, right, torch.allclose(call(), eager(), rtol=1e-4, atol=1e-6)])
report(made=made, rows=rows)
"""


def _program() -> str:
    lines = []
    for number, (_, read, _) in enumerate(KINDS.values()):
        owner = "self" if number % 2 else "self.part"
        lines.append(f"y = y * {read.replace('HELD', f'{owner}.held_{number}')}")
    rows = [f"{name!r}: ({make}, {change!r})" for name, (make, _, change) in KINDS.items()]
    listed = "{" + ", ".join(rows) + "}"
    return PROGRAM.replace("KINDS", listed).replace("BODY", "\n        ".join(lines))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder: Path = tmp_path_factory.mktemp("replaced")
    return run_program(_program(), folder, fills=True)


def test_what_is_changed_inside_of_an_equal_object_is_noticed(seen: dict) -> None:
    assert seen["made"], seen
    assert [name for name, _, right, _ in seen["rows"] if not right] == []
    assert [name for name, _, _, right in seen["rows"] if not right] == []


def test_an_equal_object_leaves_the_kernel(seen: dict) -> None:
    assert [name for name, answered, *_ in seen["rows"] if not answered] == []


def test_what_c_keeps_of_an_exception_cannot_be_watched() -> None:
    module = torch.nn.Module()
    module.error = ValueError(2.0)
    path = (("self", ""), ("attr", "error"), ("attr", "args"), ("item", 0))
    with pytest.raises(Unwatchable, match=r"error\.args is kept by C"):
        GuardedRows(module).guard(GuardRow(path, "value", None, None), module)
