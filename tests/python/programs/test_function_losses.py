"""Operators made of functions whose losses pick by labels."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

LOSSES = """
import torch, eagercache
from torch import Tensor
from torch.nn import functional
torch.manual_seed(0)
@eagercache.op("demo::rows", autograd=False)
def rows(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores * 0.5, labels)
@eagercache.op("demo::pictures", autograd=False)
def pictures(scores: Tensor, labels: Tensor) -> Tensor:
    pictures = scores.unflatten(0, (4, 2)).mT * 0.5
    return functional.cross_entropy(pictures, labels.unflatten(0, (4, 2)))
def outcome(call, scores, labels):
    try:
        return float(call(scores, labels))
    except (IndexError, RuntimeError) as error:
        return type(error).__name__
scores, labels = torch.randn(8, 5), torch.randint(5, (8,))
found = {}
with eagercache.enable((), on_miss="wait", choose="always"):
    for call in (rows, pictures):
        call(scores, labels)
        for value in (0, 4, -100, -1, 5):
            changed = labels.clone()
            changed[3] = value
            before = eagercache.stats().hits
            mine = outcome(call, scores, changed)
            hits = eagercache.stats().hits - before
            native = outcome(call.function, scores, changed)
            same = mine == native or abs(mine - native) < 1e-5
            found[f"{call.name} {value}"] = [same, hits]
    reasons = [f"{k.op} {k.decision} {k.reason}" for k in eagercache.kernels()]
report(found=found, reasons=reasons)
"""


def test_labels_are_looked_at_before_a_call(tmp_path: Path) -> None:
    seen = run_program(LOSSES, tmp_path / "cache", fills=True)
    assert seen["found"] == {
        f"demo::{name} {value}": [True, int(0 <= value < 5)]
        for name in ("rows", "pictures")
        for value in (0, 4, -100, -1, 5)
    }, seen["reasons"]
