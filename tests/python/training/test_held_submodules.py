"""Modules that reach their submodules by lists, dicts, methods and objects of their own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from conftest import run_program
from eagercache.callables.module_identity import Unfit, identify
from torch import nn

PARTS = """
import collections, copy, functools, gc, types, weakref, torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.fill()

class Listed(Two):  # children, a part of one, and a parameter behind it
    def fill(self):
        self.held = [self.a, self.b, self.block[1]]
    def forward(self, x):
        for part in self.held:
            x = part(x).sin() * (2 if part is self.a else 1)
        return x * self.held[0].bias

class Named(Two):
    def fill(self):
        self.held = {"a": self.a, "more": [("b", self.b), ["norm", self.block[1], 2.0]]}
    def forward(self, x):
        x = self.held["a"](x)
        for row in self.held["more"]:
            x = row[1](x).sin()
            if row[0] == "norm":
                x = x * row[2]
        return x

class Methods(Two):
    def fill(self):
        self.held = [self.b.forward, functools.partial(self.block)]
        self.act, self.last = self.a.forward, self.halve
    def halve(self, x):
        return x / 2
    def forward(self, x):
        for function in self.held:
            x = function(x).sin()
        return self.last(self.act(x))

class Box: pass

class Boxed(Two):
    def fill(self):
        self.held = Box()
        self.held.one, self.held.more = self.a, collections.OrderedDict(b=self.b)
    def forward(self, x):
        return self.held.more["b"](self.held.one(x).sin())

KINDS = [Listed, Named, Methods, Boxed]

def made(kind):
    torch.manual_seed(0)
    return kind().eval()

def hits(model):
    return next(row.hits for part, row in manager.stats() if part is model)

def run(model, gradients):
    given = x.to(model.a.weight.dtype, copy=True).requires_grad_(gradients)
    answer = model(given)
    if not gradients:
        return [answer]
    model.zero_grad(set_to_none=False)
    answer.sum().backward()
    return [answer, given.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

def right(model, gradients=False):
    answers = run(model, gradients)
    core.set_answering(False)
    wanted = run(model, gradients)
    core.set_answering(True)
    return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(answers, wanted, strict=True))

def enabled(on_miss="wait"):
    options = dict(choose="always", training=True, on_miss=on_miss)
    return eagercache.enable((), modules=KINDS, **options)

torch.set_num_threads(1)
x = torch.randn(4, 8)
"""

CHANGED_PARTS = (
    PARTS
    + """
def other(part):
    found = copy.deepcopy(part)
    with torch.no_grad():
        for tensor in found.parameters():
            tensor.add_(1)
    return found

def replace(module):
    module.a = other(module.a)

def replace_in_table(module):
    module._modules["b"] = other(module.b)

def replace_everywhere(module):
    replace(module)
    module.fill()

def exchange(module):
    module.a, module.b = module.b, module.a

def load(module):
    module.load_state_dict({k: v + 0.1 for k, v in module.state_dict().items()}, assign=True)

def scaled(x):
    return x * 3

def set_class(module):
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2
    module.a.__class__ = Doubled

EACH = [
    replace, replace_in_table, replace_everywhere, exchange, load, set_class, copy.deepcopy,
    lambda module: delattr(module, "b"),
    lambda module: module.double(),
    lambda module: module.train(),
    lambda module: setattr(module.block[1], "eps", 0.5),
    lambda module: setattr(module.a, "forward", scaled),
    lambda module: setattr(module.b, "forward", types.MethodType(lambda self, x: x * 3, module.b)),
    lambda module: module.a.register_forward_hook(lambda part, given, answer: answer * 2) and None,
    lambda module: setattr(module.b, "weight", module.a.weight),
    lambda module: setattr(module.a, "weight", nn.Parameter(torch.ones(8, 8))),
]
CHANGES = {
    Listed: [
        lambda module: module.held.reverse(),
        lambda module: module.held.append(module.b),
        lambda module: module.held.insert(0, module.block[0]),
        lambda module: module.held.pop(),
        lambda module: module.held.__setitem__(0, module.b),
        lambda module: module.held.__setitem__(1, other(module.b)),
        lambda module: setattr(module, "held", tuple(module.held)),
        lambda module: setattr(module, "held", module.held[::-1]),
    ],
    Named: [
        lambda module: module.held.__setitem__("a", module.b),
        lambda module: module.held.__setitem__("a", other(module.a)),
        lambda module: module.held["more"].reverse(),
        lambda module: module.held["more"].append(("c", module.a)),
        lambda module: module.held["more"][1].__setitem__(1, module.block[0]),
        lambda module: module.held["more"][1].__setitem__(2, 3.0),
        lambda module: module.held["more"].__setitem__(0, ("norm", module.b, 0.5)),
    ],
    Methods: [
        lambda module: module.held.reverse(),
        lambda module: module.held.__setitem__(0, module.a.forward),
        lambda module: setattr(module, "act", module.b.forward),
        lambda module: setattr(module, "last", module.block[1].forward),
    ],
    Boxed: [
        lambda module: setattr(module.held, "one", module.b),
        lambda module: setattr(module.held, "one", other(module.a)),
        lambda module: module.held.more.__setitem__("b", module.a),
    ],
}
first, seen = {}, {}
with torch.no_grad():
    for kind, changes in CHANGES.items():
        model, checked = made(kind), []
        with enabled():
            good = [right(model) for _ in range(3)]
            first[kind.__name__] = [good, hits(model), explain_module(model)]
        # Kernels answer before each change, and none is made after it.
        with enabled("native"):
            for number, change in enumerate([*changes, *EACH]):
                model = made(kind)
                good = right(model) and right(model)
                before = hits(model)
                changed = change(model)
                model = changed if type(changed) is kind else model
                checked.append([number, before, good, right(model), right(model)])
        seen[kind.__name__] = checked
