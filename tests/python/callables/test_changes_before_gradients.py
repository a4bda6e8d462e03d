"""Gradients of gradients, of calls after which the module was changed."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import run_program

CHANGES = """
import torch, eagercache
from eagercache.callables.module_gradient import forwards_alone
from eagercache.modules.manager import explain_module, manager
from torch.func import functional_call
torch.set_num_threads(1)

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.norm, self.drop = torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.25)
        self.activation = torch.tanh
    def forward(self, x):
        return self.second(self.drop(self.activation(self.norm(self.first(x)))))

class Normed(Layers):  # of a batch norm newer torch has no third derivatives
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)

class Derived(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Parameter(torch.randn(4, 8))
        self.weight = self.base * 2  # a tensor that is computed from a parameter
    def forward(self, x):
        return (x @ self.weight.t()).tanh() + (x @ self.base.t()).sin()

def gradients(answer, ways):
    firsts = torch.autograd.grad(answer.pow(2).sum(), ways, create_graph=True, allow_unused=True)
    total = sum(g.pow(2).sum() for g in firsts if g is not None)
    return [*firsts, *torch.autograd.grad(total, ways, allow_unused=True)]

def unchanged(model, call, x):
    return gradients(call(model, x), [x, *model.parameters()])
def fast_weights(model, call, x):
    own = dict(model.named_parameters())
    fast = own
    for _ in range(2):
        loss = functional_call(model, fast, (x,)).pow(2).sum()
        steps = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: p - 0.01 * g for (name, p), g in zip(fast.items(), steps)}
    answer = functional_call(model, fast, (x,))
    return gradients(answer, [x, *own.values()])
def evaluated(model, call, x):
    answer = call(model, x)
    return gradients(answer, [x, *model.eval().parameters()])
def other_function(model, call, x):
    answer = call(model, x)
    model.activation = torch.sigmoid
    return gradients(answer, [x, *model.parameters()])
def other_layer(model, call, x):
    answer, ways = call(model, x), [x, *model.parameters()]
    model.second = torch.nn.Linear(16, 2)
    return gradients(answer, ways)
def other_parameters(model, call, x):
    answer, ways = call(model, x), [x, *model.parameters()]
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    return gradients(answer, ways)
def frozen(model, call, x):
    answer = call(model, x)
    model.requires_grad_(False)
    answer.pow(2).sum().backward(create_graph=True)
    return [x.grad, *(p.grad for p in model.parameters())]
def unfrozen(model, call, x):
    model.first.requires_grad_(False)
    call(model, x)
    answer = call(model, x)
    model.first.requires_grad_(True)
    return gradients(answer, [x, *model.parameters()])
def argument_frozen(model, call, x):
    answer = call(model, x)
    x.requires_grad_(False)
    answer.pow(2).sum().backward(create_graph=True)
    return [x.grad, *(p.grad for p in model.parameters())]
def hooked(model, call, x):
    answer = call(model, x)
    model.first.register_forward_hook(lambda module, given, made: made * 2)
    return gradients(answer, [x, *model.parameters()])
def gradient_hooks(model, call, x):
    for tensor in (x, model.first.weight):
        tensor.register_hook(lambda gradient: gradient * 3)
    call(model, x).pow(2).sum().backward(create_graph=True)
    return [x.grad, *(p.grad for p in model.parameters())]
def batched(model, call, x):
    answer, ways = call(model, x), [x, *model.parameters()]
    model.eval()
    cotangents = torch.arange(72.0).view(3, 6, 4).sin()
    return torch.autograd.grad(answer, ways, cotangents, is_grads_batched=True)
def derived(model, call, x):
    weight, ways = model.weight, [x, model.base]
    answer = call(model, x)
    model.weight = model.base * 5
    return [*gradients(answer, ways), *gradients(call(model, x), [*ways, model.weight])]

SCALE = 2.0
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.layer(x).tanh() * SCALE
def other_value(model, call, x):
    global SCALE
    answer = call(model, x)
    SCALE = 3.0
    try:
        return gradients(answer, [x, *model.parameters()])
    finally:
        SCALE = 2.0

def outcome(change, model, call):
    torch.manual_seed(3)
    x = torch.randn(6, 8, requires_grad=True)
    try:
        found = [g.detach() for g in change(model, call, x) if g is not None]
    except Exception as error:
        return repr(error), []
    return "", [*found, *(b.clone() for b in model.buffers()), torch.get_rng_state()]

def hits(model):
    return sum(found.training_hits for part, found in manager.stats() if part is model)

def row(change):
    models = [KINDS.get(change, Layers)() for _ in range(2)]
    for _ in range(3):
        models[0](torch.randn(6, 8, requires_grad=True)).sum().backward(retain_graph=True)
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.zero_grad()
        if change is derived:
            model.weight = model.base * 2
    before = hits(models[0])
    said, mine = outcome(change, models[0], lambda module, x: module(x))
    taken = hits(models[0]) - before
    with forwards_alone():
        its_said, its = outcome(change, models[1], lambda module, x: module(x))
    # A gradient that is 0 but for rounding (of a bias before a norm) is as far off as others are.
    off = 1e-4 + 1e-6 * max((b.abs().max().item() for b in its if b.is_floating_point()), default=0)
    alike = len(mine) == len(its) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=off)
        for a, b in zip(mine, its))
    return [alike, said, its_said, len(its), taken, explain_module(models[0])]

KINDS = {derived: Derived, other_value: Scaled, fast_weights: Normed}
changes = [unchanged, fast_weights, evaluated, other_function, other_layer, other_parameters,
           frozen, unfrozen, argument_frozen, hooked, gradient_hooks, batched, derived, other_value]
with eagercache.enable(ops=(), modules="auto", training=True, on_miss="wait", choose="always"):
    report(rows={change.__name__: row(change) for change in changes})
"""
NAMES = [
    *("unchanged", "fast_weights", "evaluated", "other_function", "other_layer"),
    *("other_parameters", "frozen", "unfrozen", "argument_frozen", "hooked"),
    *("gradient_hooks", "batched", "derived"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program found that changes modules."""
    store = tmp_path_factory.mktemp("changes") / "cache"
    store.mkdir(mode=0o700)
    found: dict[str, Any] = run_program(CHANGES, store, timeout=500, fills=True)["rows"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_that_is_run_again_is_the_one_of_the_call(
    name: str, rows: dict[str, Any]
) -> None:
    alike, mine, its, count, hits, lines = rows[name]
    assert mine == its == "", lines
    assert alike and count > 0
    assert hits > 0, lines


def test_a_value_that_the_forward_reads_is_not_taken_for_what_it_was(rows: dict[str, Any]) -> None:
    _, mine, its, _, hits, lines = rows["other_value"]
    assert hits == 1, lines
    assert its == "" and "was changed between its call" in mine
