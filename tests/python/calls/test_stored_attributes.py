"""Tensors that a forward leaves in attributes of modules: kernels leave theirs there."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

MODELS = """
import copy, torch, eagercache
from torch import nn
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

class State(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.state = None
        self.register_buffer("average", torch.zeros(4, 8))
    def forward(self, x):
        if self.state is None:
            self.state = torch.zeros(4, 8)
        self.state = torch.tanh(self.inner(x) + self.outer(self.state))
        self.average = self.average * 0.9 + self.state.detach()
        return self.state * 2

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.weights = nn.Linear(8, 8), nn.Linear(8, 8), None
    def forward(self, x):
        self.weights = torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2), -1)
        return self.weights @ x

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = Attention(), Attention(), nn.LayerNorm(8)
    def forward(self, x):
        return self.second(self.norm(self.first(x)))

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.width, self.loss = nn.Linear(8, 4), nn.Linear(8, 4), torch.zeros(())
        self.large = False
    def forward(self, x):
        mean, width = self.mean(x), self.width(x)
        self.loss = (mean * mean + width.exp() - width).mean()
        self.large = x.shape[0] > 4
        return torch.tanh(mean + width.exp())

class Same(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.seen = nn.Linear(8, 8), torch.zeros(4, 8)
    def forward(self, x):
        self.seen = torch.tanh(self.body(x)) * 3
        return self.seen

class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.given, self.made = nn.Linear(8, 8), torch.zeros(4, 8), torch.zeros(4, 8)
    def forward(self, x, before=None):
        self.given = x
        self.made = self.body(x).tanh().exp()
        return self.made * 2 if before is None else self.made + before

class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kept, self.part = nn.Linear(8, 8), None, None
    def forward(self, x):
        made = self.body(x).tanh() * 3
        self.kept, self.part = made.detach(), made[:2]
        return {"made": made, "again": made.detach()}

class Givens(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Given(), Given()
    def forward(self, x):
        return self.second(self.first(x), x)

def x(number, *sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(number))

def plain(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value

def left(model):
    found = {}
    for part in model.modules():
        for name, value in {**vars(part), **part._buffers}.items():
            if not name.startswith("_"):
                found[f"{len(found)} {name}"] = (plain(value), getattr(value, "requires_grad", 0))
    return found

def slopes(model):
    return [plain(p.grad) for p in model.parameters() if p.grad is not None]

def alike(a, b):
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.size(), a.stride()) == (b.dtype, b.size(), b.stride()) and (
            torch.allclose(a, b, rtol=1e-4, atol=1e-5))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    return alike([*a.items()], [*b.items()]) if isinstance(a, dict) else a == b

def compare(kind, use):
    torch.manual_seed(0)
    its = kind()
    mine = copy.deepcopy(its)
    eagercache.disable() if eagercache.is_enabled() else None
    expected = use(its)
    eagercache.enable((), modules=[kind], training=True, choose="always", on_miss="wait")
    seen = use(mine)
    rows = [row for part, row in manager.stats() if part is mine]
    wrong = [number for number, (a, b) in enumerate(zip(seen, expected)) if not alike(a, b)]
    return {"wrong": wrong, "calls": len(seen), "hits": sum(row.hits for row in rows),
            "trained": sum(row.training_hits for row in rows), "why": explain_module(mine)}
"""

INFERENCE = (
    MODELS
    + """
def calls(model):
    seen = []
    with torch.no_grad():
        for number in range(9):
            given = x(number, 2, 4, 8) if isinstance(model, Layers) else x(number, 4, 8)
            answer = model(given)
            if isinstance(model, Detached):
                answer["made"].add_(1)
                assert torch.equal(answer["again"], model.kept)
                assert answer["again"]._version == answer["made"]._version
                answer = answer["again"]
            seen.append((plain(answer), left(model)))
            if isinstance(model, Same):
                assert answer is model.seen
            if isinstance(model, (Given, Givens)):
                assert getattr(model, "first", model).given is given
            if number == 5 and isinstance(model, State):
                model.state = None
    return seen

def sizes(model):
    seen = []
    with torch.no_grad():
        for number in range(24):
            answer = model(x(number, (5, 6, 7, 8, 9, 3, 10, 2)[number % 8], 8))
            seen.append((plain(answer), left(model)))
    return seen

kinds = (State, Layers, Encoder, Same, Given, Givens, Detached)
seen = {kind.__name__: compare(kind, calls) for kind in kinds}
report(seen={**seen, "sizes": compare(Encoder, sizes)})
"""
)

TRAINING = (
    MODELS
    + """
def steps(model):
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(7):
        answer = model(x(number, 2, 4, 8) if isinstance(model, Layers) else x(number, 4, 8))
        loss = answer.square().mean()
        if isinstance(model, Encoder):
            loss = loss + model.loss
        if isinstance(model, Layers):
            loss = loss + model.second.weights.std() + (model.first.weights.var() * (number % 2))
        if isinstance(model, Givens):
            loss = loss + model.second.given.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        seen.append((plain(answer), left(model), slopes(model)))
        optimizer.step()
    return seen

def through_time(model):
    seen = []
    for number in range(5):
        model.zero_grad()
        model.state = torch.zeros(4, 8)
        sum(model(x(3 * number + step, 4, 8)).square().mean() for step in range(3)).backward()
        seen.append((left(model), slopes(model)))
        model.state = model.state.detach()
    return seen

def alone(model):
    seen = []
    for number in range(5):
        model.state = torch.zeros(4, 8)
        model(x(number, 4, 8))
        model.zero_grad()
        model.state.square().sum().backward()
        seen.append(slopes(model))
    return seen

def twice(model):
    seen = []
    for number in range(5):
        model.state = torch.zeros(4, 8)
        given = x(number, 4, 8).requires_grad_()
        answer = model(given)
        kept = model.state
        slope, = torch.autograd.grad(answer.square().sum() + kept.sum(), given, create_graph=True)
        model.zero_grad()
        slope.square().sum().backward()
        assert model.state is kept
        seen.append((plain(slope), slopes(model)))
    return seen

seen = {kind.__name__: compare(kind, steps) for kind in (Layers, Encoder, Same, Given, Givens)}
seen |= {use.__name__: compare(State, use) for use in (through_time, alone, twice)}
report(seen=seen)
"""
)

LEFT = (
    MODELS
    + """
class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kept = nn.Linear(8, 8), torch.zeros(0, 8)
    def forward(self, x):
        self.kept = torch.cat([self.kept, self.body(x)])
        return self.kept.sum(0).tanh()

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.count = nn.Linear(8, 8), 0
    def forward(self, x):
        self.count += 1
        return (self.body(x) * self.count).tanh()

class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.parts = nn.Linear(8, 8), []
    def forward(self, x):
        self.parts = [self.body(x)]
        return self.parts[0].tanh()

class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.rows = nn.Linear(8, 8), 0
    def forward(self, x):
        self.rows = x.shape[0]
        return self.body(x).tanh().exp()

def calls(model):
    seen = []
    with torch.no_grad():
        for number in range(9):
            answer = model(x(number, 4, 8))
            found = {name: value for name, value in left(model).items() if "parts" not in name}
            seen.append((plain(answer), found, [*map(plain, getattr(model, "parts", ()))]))
    return seen

def rows(model):
    seen = []
    with torch.no_grad():
        for number in range(30):
            seen.append((plain(model(x(number, 2 + number % 7, 8))), model.rows))
    return seen

seen = {kind.__name__: compare(kind, calls) for kind in (Grows, Counts, Lists)}
report(seen={**seen, "Notes": compare(Notes, rows)})
"""
)


def test_what_a_forward_assigns_is_there_after_a_kernels_call(tmp_path: Path) -> None:
    seen = run_program(INFERENCE, tmp_path / "cache", timeout=600)["seen"]
    for name, found in seen.items():
        assert found["wrong"] == [], (name, found)
    for name in ("State", "Layers", "Encoder", "Same", "Given", "Givens", "Detached"):
        assert seen[name]["hits"] >= 5, (name, seen[name])
    # Other sizes assign other things: kernels of some sizes alone answer.
    assert seen["sizes"]["hits"] >= 4, seen["sizes"]


def test_gradients_go_through_what_a_forward_assigns(tmp_path: Path) -> None:
    seen = run_program(TRAINING, tmp_path / "cache", timeout=600)["seen"]
    for name, found in seen.items():
        assert found["wrong"] == [], (name, found)
        assert found["trained"] >= found["calls"] - 2, (name, found)


def test_forwards_that_leave_another_module_behind_answer_themselves(tmp_path: Path) -> None:
    seen = run_program(LEFT, tmp_path / "cache", timeout=600)["seen"]
    for name, found in seen.items():
        assert found["wrong"] == [], (name, found)
    for name in ("Grows", "Counts", "Lists"):
        assert seen[name]["hits"] == 0, (name, seen[name])
