"""Kernels of whole modules give what single operators give, and leave tangents to the forward."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

HERE = str(Path(__file__).parents[1] / "zoos")

BEGIN = f"""
import sys
sys.path.insert(0, {HERE!r})
import torch, eagercache, module_numerics
from eagercache.modules.manager import manager, explain_module
torch.set_num_threads(1)
eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
def hits(model):
    return sum(row.hits for part, row in manager.stats() if part is model)
"""

NUMERICS = (
    BEGIN
    + """
model, x = module_numerics.Functions(), module_numerics.VALUES
with torch.no_grad():
    model(torch.randn(x.numel()))
    answers = model(x)
    lines = explain_module(model)
    answered = hits(model)
    eagercache.disable()
    natives = module_numerics.Functions()(x)
wrong = []
for place, (mine, native) in enumerate(zip(answers, natives)):
    close = torch.isclose(mine, native, rtol=5e-7, atol=0, equal_nan=True)
    signs = (torch.signbit(mine) == torch.signbit(native)) | native.isnan()
    for number in (~(close & signs)).nonzero().flatten().tolist()[:3]:
        wrong.append((place, float(x[number]), float(mine[number]), float(native[number])))
report(hits=answered, wrong=wrong, lines=lines)
"""
)

TANGENTS = (
    BEGIN
    + """
import torch.autograd.forward_ad as fwd
x, wrong = torch.randn(64), []
with torch.no_grad():
    model = module_numerics.Scaled()
    for _ in range(3):
        model(x)
answered = hits(model)
with torch.no_grad(), fwd.dual_level():
    for name in ("scale", "shift"):
        kept = getattr(model, name)
        setattr(model, name, fwd.make_dual(kept.clone(), torch.ones(64)))
        tangent = fwd.unpack_dual(model(x)).tangent
        expected = fwd.unpack_dual(module_numerics.Scaled.forward(model, x)).tangent
        if tangent is None or not torch.equal(tangent, expected):
            wrong.append(name)
        called = {name: fwd.make_dual(kept.clone(), torch.full((64,), 2.0))}
        if name == "shift":
            answer = fwd.unpack_dual(torch.func.functional_call(model, called, (x,)))
            if answer.tangent is None or not torch.equal(answer.tangent, 2 * expected):
                wrong.append("functional_call")
        setattr(model, name, kept)
inside = hits(model)
with torch.no_grad():
    for _ in range(3):
        model(x)
report(before=answered, inside=inside, after=hits(model), wrong=wrong)
"""
)


def test_operators_of_a_module_are_as_exact_as_single_ones(tmp_path: Path) -> None:
    seen = run_program(NUMERICS, tmp_path, fills=True)
    assert seen["hits"], seen["lines"]
    assert seen["wrong"] == []


def test_tangents_come_out_wherever_a_dual_tensor_is(tmp_path: Path) -> None:
    seen = run_program(TANGENTS, tmp_path, fills=True)
    assert seen["wrong"] == []
    assert seen["before"] and seen["inside"] == seen["before"] < seen["after"]
