"""Other tensors in a module's places: no look where metadata and sharing are the same."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

KERNELS = """
import torch, eagercache
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from eagercache.base.load import core
from eagercache.modules import looks
from eagercache.modules.manager import manager
torch.set_num_threads(1)
torch.manual_seed(0)
looked = []
look = looks.ModuleLooks.look
looks.ModuleLooks.look = lambda own, reference: (looked.append(1), look(own, reference))[1]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.ones(8))
    def forward(self, x):
        return self.norm(self.last(F.gelu(self.first(x)))).tanh() + self.shift

model, x = Model().eval(), torch.randn(4, 8)
eagercache.enable((), modules=[Model], training=True, choose="always", on_miss="wait")

def row():
    return next(row for part, row in manager.stats() if part is model)

def plain():
    with torch.no_grad():
        return [model(x)]

def both(call):
    mine = call()
    core.set_answering(False)
    its = call()
    core.set_answering(True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(mine, its, strict=True))
"""

STEPS = (
    KERNELS
    + """
def slopes(tensors, of):
    answer = functional_call(model, tensors, (x,))
    return [answer.detach(), *torch.autograd.grad(answer.square().sum(), of)]

names = {name: value.detach() for name, value in model.named_parameters()}
for _ in range(3):
    plain()
    slopes(dict(model.named_parameters()), list(model.parameters()))
began, first, right = len(looked), row().hits, {}
for number in range(4):
    other = {name: torch.randn_like(value) for name, value in names.items()}
    leaves = {name: value.clone().requires_grad_() for name, value in other.items()}
    with torch.no_grad():
        right[number, "plain tensors"] = both(lambda: [functional_call(model, other, (x,))])
        right[number, "a buffer"] = both(
            lambda: [functional_call(model, {"shift": torch.arange(8.0) * number}, (x,))])
    right[number, "leaves"] = both(lambda: slopes(leaves, list(leaves.values())))
    right[number, "what was computed"] = both(lambda: slopes(
        {name: value * 2 for name, value in leaves.items()}, list(leaves.values())))
    model.first.weight = nn.Parameter(torch.randn(8, 8))
    right[number, "a new parameter"] = both(plain)
    right[number, "slopes of it"] = both(
        lambda: slopes({}, [model.first.weight, model.last.bias]))
hits = row().hits - first
report(looked=len(looked) - began, hits=hits, right=[str(key) for key in right if not right[key]])
"""
)

OTHER_METADATA = (
    KERNELS
    + """
right = {}
for _ in range(3):
    plain()
own = model.first.weight
CHANGES = {
    "dtype": lambda: setattr(model, "shift", model.shift.double()),
    "and back": lambda: setattr(model, "shift", model.shift.float()),
    "strides": lambda: setattr(model.first, "weight", nn.Parameter(torch.randn(8, 8).t())),
    "one for two": lambda: setattr(model.first, "weight", model.last.weight),
    "two again": lambda: setattr(model.first, "weight", nn.Parameter(torch.randn(8, 8))),
    "both others": lambda: [
        setattr(part, "weight", nn.Parameter(torch.randn(8, 8)))
        for part in (model.first, model.last)],
    "none": lambda: setattr(model.first, "bias", None),
    "one more": lambda: setattr(model.first, "bias", nn.Parameter(torch.randn(8))),
    "a class of its own": lambda: setattr(
        model, "shift", torch.randn(8).as_subclass(type("Other", (torch.Tensor,), {}))),
    "its own again": lambda: setattr(model, "shift", torch.randn(8)),
    "a view": lambda: setattr(model, "shift", torch.randn(3, 8)[1]),
}
for name, change in CHANGES.items():
    change()
    right[name] = both(plain) and both(plain)
dual = torch.autograd.forward_ad
with dual.dual_level():
    given = {"first.weight": dual.make_dual(torch.randn(8, 8), torch.randn(8, 8))}
    def tangent():
        return [dual.unpack_dual(functional_call(model, given, (x,))).tangent]
    right["tangents"] = both(tangent)
stacked = {"first.bias": torch.randn(3, 8)}
right["vmap"] = both(lambda: [torch.vmap(
    lambda given: functional_call(model, given, (x,)))(stacked)])
