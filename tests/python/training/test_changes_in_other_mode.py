"""Programs that go to and fro between training and evaluation, and what they change meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_program

# What is done in one mode, and how it is taken back. The kernel of the other mode is asked next.
CHANGES = {
    "nothing": ("pass", "pass"),
    "attribute": ("model.scale = 3.0", "model.scale = 2.0"),
    "attribute of a part": ("model.part.scale = 3.0", "model.part.scale = 2.0"),
    "inside of an object": ("model.options.value = 3.0", "model.options.value = 2.0"),
    "an equal object and its inside": (
        "model.options = Options(2.0); model.options.value = 3.0",
        "model.options = Options(2.0)",
    ),
    "inside of a list": ("model.numbers[0] = 3.0", "model.numbers[0] = 2.0"),
    "class": ("Part.gain = 3.0", "Part.gain = 2.0"),
    "global": ("GLOBAL = 3.0", "GLOBAL = 2.0"),
    "parameter": (
        "old = model.part.weight; model.part.weight = nn.Parameter(old.detach() * 3.0)",
        "model.part.weight = old",
    ),
    "data of a parameter": ("model.part.weight.data *= 3.0", "model.part.weight.data /= 3.0"),
    "dtype of a buffer": (
        "model.shift = model.shift.double()",
        "model.shift = model.shift.float()",
    ),
    "part": (
        "old = model.part; model.part = Part(3.0); model.part.train(not model.training)",
        "model.part = old",
    ),
    "hook": (
        "hook = model.part.register_forward_hook(lambda *given: given[-1] * 3.0)",
        "hook.remove()",
    ),
    "mode of a part": ("stays = True", "stays = False"),
    "method": ("model.forward = model.other", "del model.forward"),
}

PROGRAM = """
import torch, eagercache
from torch import nn
from eagercache.base.load import core
from eagercache.modules import look_budget
from eagercache.modules.manager import manager
look_budget.SHARE = 1e9  # more changes than any program makes
torch.set_num_threads(1)
torch.manual_seed(0)
GLOBAL = 2.0
stays = False

class Options:
    def __init__(self, value):
        self.value = value

class Part(nn.Linear):
    gain = 2.0
    def __init__(self, scale):
        super().__init__(8, 8)
        self.scale = scale
    def forward(self, x):
        return super().forward(x) * self.scale * self.gain * (1.0 if self.training else 0.5)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.scale = Part(2.0), 2.0
        self.options, self.numbers = Options(2.0), [2.0]
        self.register_buffer("shift", torch.ones(8))
    def forward(self, x):
        y = self.part(x).tanh() * self.scale * self.options.value * self.numbers[0] * GLOBAL
        return y * 2.0 + self.shift if self.training else y + self.shift
    def other(self, x):
        return self.part(x) - 1.0

model, x = Model(), torch.randn(4, 8)

def call(training):
    model.train(training)
    if stays:
        model.part.train(not training)
    if not training:
        with torch.no_grad():
            return [model(x)]
    given = x.clone().requires_grad_(True)
    answer = model(given)
    return [answer.detach(), *torch.autograd.grad(answer.sum(), [given, model.part.weight])]

def eager(training):
    core.set_answering(False)
    answers = call(training)
    core.set_answering(True)
    return answers

def same(training):
    mine, its = call(training), eager(training)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(mine, its))

def row():
    return next(row for part, row in manager.stats() if part is model)

options = dict(ops=(), modules="auto", training=True, choose="always")
eagercache.enable(on_miss="wait", **options)
for number in range(8):
    call(number % 2 == 0)
eagercache.enable(on_miss="native", **options)  # kernels of what it is now, and no others
for number in range(12):
    call(number % 2 == 0)
before = row()
began = before.hits, before.native, sum(before.aside_reasons.values())
for number in range(40):
    call(number % 2 == 0)
after = row()
ended = after.hits, after.native, sum(after.aside_reasons.values())
steps = [one - other for one, other in zip(ended, began)]

seen = []
for name, (change, back) in CHANGES.items():
    for mode in (True, False):
        right = []
        call(mode)
        hits = row().hits
        for _ in range(6):  # kernels of both modes answer
            call(not mode), call(mode)
        answered = row().hits > hits
        exec(change)  # in `mode`
        right += [same(not mode), same(mode), same(not mode)]
        exec(back)
        right += [same(mode), same(not mode)]
        seen.append([name, mode, answered, right])
    # One that was given up for its changes is another one from here on.
    eagercache.enable(on_miss="native", **options)
report(steps=steps, seen=seen)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder: Path = tmp_path_factory.mktemp("modes")
    program = PROGRAM.replace("CHANGES.items()", f"{CHANGES!r}.items()")
    return run_program(program, folder, fills=True)


def test_switches_cost_no_look(seen: dict) -> None:
    assert seen["steps"] == [40, 0, 0], seen["steps"]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_in_the_other_mode_is_noticed(seen: dict, change: str) -> None:
    rows = [row for row in seen["seen"] if row[0] == change]
    assert len(rows) == 2
    for _, mode, answered, right in rows:
        assert answered, (change, mode)
        assert right == [True] * 5, (change, mode)
