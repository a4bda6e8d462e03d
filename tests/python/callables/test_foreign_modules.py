"""Modules without tensors that a forward reads from elsewhere, and namespaces of Python's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_program
from eagercache.callables.guard_rows import NO_GUARD, describe
from eagercache.modules.watched_rows import Rows

PROGRAM = """
import argparse, types
import torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
from torch import nn

class Scaled(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain, self.inner = gain, nn.Tanh()

    def forward(self, x):
        return self.inner(x) * self.gain

class Holder:
    def __init__(self):
        self.held = Scaled(2.0)

plain = nn.GELU(approximate="none")
scaled = Scaled(1.5)
chain = nn.Sequential(nn.ReLU(), Scaled(3.0))
table = {"a": Scaled(2.5), "b": nn.SiLU()}
holder = Holder()
dense = nn.Linear(16, 16)

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(16, 16)

class Plain(Base):
    def forward(self, x):
        return plain(self.dense(x))

class Own(Base):
    def forward(self, x):
        return scaled(self.dense(x))

class Chain(Base):
    def forward(self, x):
        return chain(self.dense(x))

class Table(Base):
    def forward(self, x):
        return table["a"](self.dense(x))

class Held(Base):
    def forward(self, x):
        return holder.held(self.dense(x))

space = types.SimpleNamespace(gain=2.0, table={"a": 1.0})
options = argparse.Namespace(gain=3.0)

class Spaced(Base):
    def __init__(self):
        super().__init__()
        self.space, self.options = space, options

    def forward(self, x):
        return self.dense(x) * self.space.gain * self.options.gain + self.space.table["a"]

class Other(argparse.Namespace):
    gain = 11.0

class Dense(Base):  # has tensors, which no kernel is given
    def forward(self, x):
        return dense(self.dense(x))

def shout(part, given, answer):
    return answer + 1

def doubled(x):
    return x * 2

changes = {
    Plain: [
        lambda: setattr(plain, "approximate", "tanh"),
        lambda: plain.register_forward_hook(shout).id,
        lambda: plain._forward_hooks.clear(),
        lambda: setattr(plain, "forward", doubled),
    ],
    Own: [
        lambda: setattr(scaled, "gain", 4.0),
        lambda: vars(scaled).update(gain=5.0),
        lambda: setattr(scaled, "inner", nn.Sigmoid()),
        lambda: scaled.inner.register_forward_pre_hook(lambda part, given: (given[0] * 3,)),
        lambda: setattr(scaled, "__class__", nn.Identity),
    ],
    Chain: [
        lambda: setattr(chain[1], "gain", 7.0),
        lambda: chain.append(nn.Tanh()),
        lambda: chain.append(nn.Linear(16, 16)),
    ],
    Table: [lambda: setattr(table["a"], "gain", 0.5), lambda: table.update(a=nn.ReLU())],
    Held: [
        lambda: setattr(holder.held, "gain", 0.5),
        lambda: setattr(holder, "held", nn.ReLU()),
        lambda: setattr(nn.ReLU, "forward", lambda self, x: x * 9),
    ],
    Spaced: [
        lambda: setattr(space, "gain", 4.0),
        lambda: space.table.update(a=5.0),
        lambda: vars(options).update(gain=5.0),
        lambda: (delattr(options, "gain"), setattr(options, "__class__", Other)),
    ],
    Dense: [lambda: dense.weight.data.zero_()],
}
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(8, 16)
rows = {}

def wrong(model):
    calls = [model(x) for _ in range(3)]
    core.set_answering(False)
    expected = model(x)
    core.set_answering(True)
    return [not torch.allclose(answer, expected, atol=1e-5) for answer in calls]

with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for kind, made in changes.items():
        model = kind().eval()
        found = [wrong(model)]
        hits = sum(row.hits for part, row in manager.stats() if part is model)
        for change in made if CHANGES else ():
            change()
            found.append(wrong(model))
        rows[kind.__name__] = [hits, found, str(explain_module(model)[:1])]
report(rows=rows)
"""


def program(changes: bool, old: str = "", new: str = "") -> str:
    return PROGRAM.replace("CHANGES", str(changes)).replace(old, new)


def right(rows: dict[str, Any]) -> bool:
    return not any(wrong for _, found, _ in rows.values() for calls in found for wrong in calls)


def test_modules_elsewhere_are_watched_in_whole(cache: Path) -> None:
    rows = run_program(program(changes=True), cache, timeout=400, fills=True)["rows"]
    assert right(rows), rows
    assert [name for name, (hits, *_) in rows.items() if not hits] == ["Dense"], rows
    edits = {
        'approximate="none"': 'approximate="tanh"',
        "scaled = Scaled(1.5)": "scaled = Scaled(2.5)",
        "self.held = Scaled(2.0)": "self.held = Scaled(2.0).requires_grad_(False).eval()",
        "argparse.Namespace(gain=3.0)": "argparse.Namespace(gain=4.0)",
        "nn.ReLU(), Scaled(3.0)": "nn.Tanh(), Scaled(3.0)",
    }
    text = program(changes=False)
    for old, new in edits.items():
        text = text.replace(old, new)
    edited = run_program(text, cache, timeout=400, fills=True)["rows"]
    assert right(edited), edited


def test_a_module_elsewhere_is_described_or_cannot_be_guarded() -> None:
    nobody = torch.nn.Module()
    act = torch.nn.GELU()
    whole = describe(act, "module", None, nobody)
    act.eval()
    assert describe(act, "module", None, nobody) != whole
    act.train()
    assert describe(act, "module", None, nobody) == whole
    act.register_forward_hook(lambda *_: None)
    dense = torch.nn.Linear(2, 2)
    for value in (act, dense, torch.nn.Sequential(dense)):
        assert describe(value, "module", None, nobody).startswith(NO_GUARD), value


@pytest.mark.parametrize("leads_to", ["", "part", "module"])
def test_what_leads_to_the_watched_module_is_not_held(leads_to: str) -> None:
    model = torch.nn.Sequential(torch.nn.ReLU())
    more = {"": [], "part": [model[0]], "module": [model]}[leads_to]
    beside = torch.nn.Sequential(torch.nn.Tanh(), *more)
    rows = Rows(model)
    rows.inside([beside])
    assert any(place is vars(beside) for _, place, *_ in rows.made) is (leads_to != "module")
