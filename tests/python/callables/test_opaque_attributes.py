"""Modules with attributes that no worker can be told of, or that change between calls."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import run_program
from eagercache.callables.module_gradient import _kept, keep_as_it_is
from eagercache.callables.module_identity import Unfit, identify
from eagercache.calls.opaque import OpaqueRead, Placeholder, leave_out
from eagercache.modules.changing import changed_attributes
from torch import nn

BEGIN = """
import itertools, threading, torch, eagercache
from eagercache.base.load import core
from eagercache.calls.opaque import leave_out
from eagercache.modules import looks
from eagercache.modules.manager import explain_module, manager
from torch import nn

class Owner: pass

class Net(nn.Module):
    def __init__(self, way=None, **held):
        super().__init__()
        self.dense, self.out, self.way = nn.Linear(16, 32), nn.Linear(32, 4), way
        self.register_buffer("offset", None)
        vars(self).update(held)
    def __getstate__(self):  # as whatever is trained leaves its trainer behind
        return {**vars(self), "owner": None} if "owner" in vars(self) else vars(self)
    def forward(self, x):
        y = self.out(nn.functional.gelu(self.dense(x) * 2 + 1))
        if self.offset is not None: y = y + self.offset
        if self.way is not None and self.reads(): return y * 2
        return y
    def reads(self):
        way = self.way
        if way == "none": return self.held is not None
        if way == "type": return not isinstance(self.held, threading.Thread)
        if way == "equal": return self.held != 3
        if way == "given name": return getattr(self, "he" + "ld", 3) is not None
        if way == "dictionary": return self.__dict__["held"] is not None
        if way == "adds": return self.held.append(1) is None
        if way == "assigns": self.held = threading.Lock()
        if way == "number": return self.held > 2
        return True

def hits(model):
    return next(row.hits for part, row in manager.stats() if part is model)

def right(model, x):
    answer = model(x)
    core.set_answering(False)
    wanted = model(x)
    core.set_answering(True)
    return torch.allclose(answer, wanted, atol=1e-5)

torch.set_num_threads(1)
x = torch.randn(8, 16)
OPTIONS = dict(ops=(), modules=[Net], on_miss="wait", choose="always")
"""

UNREAD = (
    BEGIN
    + """
owner = Owner()
owner.part, owner.itself = nn.Linear(2, 2), owner
held = dict(
    lock=threading.Lock(), file=open("/dev/null"), some=(i for i in range(3)), owner=owner,
    parts=[nn.Linear(2, 2)], losses=[torch.randn(3, requires_grad=True).sum()],
    generator=torch.Generator(), many=list(range(30_000)),
)
model, seen, good = Net(None, **held).eval(), [], True
with torch.no_grad(), eagercache.enable(**OPTIONS):
    def call():
        global good
        before = hits(model) if seen else 0
        good &= right(model, x)
        seen.append(hits(model) - before)
    for _ in range(3): call()
    model.lock, model.owner, model.some = threading.Lock(), Owner(), (i for i in range(2))
    model.owner.itself = model.owner.part = nn.Linear(2, 2)
    model.parts.append(1)
    for _ in range(3): call()
    model.offset = torch.ones(4)
    for _ in range(2): call()
    model.offset = None
    call()
    model._buffers["offset"] = torch.ones(4)
    call()
    lines = explain_module(model)[:1]
report(seen=seen, good=good, lines=lines)
"""
)

READ = (
    BEGIN
    + """
lines, good = {}, True
with torch.no_grad(), eagercache.enable(**OPTIONS):
    for way in ("none", "type", "equal", "given name", "dictionary", "adds", "assigns", "number"):
        held = [threading.Lock()] if way == "adds" else threading.Lock()
        if way == "number": held = 3
        model = Net(way, held=held).eval()
        if way == "number": leave_out(model, {("", "held")})
        for _ in range(3): good &= right(model, x)
        lines[way] = explain_module(model)[0]
report(lines=lines, good=good)
"""
)

CHANGING = (
    BEGIN
    + """
