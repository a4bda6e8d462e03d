"""Modules that read a number of a tensor and compute with it, as norms that average all batches."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("shift", torch.tensor(0.25, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))
    def forward(self, x):
        share = 1.0 / float(self.count)
        x = self.layer(x) * self.weight.item() - (1.0 - share)
        return x / self.count.item() + (float(self.shift) * 2.0 + 0.5) + share

class Halves(Scaled):  # an integer times a float is another dtype
    def forward(self, x):
        return self.layer(x).long() * self.weight.item() + self.layer(x)

class Branches(Scaled):
    def forward(self, x):
        return self.layer(x) if self.weight.item() > 0 else x

class Both(Scaled):  # a number of two
    def forward(self, x):
        return self.layer(x) * (float(self.shift) * self.weight.item())

class Powers(Scaled):  # Python raises for some
    def forward(self, x):
        return self.layer(x) * self.weight.item() ** -0.5

class Changed(Scaled):  # between two readings
    def forward(self, x):
        first = self.weight.item()
        self.count += 1
        return self.layer(x) * first * float(self.count)

class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(2, 4, 3)
        self.one = nn.BatchNorm1d(4, momentum=None)
        self.two = nn.BatchNorm1d(4, momentum=None, affine=False)
    def forward(self, x):
        return self.two(self.one(self.layer(x)).relu())

def reset(module):
    for norm in (module.one, module.two):
        norm.reset_running_stats()

def momenta(module, *given):
    module.one.momentum, module.two.momentum = given

CHANGES = {
    "Scaled": [
        lambda m: m.weight.data.fill_(-2.0),
        lambda m: m.count.fill_(7),
        lambda m: m.count.fill_(0),
        lambda m: m.count.fill_(-3),
        lambda m: m.count.fill_(1 << 40),
        lambda m: setattr(m, "count", torch.tensor(0)),
        lambda m: setattr(m, "count", torch.tensor(4)),
        lambda m: setattr(m, "count", torch.tensor(4.0)),
        lambda m: setattr(m, "shift", torch.tensor(torch.inf)),
        lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2))),
    ],
    "Norms": [
        lambda m: m.one.num_batches_tracked.fill_(-1),
        reset,
        lambda m: m.two.num_batches_tracked.fill_(1000),
        lambda m: momenta(m, 0.1, None),
        lambda m: momenta(m, None, 0.3),
        lambda m: momenta(m, None, None),
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: setattr(m.one, "track_running_stats", False),
        lambda m: setattr(m.one, "track_running_stats", True),
        lambda m: m.one.running_mean.fill_(torch.nan),
    ],
}

def versions(module):
    return [each._version for each in module.buffers() if each.dtype == torch.int64]

def moved(module, before):
    return [now - then for now, then in zip(versions(module), before)]

def same(module, other, trains):
    data = torch.randn(4, 2, 9) if isinstance(module, Norms) else torch.randn(4, 8)
    one, two = (data.clone().requires_grad_(trains) for _ in range(2))
    before = versions(module), versions(other)
    outcomes = []
    for each, x in ((module, one), (other.forward, two)):
        try:
            with torch.set_grad_enabled(trains):
                outcomes.append(each(x))
        except Exception as error:
            outcomes.append(type(error))
    a, b = outcomes
    if isinstance(a, type) or isinstance(b, type):
        equal = a is b
    else:
        equal = torch.allclose(a, b, atol=1e-5, equal_nan=True) and a.dtype == b.dtype
        if trains:
            for answer in outcomes:
                answer.square().sum().backward()
            for p, q in zip([one, *module.parameters()], [two, *other.parameters()]):
                equal &= (p.grad is None) == (q.grad is None)
                if p.grad is not None:
                    equal &= torch.allclose(p.grad, q.grad, atol=1e-3, equal_nan=True)
            module.zero_grad(), other.zero_grad()
    for p, q in zip(module.buffers(), other.buffers()):
        equal &= torch.allclose(p, q, atol=1e-5, equal_nan=True)
    # Batch norm's operator leaves the versions of its statistics; counters move by one.
    return bool(equal) and moved(module, before[0]) == moved(other, before[1])

seen = {}
for kind in (Scaled, Norms, Halves, Branches, Both, Powers, Changed):
    torch.manual_seed(0)
    module = kind()
    other, checked = copy.deepcopy(module), []
    with eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"):
        for trains in (False, True):
            checked += [same(module, other, trains) for _ in range(4)]
        line = explain_module(module)[0]
        for change in CHANGES.get(kind.__name__, ()):
            with torch.no_grad():
                change(module)
                change(other)
            checked += [same(module, other, trains) for trains in (False, True, True)]
    seen[kind.__name__] = [checked, line]
report(seen=seen)
"""


def test_a_number_that_is_read_is_what_the_tensor_holds(cache: Path) -> None:
    for _ in range(2):  # the second process finds the kernels of the first
        seen = run_program(PROGRAM, cache, timeout=1200, fills=True)["seen"]
        for kind, (checked, line) in seen.items():
            assert all(checked), (kind, checked, line)
        assert "refused" not in seen["Scaled"][1], seen["Scaled"]
        for kind in ("Scaled", "Norms"):
            assert "3 with gradients" in seen[kind][1] or "4 with" in seen[kind][1], seen[kind]
        for kind in ("Halves", "Branches", "Both", "Powers"):
            assert ": 0 by kernel" in seen[kind][1], seen[kind]
