"""Modules that are called with objects of classes that the script itself defines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import run_program

HERE = str(Path(__file__).parents[1] / "zoos")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the programs."""
    path = tmp_path_factory.mktemp("objects") / "cache"
    path.mkdir(mode=0o700)
    return path


IN_MAIN = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

class Past:
    def __init__(self):
        self.keys = torch.ones(1, 3, 8)

    def update(self, keys):
        self.keys = torch.cat([self.keys, keys], dim=1)
        return self.keys

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, past):
        y = self.second(self.first(x).tanh() + 0.5)
        return y * past.update(y).sum(dim=1, keepdim=True)

model, x = Model(), torch.ones(1, 1, 8)
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    past = [Past() for _ in range(4)]
    answers = [model(x, one) for one in past]
    hits = sum(row.hits for part, row in manager.stats() if part is model)
    lines = explain_module(model)[:1]
report(same=all(torch.allclose(one, answers[0], atol=1e-5) for one in answers), hits=hits,
       lines=lines, lengths=[one.keys.size(1) for one in past])
"""


def test_classes_of_a_script_are_as_good_as_others(store: Path) -> None:
    done = run_program(IN_MAIN, store, timeout=200, fills=True)
    assert done["same"], done["lines"]
    assert done["lengths"] == [4] * 4
    assert done["hits"] >= 1, done["lines"]


DELETED = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).tanh() + getattr(self, "gain", 0.5))

    def speed(self):
        return torch.backends.mkldnn.enabled

Model.gain = 2.0
torch.manual_seed(0)
model, x, rows = Model(), torch.ones(2, 8), []
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for gain in (2.0, 0.5):
        right = [torch.allclose(model(x), model.second(model.first(x).tanh() + gain), atol=1e-5)
                 for _ in range(4)]
        hits = sum(row.hits for part, row in manager.stats() if part is model)
        rows.append([right, hits, explain_module(model)[:1]])
        if gain == 2.0:
            del Model.gain
report(rows=rows)
"""


def test_what_a_script_deletes_of_a_class_is_gone_in_the_worker_too(store: Path) -> None:
    before, after = run_program(DELETED, store, timeout=200, fills=True)["rows"]
    assert all(before[0] + after[0]), (before, after)
    assert 0 < before[1] < after[1], (before, after)


INSIDE = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

class Zoo:
    class Model(torch.nn.Module):
        gain = 2.0

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x).tanh() * Zoo.Model.gain

def made():
    gain = 2.0

    class Model(Zoo.Model):
        def forward(self, x):
            return super().forward(x) + gain

    def change():
        nonlocal gain
        gain = 5.0

    return Model(), change

torch.manual_seed(0)
x, rows = torch.ones(2, 8), []
for model, change in ((Zoo.Model(), lambda: setattr(Zoo.Model, "gain", 3.0)), made()):
    with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
        for step in range(2):
            right = [torch.allclose(model(x), type(model).forward(model, x), atol=1e-5)
                     for _ in range(4)]
            hits = sum(row.hits for part, row in manager.stats() if part is model)
            rows.append([right, hits, explain_module(model)[:1]])
            change()
report(rows=rows)
"""


def test_classes_inside_of_classes_and_functions_have_kernels(store: Path) -> None:
    rows = run_program(INSIDE, store, timeout=200, fills=True)["rows"]
    for before, after in (rows[:2], rows[2:]):
        assert all(before[0] + after[0]), (before, after)
        assert 0 < before[1] < after[1], (before, after)


OF_MAIN = """
import sys
sys.path.insert(0, {here!r})
import collections, dataclasses, enum, functools, typing
import torch, eagercache
from object_world import inside, is_close, parts
from transformers.utils.generic import ModelOutput
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

class Pair(typing.NamedTuple):
    hidden: torch.Tensor
    scale: float = 2.0

    def scaled(self):
        return self.hidden * self.scale

Sides = collections.namedtuple("Sides", "left right", defaults=(3.0,))