looks.MAX_WAITS_WITHOUT_HITS = 1
model, good = Net(None, steps=0, losses=[], phase=None).eval(), True
with torch.no_grad(), eagercache.enable(**OPTIONS):
    for step in range(12):
        model.phase = "evaluation"
        good &= right(model, x)
        model.phase, model.steps = None, model.steps + 1
        model.losses.append(float(step))
    found = dict(hits=hits(model), lines=explain_module(model)[:1])
report(good=good, **found)
"""
)


def test_a_module_has_kernels_beside_what_its_forward_does_not_read(cache: Path) -> None:
    found = run_program(UNREAD, cache, fills=True)
    assert found["good"], found
    # What it reads is another thing after the sixth call, and before and after the ninth.
    assert found["seen"][:6] == [0, 1, 1, 1, 1, 1], found


def test_what_the_forward_reads_of_it_refuses_the_module(cache: Path) -> None:
    found = run_program(READ, cache, fills=True)
    assert found["good"], found
    lines = dict(found["lines"])
    assert "refused: it makes another thing of its attribute held" in lines.pop("assigns"), found
    for way, line in lines.items():
        assert "0 by kernel" in line, (way, line)
        assert "the forward reads an attribute that cannot be sent to a worker" in line, (way, line)


def test_what_changes_between_calls_is_left_out_of_the_module(cache: Path) -> None:
    found = run_program(CHANGING, cache, fills=True)
    assert found["good"], found
    assert found["hits"] >= 6, found


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(2, 2)
        self.lock = threading.Lock()
        self.steps: Any = 0


def test_a_description_has_it_only_where_that_is_asked_for() -> None:
    model = Steps()
    with pytest.raises(Unfit, match="attribute lock is a lock"):
        identify(model)
    before = identify(model, allow_opaque=True)
    (one,) = before.opaque
    assert (one.path, one.name, one.value) == ("", "lock", model.lock)
    assert before.holds(model)
    model.lock = threading.Lock()
    assert identify(model, allow_opaque=True).text == before.text
    assert not before.holds(model)  # whoever runs a forward sees that it assigned one
    vars(model)["forward"] = threading.Lock()  # a call runs it, in no trace
    with pytest.raises(Unfit, match="attribute forward"):
        identify(model, allow_opaque=True)


def test_attributes_that_changed_are_found_where_nothing_else_did() -> None:
    model = nn.Sequential(Steps())
    texts = [identify(model, allow_opaque=True).text]
    model[0].steps = 1
    texts.append(identify(model, allow_opaque=True).text)
    assert changed_attributes(*texts) == {("0", "steps")}
    assert changed_attributes(texts[0], texts[0]) == set()
    assert leave_out(model, {("0", "steps")})
    assert not leave_out(model, {("0", "steps")})
    texts.append(identify(model, allow_opaque=True).text)
    model[0].steps = 2
    assert identify(model, allow_opaque=True).text == texts[2]
    model.eval()  # which has kernels of its own
    assert changed_attributes(texts[2], identify(model, allow_opaque=True).text) == set()
    model.train()
    model[0].dense = nn.Linear(2, 3)
    assert changed_attributes(texts[2], identify(model, allow_opaque=True).text) == set()


def test_a_copy_for_gradients_of_gradients_leaves_equal_values_alone() -> None:
    model = Steps()
    model.steps = model.width = 3  # one object
    leave_out(model, {("", "steps")})
    found = identify(model, allow_opaque=True)
    keep_as_it_is(model, found.digest)
    tensors = {number: slot.tensor for number, slot in enumerate(found.slots)}
    copied = _kept[found.digest].with_tensors(tensors, found.digest)
    assert copied.width == 3


def test_what_stands_for_it_in_a_worker_says_what_was_read() -> None:
    one = Placeholder("attribute lock is a lock")
    assert copy.deepcopy([one])[0] is one
    assert pickle.loads(pickle.dumps(one)).reason == one.reason
    for use in (lambda: one.acquire, lambda: one[0], lambda: one + 1, lambda: bool(one)):
        with pytest.raises(OpaqueRead, match="attribute lock is a lock"):
            use()
    assert identify(nn.Identity()).text != identify(_with(nn.Identity(), one)).text


def _with(module: nn.Module, value: Any) -> nn.Module:
    vars(module)["held"] = value
    return module
