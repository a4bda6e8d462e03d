"""Kernels of whole modules give what single operators give, and leave tangents to the forward."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from conftest import run_program
from eagercache.worker.compat import encoder_layers

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

# Attention without gradients, whose fused operator has NaN where a mask hides every key, and an
# encoder, which zeroes what a mask hides at the ends of rows.
ATTENTION = (
    BEGIN
    + """
from torch import nn
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)
    def forward(self, x, mask):
        y, weights = self.attention(x, x, x, key_padding_mask=mask, need_weights=False)
        return (self.norm(x + y), y) if weights is None else weights

def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()

some = torch.rand(6, 3, 5) > 0.6
ends = torch.arange(5) >= torch.tensor([1, 3, 5])[:, None]
hidden = [*some, torch.ones(3, 5, dtype=torch.bool), ends]
padded = [*some, ends, ends]
cases = {
    "a hidden row": (Block().eval(), [(torch.randn(3, 5, 16), mask) for mask in hidden]),
    "no mask": (encoder(), [(torch.randn(3, 5, 16),) for _ in range(5)]),
    "hidden ends": (encoder(), [(torch.randn(3, 5, 16), None, mask) for mask in padded]),
}
found = {}
with torch.no_grad():
    for name, (model, calls) in cases.items():
        answers = [model(*call) for call in calls]
        mine, below = hits(model), sum(hits(part) for part in model.modules())
        lines = explain_module(model)
        eagercache.disable()
        natives = [model(*call) for call in calls]
        eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
        try:
            torch.testing.assert_close(answers, natives, equal_nan=True)
            wrong = ""
        except AssertionError as error:
            wrong = str(error)
        found[name] = dict(hits=mine, below=below, wrong=wrong, lines=lines)
report(**found)
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


def test_attention_answers_as_the_fused_operators_do(tmp_path: Path) -> None:
    seen = run_program(ATTENTION, tmp_path, fills=True)
    assert [seen[name]["wrong"] for name in ("a hidden row", "no mask", "hidden ends")] == [""] * 3
    assert seen["a hidden row"]["hits"], seen
    assert seen["no mask"]["hits"], seen
    # The encoder goes another way while it is traced; its layers have kernels.
    assert not seen["hidden ends"]["hits"] and seen["hidden ends"]["below"], seen


@pytest.mark.parametrize("mask_type", [None, 0, 1, 2])
@pytest.mark.parametrize("same", [True, False])
def test_the_parts_of_fused_attention_are_natives(mask_type: int | None, same: bool) -> None:
    torch.manual_seed(0)
    rows, length, width, heads = 3, 5, 16, 4
    sizes = {0: (length, length), 1: (rows, length), 2: (rows, heads, length, length)}
    weights = [torch.randn(size) for size in ((48, 16), (48,), (16, 16), (16,))]
    query = torch.randn(rows, length, width)
    key, value = (query, query) if same else torch.randn(2, rows, length, width)
    masks: list[torch.Tensor | None] = [None]
    if mask_type is not None:
        some = torch.rand(sizes[mask_type]) > 0.6
        masks = [some, torch.randn(some.shape) * some, torch.ones_like(some)]
    for mask, needs, averages in itertools.product(masks, (True, False), (True, False)):
        given = (width, heads, *weights, mask, needs, averages, mask_type)
        native = torch._native_multi_head_attention(query, key, value, *given)
        parts = encoder_layers._attention(query, key, value, *given)
        torch.testing.assert_close(parts[0], native[0], rtol=1e-4, atol=1e-4, equal_nan=True)
        assert (parts[1] is None) == (native[1] is None) == (not needs)
        torch.testing.assert_close(parts[1], native[1], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_parts_of_a_fused_layer_are_natives(masked: bool, gelu: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    attention = [torch.randn(size) / 4 for size in ((48, 16), (48,), (16, 16), (16,))]
    norms = [torch.randn(16) for _ in range(4)]
    feeds = [torch.randn(size) / 4 for size in ((32, 16), (32,), (16, 32), (16,))]
    mask = (torch.rand(3, 5) > 0.6, 1) if masked else (None, None)
    given = (
        torch.randn(3, 5, 16),
        16,
        4,
        *attention,
        gelu,
        norm_first,
        1e-5,
        *norms,
        *feeds,
        *mask,
    )
    native = torch._transformer_encoder_layer_fwd(*given)
    parts = encoder_layers._encoder_layer(*given)
    torch.testing.assert_close(parts, native, rtol=1e-4, atol=1e-4, equal_nan=True)
