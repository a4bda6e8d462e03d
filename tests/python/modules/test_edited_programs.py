"""A program that was edited never meets the kernels of the program before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import run_program

pytestmark = pytest.mark.once

PROGRAM = """
import torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager

TABLE = {"scale": [2.0]}

class Scaled(torch.nn.Module):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)

    def forward(self, x, power=1.5):
        return (self.dense(x) * TABLE["scale"][0] * self.gain).abs().pow(power).tanh()

torch.set_num_threads(1)
torch.manual_seed(0)
model, x = Scaled().eval(), torch.randn(8, 16)
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for _ in range(3):
        answer = model(x)
    core.set_answering(False)
    expected = model(x)
    hits = [row.hits for part, row in manager.stats() if part is model]
report(hits=hits, right=torch.allclose(answer, expected, atol=1e-5),
       compiles=eagercache.stats().compiles, lines=explain_module(model))
"""


def test_kernels_hold_the_constants_of_the_program_that_runs(cache: Path) -> None:
    first = run_program(PROGRAM, cache, fills=True)
    assert first["hits"] == [2] and first["right"] and first["compiles"] == 1, first
    # One is a part of the module's identity, the other is compared before a kernel is used.
    for old, new in (("gain = 1.0", "gain = 4.0"), ('"scale": [2.0]', '"scale": [3.0]')):
        edited = run_program(PROGRAM.replace(old, new), cache, fills=True)
        assert edited["right"], (old, edited)
        assert edited["hits"] == [2] and edited["compiles"] == 1, (old, edited)


TALKATIVE = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager

VERBOSE = True

class Talkative(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)

    def forward(self, x):
        x = self.dense(x).relu()
        if VERBOSE:
            print("norm", float(x.norm()))
        return x * 2

torch.set_num_threads(1)
model, x = Talkative().train(GRADIENTS), torch.randn(8, 16)
with torch.set_grad_enabled(GRADIENTS), eagercache.enable(
    (), modules="auto", training=True, on_miss="wait", choose="always"
):
    for _ in range(3):
        model(x)
    hits = [row.hits for part, row in manager.stats() if part is model]
    lines = [str(line) for line in explain_module(model)]
report(hits=hits, asked=eagercache.stats().compiles > 0, lines=lines)
"""


@pytest.mark.parametrize("gradients", [False, True])
def test_a_refusal_is_for_the_values_that_it_was_found_with(cache: Path, gradients: bool) -> None:
    talkative = TALKATIVE.replace("GRADIENTS", str(gradients))
    for asked in (True, False):  # it is kept for the next run with these values
        loud = run_program(talkative, cache, fills=True)
        assert loud["hits"] == [0] and loud["asked"] == asked, loud
        assert "it prints" in loud["lines"][0], loud
    for asked in (True, False):
        quiet = run_program(talkative.replace("= True", "= False", 1), cache, fills=True)
        assert quiet["hits"][0] > 0 and quiet["asked"] == asked, quiet
    loud = run_program(talkative, cache, fills=True)
    assert loud["hits"] == [0], loud