class Level(enum.Enum):
    LOW = 1
    HIGH = 2

    @property
    def factor(self):
        return self.value * 0.5

class Number(enum.IntEnum):
    TWO = 2

class Parts(enum.Flag):
    FIRST = enum.auto()
    SECOND = enum.auto()

@dataclasses.dataclass(slots=True)
class State:
    keys: torch.Tensor
    calls: int = 0

@dataclasses.dataclass
class Plain:
    y: torch.Tensor
    level: Level = Level.LOW

@dataclasses.dataclass
class Output(ModelOutput):
    y: torch.Tensor = None
    more: torch.Tensor = None

class Config:
    def __init__(self):
        self.width = 3.0

    @functools.cached_property
    def twice(self):
        return self.width * 2.0

class Holder:
    def __init__(self, **held):
        vars(self).update(held)

CONFIG = Config()
CONFIG.twice

class Model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.name = name

    def forward(self, x, box=None):
        return getattr(self, self.name)(self.second(self.first(x).tanh() + 0.5), box)

    def named(self, y, box):
        return Pair(y + box.scaled() + box[0], box.scale), box, [Sides(y.relu())]

    def members(self, y, box):
        y = y * box.level.factor * int(box.number)
        if box.parts & Parts.SECOND:
            y = y.relu() + 1.0
        box.level = Level.HIGH
        return y, {{"level": Level.HIGH}}

    def slots(self, y, box):
        box.keys = torch.cat([box.keys, y], dim=1)
        box.calls += 1
        return y * box.keys.sum(dim=1, keepdim=True), box, State(y + 1.0)

    def output(self, y, box):
        return Output(y=(y * 2.0).relu())

    def plain(self, y, box):
        return Plain((y * 2.0).relu(), Level.HIGH)

    def cached(self, y, box):
        return (y * box.width).relu()

    def cached_of_its_own(self, y, box):
        return (y * CONFIG.twice).relu()

def outcome(model, x, make):
    args = (x, make()) if make is not None else (x,)
    return inside(model(*args), list(parts(args))), inside(args)

calls = dict(
    named=lambda: Pair(torch.ones(1, 2, 8)),
    members=lambda: Holder(level=Level.LOW, number=Number.TWO, parts=Parts.SECOND),
    slots=lambda: State(torch.ones(1, 3, 8)),
    output=None,
    plain=None,
    cached=Config,
    cached_of_its_own=None,
)
x, rows = torch.linspace(-1, 1, 16).view(1, 2, 8), {{}}
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss={on_miss!r}, choose="always"):
    for name, make in calls.items():
        torch.manual_seed(0)
        model, wrong = Model(name), []
        for turn in range(4):
            mine = outcome(model, x, make)
            core.set_answering(False)
            eager = outcome(model, x, make)
            core.set_answering(True)
            if not is_close(mine, eager):
                wrong.append([turn, str(mine)[:300], str(eager)[:300]])
        hits = sum(row.hits for part, row in manager.stats() if part is model)
        rows[name] = [hits, wrong, explain_module(model)[:1]]
report(rows=rows)
"""


@pytest.fixture(scope="module")
def rows(store: Path) -> list[dict[str, Any]]:
    """Hits, wrong answers and the explanation of each; of a second process, too."""
    first = OF_MAIN.format(here=HERE, on_miss="wait")
    second = OF_MAIN.format(here=HERE, on_miss="native")
    return [
        run_program(first, store, timeout=500, fills=True)["rows"],
        run_program(second, store, timeout=200)["rows"],
    ]


@pytest.mark.parametrize(
    "name", ["named", "members", "slots", "output", "plain", "cached", "cached_of_its_own"]
)
def test_objects_of_a_script_are_answered_and_made(name: str, rows: list[dict[str, Any]]) -> None:
    for hits, wrong, lines in (found[name] for found in rows):
        assert not wrong, (wrong, lines)
        assert hits >= 2, lines
