"""Runs the cases of `layer_zoo` in a program of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import run_program

HERE = str(Path(__file__).parent)

# Each case of a zoo: hits, whether an answer was not eager's, and the explanation.
_ALL_CASES = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, layer_zoo
from torch.utils import _pytree as pytree
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

def outcome(model, args, training):
    model.zero_grad()
    torch.manual_seed(3)
    before = [value._version for value in model.buffers()]
    with torch.set_grad_enabled(training):
        answer = model(*args)
    moves = [value._version - was for value, was in zip(model.buffers(), before, strict=True)]
    tensors = [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
    if training:
        sum(t.square().sum() for t in tensors if t.requires_grad).backward()
        tensors += [p.grad for p in model.parameters()]
    tensors += [value.clone() for value in model.buffers()]
    return [*tensors, torch.tensor(moves)]

def is_close(a, b):
    if a is None or b is None:
        return a is b
    same = a.requires_grad == b.requires_grad and a.shape == b.shape and a.stride() == b.stride()
    return same and torch.allclose(a, b, rtol=1e-4, atol=1e-4)

rows = {{}}
for training in (False, True):
    with eagercache.enable((), modules="auto", training=training, on_miss="wait", choose="always"):
        for name, (make, arguments) in layer_zoo.{cases}.items():
            torch.manual_seed(1)
            model, args, wrong = make().train(training), arguments(), 0
            for _ in range(4):
                before = {{name: value.clone() for name, value in model.named_buffers()}}
                mine = outcome(model, args, training)
                with torch.no_grad():
                    for name_of, value in model.named_buffers():
                        value.copy_(before[name_of])
                core.set_answering(False)
                eager = outcome(model, args, training)
                core.set_answering(True)
                wrong += not all(map(is_close, mine, eager))
            hits = sum(row.hits for part, row in manager.stats() if part is model)
            rows[f"{{name}}, {{training}}"] = [hits, wrong, explain_module(model)[:1]]
report(rows=rows)
"""


def run_all_cases(cases: str, store: Path) -> dict[str, Any]:
    """What came of each case of the zoo's table ``cases``: (hits, wrong answers, lines)."""
    program = _ALL_CASES.format(here=HERE, cases=cases)
    rows = run_program(program, store, timeout=500, fills=True)["rows"]
    assert isinstance(rows, dict)
    return rows
