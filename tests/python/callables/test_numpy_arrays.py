"""Modules that keep arrays of numpy: constants of their kernels, for as long as they are such."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, numpy as np, torch, eagercache, warnings
from eagercache.modules.manager import explain_module
from torch import nn
warnings.simplefilter("ignore")
SCALES = np.array([0.5, 2.0])

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table = np.linspace(0.0, 1.0, 8, dtype=np.float32)

class Table(Layer):
    def forward(self, x):
        return self.layer(x).sin() * torch.from_numpy(self.table).to(x.dtype)

class Held:
    def __init__(self):
        self.sizes = np.array([[2, 4], [4, 2]])

class Nested(Layer):  # in a list, a tuple, a dict and an object, and numpy computes with them
    kinds = np.array([1.0, 3.0])
    def __init__(self):
        super().__init__()
        self.steps, self.pair = [np.arange(3), 2], (np.array([0.25]), np.ones((2, 2)))
        self.named, self.held = {"shift": np.float64([0.5, 1.5])}, Held()
    def forward(self, x):
        rows, columns = self.held.sizes[int(self.steps[0][1])]
        x = self.layer(x).view(-1, int(rows), int(columns)).cos().flatten(1)
        x = x * float((self.pair[0] * self.pair[1].sum()).mean()) + self.named["shift"].tolist()[1]
        for step in self.steps[0] ** 2:
            x = x + float(step)
        return x * float(np.sqrt(self.named["shift"]).max())

class Shared(Nested):  # under other names, too
    def forward(self, x):
        return self.layer(x).exp() * float(self.kinds[1] * SCALES[0])

class Returned(Layer):
    def forward(self, x):
        return self.layer(x), torch.from_numpy(self.table)[:2]

class Written(Layer):  # what is there already
    def forward(self, x):
        table = torch.from_numpy(self.table)
        table[0] = 0.0
        return self.layer(x) * table

class Assigned(Written):
    def forward(self, x):
        self.table[1] = 0.5
        return self.layer(x) * torch.from_numpy(self.table)

def resize(module):
    module.table.resize(9)  # numpy raises where somebody else refers to it
    module.table.resize(8)

def readonly(module):
    module.table.flags.writeable = False

CHANGES = {
    "Table": [
        lambda m: m.table.__setitem__(3, 7.0),
        lambda m: m.table.__setitem__(3, -0.0),
        lambda m: m.table.fill(np.nan),
        lambda m: setattr(m, "table", np.arange(8, dtype=np.float32)),
        resize,
        lambda m: setattr(m, "table", np.arange(8, dtype=np.float64)),
        lambda m: setattr(m, "table", np.arange(16.0)[::2]),
        lambda m: setattr(m, "table", np.arange(16.0).reshape(2, 8)[1:]),
        readonly,
        lambda m: vars(m).__setitem__("table", np.full(8, 3.0)),
        lambda m: setattr(m, "table", np.array(2, dtype=np.int64)),
    ],
    "Nested": [
        lambda m: m.steps[0].__setitem__(1, 0),
        lambda m: m.steps.__setitem__(0, np.arange(4) % 2),
        lambda m: m.pair[0].__imul__(3),
        lambda m: m.pair[1].fill(0.5),
        lambda m: m.named["shift"].sort(),
        lambda m: m.named.update(shift=np.float32([0.5, 2.5])),
        lambda m: m.held.sizes.__setitem__(slice(None), [[8, 1], [1, 8]]),
        lambda m: setattr(m.held, "sizes", np.int32([[1, 8], [2, 4]])),
        lambda m: setattr(m, "pair", (np.array([1.25]), np.ones((2, 2)))),
    ],
    "Shared": [
        lambda m: type(m).kinds.__setitem__(1, 5.0),
        lambda m: SCALES.__setitem__(0, 4.0),
        lambda m: setattr(Nested, "kinds", np.array([2.0, 2.5])),
        lambda m: globals().update(SCALES=np.array([8.0])),
        lambda m: m.steps.__setitem__(0, SCALES),
        lambda m: globals().update(SCALES=np.array([16.0])),
    ],
}

def flat(answer):
    return torch.cat([part.flatten() for part in answer]) if isinstance(answer, tuple) else answer

def same(module, other, trains):
    one, two = (torch.ones(4, 8, requires_grad=trains) for _ in range(2))
    outcomes = []
    for each, x in ((module, one), (other.forward, two)):
        try:
            with torch.set_grad_enabled(trains):
                outcomes.append(flat(each(x)))
        except Exception as error:
            outcomes.append(type(error))
    a, b = outcomes
    if isinstance(a, type) or isinstance(b, type):
        return a is b
    equal = torch.allclose(a, b, atol=1e-5, equal_nan=True) and a.dtype == b.dtype
    if trains:
        a.sum().backward()
        b.sum().backward()
        pairs = zip([one, *module.parameters()], [two, *other.parameters()])
        equal = equal and all(torch.allclose(p.grad, q.grad, equal_nan=True) for p, q in pairs)
        module.zero_grad(), other.zero_grad()
    return equal

seen = {}
for kind in (Table, Nested, Shared, Returned, Written, Assigned):
    torch.manual_seed(0)
    module = kind()
    other, checked = copy.deepcopy(module), []
    with eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"):
        for trains in (False, True):
            checked += [same(module, other, trains) for _ in range(3)]
        line = explain_module(module)[0]
        for change in CHANGES.get(kind.__name__, ()):
            change(module)
            change(other)
            checked += [same(module, other, trains) for trains in (False, True, False)]
        hits = explain_module(module)[0]
    seen[kind.__name__] = [checked, line, hits]
report(seen=seen)
"""


def test_an_array_is_a_constant_that_is_compared_before_each_call(cache: Path) -> None:
    for _ in range(2):  # the second process finds the kernels of the first
        seen = run_program(PROGRAM, cache, timeout=1200, fills=True)["seen"]
        for kind, (checked, line, hits) in seen.items():
            assert all(checked), (kind, checked, line, hits)
        for kind in ("Table", "Nested"):
            assert "refused" not in seen[kind][1], seen[kind]
            assert "with gradients" in seen[kind][1], seen[kind]
        assert "returns" in seen["Returned"][1], seen["Returned"]
        assert "writes into an array" in seen["Written"][1], seen["Written"]
        assert ": 0 by kernel" in seen["Assigned"][1], seen["Assigned"]
