"""Modules whose weights are computed by the hooks of `weight_norm` and `spectral_norm`."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, warnings, torch, eagercache
from torch import nn
from torch.nn.utils import remove_weight_norm, spectral_norm, weight_norm
from eagercache.modules.manager import explain_module, manager
warnings.simplefilter("ignore")
torch.set_num_threads(1)

class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = weight_norm(nn.Conv1d(4, 4, 3, padding=1))
        self.last = weight_norm(nn.Conv1d(4, 4, 1))
    def forward(self, x):
        return self.last(torch.relu(self.first(x)) + x).tanh()

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = spectral_norm(nn.Linear(8, 8))
        self.last = spectral_norm(nn.Linear(8, 8), n_power_iterations=2)
    def forward(self, x):
        return self.last(nn.functional.leaky_relu(self.first(x), 0.2)).tanh()

def x(number):
    return torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(number))

def steps(model, begin, count):
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(begin, begin + count):
        answer = model(x(number))
        optimizer.zero_grad()
        answer.square().mean().backward()
        seen.append([answer.detach(), *(p.grad.clone() for p in model.parameters()),
                     *(buffer.clone() for buffer in model.buffers())])
        optimizer.step()
    return seen

def calls(model, begin, count):
    with torch.no_grad():
        return [[model(x(number))] for number in range(begin, begin + count)]

def penalties(model, begin, count):
    seen = []
    for number in range(begin, begin + count):
        given = x(number).requires_grad_()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        model.zero_grad()
        (slope.square().sum() - 1).square().backward()
        seen.append([slope.detach(), *(p.grad.clone() for p in model.parameters()
                                       if p.grad is not None),
                     *(buffer.clone() for buffer in model.buffers())])
    return seen

def hook_of(part):
    return next(iter(part._forward_pre_hooks.values()))

def remove(model):
    remove_weight_norm(model.first)

CHANGES = {
    "dimension": (Waves, lambda model: setattr(hook_of(model.last), "dim", 1)),
    "removed": (Waves, remove),
    "length": (Waves, lambda model: model.first.weight_g.data.mul_(2)),
    "iterations": (Critic, lambda model: setattr(hook_of(model.last), "n_power_iterations", 4)),
    "least": (Critic, lambda model: setattr(hook_of(model.last), "eps", 0.5)),
    "another hook": (Critic, lambda model: model.first.register_forward_pre_hook(
        lambda part, given: (given[0] * 2,))),
}

def compare(kind, use, change=None):
    torch.manual_seed(0)
    its = kind()
    torch.manual_seed(0)
    mine = kind()
    eagercache.disable() if eagercache.is_enabled() else None
    def run(model):
        seen = use(model, 0, 5)
        if change is not None:
            change(model)
            seen += use(model, 5, 5)
        return seen
    expected = run(its)
    eagercache.enable((), modules=[kind], training=True, choose="always", on_miss="wait")
    seen = run(mine)
    right = [all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*both, strict=True))
             for both in zip(expected, seen, strict=True)]
    row = next(row for part, row in manager.stats() if part is mine)
    return {"right": right, "hits": row.hits, "why": explain_module(mine)}

uses = [(kind, use) for kind in (Waves, Critic) for use in (steps, calls, penalties)]
report(seen={f"{kind.__name__} {use.__name__}": compare(kind, use) for kind, use in uses},
       changed={name: compare(kind, steps, change) for name, (kind, change) in CHANGES.items()})
"""


def test_what_norms_compute_before_a_forward_is_part_of_its_kernel(tmp_path: Path) -> None:
    seen = run_program(PROGRAM, tmp_path / "cache", timeout=900)
    for name, found in {**seen["seen"], **seen["changed"]}.items():
        assert all(found["right"]), (name, found)
        assert found["hits"] >= 3, (name, found)
