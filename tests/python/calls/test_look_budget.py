"""Looks at modules take a small part of a program's time, however often these change."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program
from eagercache.modules.look_budget import FREE_LOOKS, SECONDS, SHARE, LookBudget

PROGRAM = """
import copy
import torch, eagercache
from torch import nn
from eagercache.base.load import core
from eagercache.modules import look_budget, looks
from eagercache.modules.manager import manager
torch.set_num_threads(1)
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).eval(), torch.randn(4, 8)
parts = nn.Tanh(), nn.Sigmoid()
found, kept, describe = [0], [], looks.described

def counted(module):
    found[0] += module is model
    return describe(module)

looks.described = counted

def step(number):
    model[1] = parts[number % 2]
    with torch.no_grad():
        return model(x)

def hits():
    return sum(row.hits for part, row in manager.stats() if part is model)

core.set_answering(False)
expected = step(0), step(1)
core.set_answering(True)
options = dict(ops=(), modules="auto", choose="always")
eagercache.enable(on_miss="wait", **options)
right = [torch.allclose(step(n), expected[n % 2], rtol=1e-4, atol=1e-6) for n in range(40)]
waited = found[0], hits()  # whoever waits for kernels waits for looks, too
look_budget.SECONDS, look_budget.SHARE = 1e-6, 0.0
eagercache.enable(on_miss="native", **options)
manager._looks._budget = look_budget.LookBudget()
found[0] = 0
right += [torch.allclose(step(n), expected[n % 2], rtol=1e-4, atol=1e-6) for n in range(200)]
spent, answered = found[0], hits()
look_budget.SECONDS, look_budget.SHARE = 1e9, 1e9
for _ in range(4):
    step(0)  # it stays what it is: there is time for a look, and it has its kernel again
again = hits() - answered

# Copies that live for a call: their looks count when they die.
look_budget.SECONDS, look_budget.SHARE = 1e-6, 0.0
manager._looks._budget = look_budget.LookBudget()
looked = set()

def looked_at(module):
    looked.add(id(module))
    return describe(module)

looks.described = looked_at
for _ in range(30):
    other = copy.deepcopy(model)
    with torch.no_grad():
        right.append(torch.allclose(other(x), expected[0], rtol=1e-4, atol=1e-6))
    kept.append(other) if len(kept) < 3 else None
kept_looked = len(looked)
report(right=all(right), waited=waited, spent=spent, again=again, copies=kept_looked)
"""


def test_looks_have_a_share_of_the_time() -> None:
    now = [100.0]
    budget = LookBudget(lambda: now[0])
    assert budget.allows()
    budget.spend(SECONDS / 2)
    assert budget.allows()
    budget.spend(SECONDS)
    assert not budget.allows()
    now[0] += SECONDS / 2 / SHARE * 0.99
    assert not budget.allows()
    now[0] += SECONDS / 2 / SHARE * 0.02
    assert budget.allows()
    now[0] += 1e9  # what is not taken is not kept for ever
    budget.spend(SECONDS * 1.01)
    assert not budget.allows()


def test_a_program_that_changes_its_module_at_each_step_is_left_alone(tmp_path: Path) -> None:
    seen = run_program(PROGRAM, tmp_path, fills=True)
    assert seen["right"], seen
    looks, hits = seen["waited"]
    assert looks > 20 and hits > 20, seen
    assert seen["spent"] == FREE_LOOKS + 1, seen  # the last one took what there was
    assert seen["again"] >= 2, seen
    assert seen["copies"] == 4, seen  # three that live on, and the first that dies
