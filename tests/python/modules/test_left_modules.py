"""A module whose first form of call has no kernel: others may have one, its parts have theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_program

pytestmark = pytest.mark.once

PROGRAM = """
import torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

class Part(torch.nn.Sequential):
    pass

class Prompted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.part = Part(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))

    def forward(self, x):
        if x.dim() == 3:
            print("a prompt")
        return self.part(x.flatten(0, -2)).sigmoid() * 2 + 1

class Printing(Prompted):
    def forward(self, x):
        print("always")
        return super().forward(x)

def hits(module):
    return sum(row.hits for part, row in manager.stats() if part is module)

prompt, token = torch.randn(2, 3, 8), torch.randn(4, 8)
rows = {}
options = {"modules": "auto", "on_miss": "wait", "choose": "always"}
with torch.no_grad(), eagercache.enable((), **options):
    model = Prompted().eval()
    for _ in range(4):
        model(prompt)
    rows["prompts"] = [hits(model), hits(model.part)]
    off = 0.0
    for _ in range(40):
        answer = model(token)
        core.set_answering(False)
        off = max(off, float((answer - model(token)).abs().max()))
        core.set_answering(True)
    rows["tokens"], rows["off"] = hits(model), off
    before = hits(model.part)
    model(prompt)
    rows["lines"] = [str(line) for line in explain_module(model)]
    compiles = eagercache.stats().compiles
    printing = Printing().eval()
    for size in range(2, 12):
        for _ in range(40):
            printing(torch.randn(size, 8, 8).flatten(0, size % 2))
    rows["printing"] = [hits(printing), hits(printing.part)]
report(**rows)
"""


def test_another_form_has_a_kernel_where_the_first_has_none(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    found = run_program(PROGRAM, tmp_path, fills=True)
    assert found["prompts"][0] == 0
    assert found["prompts"][1] > 0, "its part has a kernel meanwhile"
    assert found["tokens"] >= 30, found["lines"]
    assert found["off"] < 1e-5
    assert found["printing"][0] == 0
    assert found["printing"][1] > 0


REFUSED = """
import os, sys
import torch, eagercache
from torch import nn

class Prints(nn.Module):
    def forward(self, x):
        print(end="")
        return x + 1

class Asks(nn.Module):
    def forward(self, what):
        return what.x + 1

class Thing:
    __slots__ = ("x", "__weakref__")
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)

x = torch.zeros(3)
thing = Thing()
thing.x = x
parts = [nn.ReLU() for _ in range(60)], [Prints() for _ in range(21)], [Asks() for _ in range(20)]

def forward():
    for part in (*parts[0], *parts[1]):
        part(x)
    for part in parts[2]:
        part(thing)

def seen():
    ours = []
    events = 0
    def count(frame, event, argument):
        nonlocal events
        if event in ("call", "c_call"):
            events += 1
            name = frame.f_code.co_filename
            if event == "call" and os.sep + "eagercache" + os.sep in name:
                ours.append(f"{os.path.basename(name)} {frame.f_code.co_name}")
    sys.setprofile(count)
    try:
        forward()
    finally:
        sys.setprofile(None)
    return events, ours

forward()
native, _ = seen()
eagercache.enable(["abs"], modules="auto")
for _ in range(6):
    forward()
    eagercache.wait(60)
events, ours = seen()
totals = eagercache.stats().modules
report(native=native, events=events, ours=sorted(set(ours)), count=len(ours),
       watched={name: [row.modules, row.refused] for name, row in totals.items()})
"""


def test_a_refused_module_costs_its_wrapper_and_asks_nobody(cache: Path) -> None:
    seen = run_program(REFUSED, cache, fills=True, timeout=400)
    assert seen["ours"] == ["call_hooks.py call"], seen
    assert seen["count"] == 101
    # The wrapper, whether TorchDynamo traces, and the look at what is known of the module.
    assert seen["events"] - seen["native"] <= 3 * 101, seen


SCRIPTED = """
import copy
import torch, eagercache
from torch import nn
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
x = torch.linspace(-1, 1, 32).view(4, 8)
rows = {}
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    expected = model.eval()(x)
    for name in ("script", "trace"):
        made = torch.jit.script(model) if name == "script" else torch.jit.trace(model, x)
        made.train()
        made.eval()
        made.note = 1.0
        rows[name] = [torch.allclose(made(x), expected) for _ in range(4)]
        rows[name] += [torch.allclose(copy.deepcopy(made)(x), expected), made.training]
report(rows=rows)
"""


def test_what_torch_jit_made_is_changed_and_called_as_ever(cache: Path) -> None:
    rows = run_program(SCRIPTED, cache, fills=True)["rows"]
    assert rows == dict.fromkeys(("script", "trace"), [True] * 5 + [False])


OF_A_CLASS = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
torch.manual_seed(0)

class Masks(torch.nn.Module):
    kept = torch.tensor([True, False] * 8)

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)
        self.mine = torch.tensor([True, False] * 8)

    def forward(self, x):
        return torch.tanh(self.dense(x)).masked_fill(self.kept, 0.0) * 2

class Own(Masks):
    def forward(self, x):
        return torch.tanh(self.dense(x)).masked_fill(self.mine, 0.0) * 2

right, hits, lines = [], [], []
x = torch.randn(8, 16)
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for kind in (Masks, Own):
        model = kind()
        for turn in range(6):
            if turn == 3:
                model.kept.logical_not_()
                model.mine.logical_not_()
            right.append(torch.equal(model(x) == 0, kind.forward(model, x) == 0))
        hits.append(sum(row.hits for part, row in manager.stats() if part is model))
        lines += [str(line) for line in explain_module(model)]
report(right=right, hits=hits, lines=lines)
"""


def test_a_tensor_of_a_class_is_read_by_the_forward(cache: Path) -> None:
    seen = run_program(OF_A_CLASS, cache, fills=True)
    assert all(seen["right"]), seen
    assert seen["hits"][0] == 0 and seen["hits"][1] > 3, seen
    assert "the forward reads the tensor" in seen["lines"][0], seen