report(first=first, seen=seen)
"""
)


def test_submodules_in_containers_are_those_that_are_registered_until_something_changes(
    cache: Path,
) -> None:
    found = run_program(CHANGED_PARTS, cache, fills=True)
    for kind, (good, hits, lines) in found["first"].items():
        assert all(good), (kind, good, lines)
        assert hits == 2, (kind, hits, lines)
    for kind, checked in found["seen"].items():
        for number, hits, *good in checked:
            assert hits, (kind, number, checked)
            assert all(good), (kind, number, checked)


AGAIN = (
    PARTS
    + """
seen, ends = {}, []
for kind, change in {
    Listed: lambda module: module.held.reverse(),
    Named: lambda module: module.held["more"].reverse(),
    Methods: lambda module: setattr(module, "act", module.b.forward),
}.items():
    model, checked = made(kind), []
    with enabled():
        for _ in range(2):  # of which each order has a kernel of its own
            checked += [right(model, gradients=True) for _ in range(3)]
            change(model)
        checked += [right(model, gradients=True) for _ in range(3)]
        row = next(row for part, row in manager.stats() if part is model)
        seen[kind.__name__] = [checked, row.training_hits, explain_module(model)]

with torch.no_grad(), enabled():
    model = made(Listed)
    for _ in range(3): model(x)
    was = hits(model)
    ends.append(weakref.ref(model.a))
    model.a = nn.Linear(8, 8)
    model.held = [model.a, model.b]
    for _ in range(2): model(x)
    gc.collect()
    ends.append(weakref.ref(model))
    del model
    gc.collect()
report(seen=seen, hits=was, ends=[end() is None for end in ends])
"""
)


def test_gradients_go_to_submodules_in_containers_and_nothing_keeps_them_alive(
    cache: Path,
) -> None:
    found = run_program(AGAIN, cache, fills=True)
    for kind, (checked, hits, lines) in found["seen"].items():
        assert all(checked), (kind, checked, lines)
        assert hits >= (4 if kind == "Methods" else 6), (kind, hits, lines)
    assert found["hits"] == 2
    assert found["ends"] == [True, True]


REFUSED_PARTS = (
    PARTS
    + """
class InSet(Two):
    def fill(self):
        self.held = {self.a, self.b}
    def forward(self, x):
        for part in self.held: x = part(x).sin()
        return x

class Unregistered(Two):
    def fill(self):
        self.held = [self.a, nn.Linear(8, 8)]
    def forward(self, x):
        for part in self.held: x = part(x).sin()
        return x

class Borrowed(Two):
    def fill(self):
        self.held = nn.LeakyReLU(0.5).forward
    def forward(self, x):
        return self.held(self.a(x))

class OwnMethods(Two):
    def fill(self):
        self.held = [self.twice]
    def twice(self, x):
        return self.a(x) * 2
    def forward(self, x):
        return self.held[0](x)

class OfClass(Two):
    held = []
    def fill(self):
        OfClass.held = [self.a, self.b]
    def forward(self, x):
        return self.held[0](x)

class Turns(Listed):
    def forward(self, x):
        self.held.reverse()
        return sum(part(x) for part in self.held)

class Unread(OwnMethods):
    def forward(self, x):
        return self.a(x) * 2

KINDS = [InSet, Unregistered, Borrowed, OwnMethods, OfClass, Turns, Unread]
seen = {}
with torch.no_grad(), enabled():
    for kind in KINDS:
        model = made(kind)
        good = [right(model) for _ in range(3)]
        model.held = [model.b, model.a] if kind is OfClass else model.held
        if kind is OfClass: del model.held; OfClass.held.reverse()
        good += [right(model) for _ in range(2)]
        seen[kind.__name__] = [good, explain_module(model)[0]]
report(seen=seen)
"""
)


def test_submodules_that_no_description_has_are_left_to_eager(cache: Path) -> None:
    seen = run_program(REFUSED_PARTS, cache, fills=True)["seen"]
    reasons = {
        "InSet": "held holds a submodule in a set",
        "Unregistered": "held holds a module that is not registered",
        "Borrowed": "held holds a module that is not registered",
        "OwnMethods": "held holds a method of the module itself",
        "OfClass": "reads a part of the module by type(self).held[0]",
        "Turns": "watched",
    }
    for kind, (good, line) in seen.items():
        assert all(good), (kind, good, line)
        if kind in reasons:
            assert ": 0 by kernel" in line, (kind, line)
            assert reasons[kind] in line, (kind, line)
    assert ": 4 by kernel" in seen["Unread"][1], seen


def _held(*order: Any) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = {"a": model[0], "b": model[1], "method": model[1].forward}
    model.held = [parts[name] for name in order]
    return identify(model).text


def test_a_description_says_which_submodules_a_list_has() -> None:
    assert _held("a", "b") != _held("b", "a")
    assert _held("a", "b") == _held("a", "b")
    assert _held("method") != _held("b")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    texts = []
    for part in model:
        vars(model)["act"] = part.forward
        texts.append(identify(model).text)
    assert texts[0] != texts[1]
    inner = ("b", model[1])
    model.held = [inner]  # type: ignore[assignment]
    assert {id(one) for one in identify(model).holders} >= {id(model.held), id(inner)}
    for held, reason in (
        ([model], "held holds the module itself"),
        ({model[0]}, "held holds a submodule in a set"),
        ([functools.partial(model.forward)], "held holds a method of the module itself"),
    ):
        model.held = held  # type: ignore[assignment]
        with pytest.raises(Unfit, match=reason):
            identify(model)