report(right=[name for name in right if not right[name]], hits=row().hits)
"""
)

# What leads a forward to a tensor of its module beside its own place for it, and what it may ask
# of one. Each is right, by a kernel or not, when another tensor takes that place.
WAYS = (
    KERNELS
    + """
GLOBAL = nn.Parameter(torch.ones(8, 8))

def kind(forward, **more):
    def __init__(self):
        nn.Module.__init__(self)
        self.weight = GLOBAL if more.get("given") else nn.Parameter(torch.ones(8, 8))
        if "held" in more:
            more["held"](self)
    return type("Kind", (nn.Module,), {"__init__": __init__, "forward": forward,
                                       "shared": GLOBAL, "__module__": __name__})

def is_global(self, x):
    return F.linear(x, self.weight).tanh() * (2.0 if self.weight is GLOBAL else 3.0)

def by_global(self, x):
    return F.linear(x, self.weight).tanh() + F.linear(x, GLOBAL)

def by_default(self, x, other=GLOBAL):
    return F.linear(x, other).tanh() * 2.0

def by_class(self, x):
    return F.linear(x, self.shared).tanh() * 2.0

def asks_instance(self, x):
    return F.linear(x, self.weight).tanh() * (2.0 if isinstance(self.weight, nn.Parameter) else 3.0)

def asks_type(self, x):
    return F.linear(x, self.weight).tanh() * (2.0 if type(self.weight) is torch.Tensor else 3.0)

def asks_class(self, x):
    return F.linear(x, self.weight).tanh() * (
        2.0 if self.weight.__class__ is torch.Tensor else 3.0)

def by_tuple(self, x):
    return F.linear(x, self.pair[0]).tanh() * self.pair[1]

def by_dict(self, x):
    return F.linear(x, self.held["weight"]).tanh() + F.linear(x, self.weight)

def by_function(self, x):
    return self.function(x).tanh() + F.linear(x, self.weight)

def is_other(self, x):
    return F.linear(x, self.weight).tanh() * (2.0 if self.weight is self.other else 3.0)

def hold_tuple(self):
    self.pair = (self.weight, 2.0)

def hold_dict(self):
    self.held = {"weight": self.weight}

def hold_function(self):
    weight = self.weight
    self.function = lambda x: F.linear(x, weight)

def hold_other(self):
    self.other = self.weight

KINDS = {
    "is a global": kind(is_global, given=True),
    "by a global": kind(by_global, given=True),
    "by a default": kind(by_default, given=True),
    "by its class": kind(by_class, given=True),
    "isinstance": kind(asks_instance),
    "type": kind(asks_type),
    "class": kind(asks_class),
    "by a tuple": kind(by_tuple, held=hold_tuple),
    "by a dict": kind(by_dict, held=hold_dict),
    "by a function": kind(by_function, held=hold_function),
    "is another": kind(is_other, held=hold_other),
}
wrong, hits = [], {}
eagercache.enable((), modules=list(KINDS.values()), choose="always", on_miss="wait")
for name, one in KINDS.items():
    model = one()
    for _ in range(3):
        plain()
    own = model.weight
    for other in (own, torch.randn(8, 8), nn.Parameter(torch.randn(8, 8)), own):
        model._parameters["weight"] = other
        if not (both(plain) and both(plain)):
            wrong.append([name, type(other).__name__])
    hits[name] = row().hits
report(wrong=wrong, hits=hits)
"""
)


def test_tensors_of_the_same_metadata_are_answered_for_without_a_look(tmp_path: Path) -> None:
    seen = run_program(STEPS, tmp_path / "cache", timeout=600)
    assert seen["right"] == []
    assert seen["looked"] == 0
    assert seen["hits"] == 6 * 4


def test_tensors_of_other_metadata_and_other_sharing_are_noticed(tmp_path: Path) -> None:
    seen = run_program(OTHER_METADATA, tmp_path / "cache", timeout=600)
    assert seen["right"] == []
    assert seen["hits"] > 5


def test_no_other_way_to_a_tensor_of_the_module_is_overlooked(tmp_path: Path) -> None:
    seen = run_program(WAYS, tmp_path / "cache", timeout=600)
    assert seen["wrong"] == []
    kept = {"by a tuple", "by a dict", "by a function", "is another"}
    assert {name for name, hits in seen["hits"].items() if hits} >= kept, seen["hits"]