SETS = """
import torch, eagercache
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager

WORDS = {"a", "b", "c", "d", "e"}
NUMBERS = set()

PARTS

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(8, 16)

def run(model):
    for _ in range(3):
        answer = model(x)
    core.set_answering(False)
    expected = model(x)
    core.set_answering(True)
    return torch.allclose(answer, expected, atol=1e-5)

found = []
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for kind in KINDS:
        model, right = kind().eval(), []
        for members in ((0, 8), (8, 0), (1,), (True,)):
            NUMBERS.clear()
            for member in members:  # 0 and 8 collide, so that the first of them stays the first
                NUMBERS.add(member)
            right.append(run(model))
            if members == (0, 8):
                hits = sum(row.hits for part, row in manager.stats() if part is model)
                lines = str(explain_module(model))
        found.append({"right": right, "hits": hits, "lines": lines})
report(found=found)
"""
PART = """
class Part{index}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)

    def forward(self, x):
        y, number = self.dense(x).tanh(), 0.0
        {read}
        return (y * 2 + number).sigmoid()
"""
# What a forward does, and whether its calls have a kernel.
READS = [
    ("number = id(type(self)) % 997 / 997", False),
    ("number = 'word'.__hash__() % 997 / 997", False),
    ("number = sum(map(ord, repr(torch.relu)[-7:])) / 500", False),
    ("for word in WORDS: number = number * 0.5 + ord(word) - 96", False),
    ("for member in NUMBERS: number = number * 0.5 + (5 if member is True else member)", False),
    ("for word in {'a', 'b', 'c'}: number = number * 0.5 + ord(word) - 96", False),
    ("number = float(next(iter(NUMBERS)))", False),
    ("y = torch.cat([y * len(word) for word in {'aa', 'b'}])[:8]", False),
    ("for word in {'aa', 'b', 'ccc'}: y = (y + len(word)).sin()", False),
    # One line, and two sets: each may have any order.
    ("kept = {a + b: y for a in {'a', 'b'} for b in {'c', 'd'}}; y = kept['ac'] * 2", False),
    ("kept = {word: y * len(word) for word in {'aa', 'b'}}; y = kept['aa'] - kept['b']", True),
    ("kept = {n: y * n for n in NUMBERS}; y = kept[max(kept)] * 0.1", True),
    ("for word in sorted(WORDS): number = number * 0.5 + ord(word) - 96", True),
    ("number = len(WORDS - {'a'}) + ('b' in WORDS) + (8 in NUMBERS)", True),
]


@pytest.fixture(scope="module")
def by_seed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What became of each of READS, by the seed of the hashes of words; on one store."""
    store = tmp_path_factory.mktemp("sets") / "cache"
    store.mkdir(mode=0o700)
    parts = [PART.format(index=index, read=read) for index, (read, _) in enumerate(READS)]
    kinds = ", ".join(f"Part{index}" for index in range(len(READS)))
    text = SETS.replace("PARTS", "".join(parts)).replace("KINDS", f"({kinds})")
    return {
        seed: run_program(text, store, fills=True, PYTHONHASHSEED=seed)["found"] for seed in "123"
    }


@pytest.mark.parametrize("index", range(len(READS)), ids=[read for read, _ in READS])
def test_no_kernel_has_an_order_a_hash_or_an_address(
    by_seed: dict[str, list[dict[str, Any]]], index: int
) -> None:
    _, has_kernel = READS[index]
    for seed in "123":
        found = by_seed[seed][index]
        assert len(found["right"]) == 4 and all(found["right"]), (seed, found)
        assert (found["hits"] > 0) == has_kernel, (seed, found)
        assert has_kernel or "each process" in found["lines"], (seed, found)


IMPORTS = """
import sys
import torch, eagercache
sys.path.insert(0, {here!r})
import importing
from eagercache.modules.manager import explain_module, manager

torch.set_num_threads(1)
model, x = importing.Importing().eval(), torch.ones(2, 8)
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for _ in range(3):
        model(x)
    hits = [row.hits for part, row in manager.stats() if part is model]
    lines = explain_module(model)
report(hits=hits, lines=lines)
"""

IMPORTING = """
import sys
import torch
{more}

class Importing(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2 + 1
"""


def test_what_a_worker_could_not_import_is_tried_again(cache: Path, tmp_path: Path) -> None:
    program, text = IMPORTS.format(here=str(tmp_path)), tmp_path / "importing.py"
    text.write_text(IMPORTING.format(more="if 'eagercache.worker' in sys.modules: import no_such"))
    first = run_program(program, cache, fills=True)
    assert first["hits"] == [0] and "no_such" in str(first["lines"]), first
    text.write_text(IMPORTING.format(more=""))
    second = run_program(program, cache, fills=True)
    assert second["hits"] == [2], second
