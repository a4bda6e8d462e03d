"""What kernels of normalizations on CPU leave to native, and what mean they have."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import run_program
from eagercache.calls.call import Call
from eagercache.worker.samples import ordinary_operands
from test_calls import NONE, describe, integers, number, tensor

INF, NAN = math.inf, math.nan


def _layer_norm(dtype: str) -> Call:
    rows, weight = tensor((4, 8), dtype=dtype), tensor((8,), dtype=dtype)
    return Call(describe("native_layer_norm", rows, integers(8), weight, NONE, number(1e-5)))


@pytest.mark.once
@pytest.mark.parametrize(
    ("dtype", "last"), [("float32", 2.0**99), ("bfloat16", 2.0**99), ("float16", 65504.0)]
)
def test_only_ordinary_weights_are_the_kernels(dtype: str, last: float) -> None:
    call = _layer_norm(dtype)
    assert ordinary_operands.looked_at(call) == (1,)
    for value, ordinary in (
        (0.0, True), (-3.5, True), (last, True), (-last, True), (2 * last, False),
        (-INF, False), (NAN, False),
    ):  # fmt: skip
        sample = call.sample("unit", 1)
        rows, weight = sample.values[:2]
        assert isinstance(rows, torch.Tensor) and isinstance(weight, torch.Tensor)
        rows[1, 1] = INF  # anything will do there
        weight[5] = value
        assert ordinary_operands.is_ordinary(call, sample) == ordinary, value


@pytest.mark.once
def test_other_operators_and_weights_that_are_not_there_are_not_looked_at() -> None:
    without = describe("native_layer_norm", tensor((4, 8)), integers(8), NONE, NONE, number(1e-5))
    assert ordinary_operands.looked_at(Call(without)) == ()
    assert ordinary_operands.looked_at(Call(describe("abs", tensor((8,))))) == ()


PROGRAM = """
import torch
torch.set_num_threads(1)
import eagercache
inf = float("inf")
chosen = ["native_layer_norm", "var_mean", "tanh", "gelu", "_foreach_add"]
eagercache.enable(chosen, on_miss="wait", choose="always")

def rows(count, n, dtype=torch.float32):
    x = torch.linspace(-1, 1, n * count).view(count, n).to(dtype)
    x[0] = torch.arange(n) - (n - 1) / 2  # its mean is among them where n is odd
    return x

def hits(weight, count=3):
    before = eagercache.stats().hits
    answer = torch.native_layer_norm(rows(count, weight.numel(), weight.dtype), weight.size(),
                                     weight, None, 1e-5)
    return eagercache.stats().hits - before, answer

def mean_beside(value, place, n, call):
    x = rows(2, n)
    x[1, place] = value
    before = eagercache.stats().hits
    mean = call(x)
    assert eagercache.stats().hits == before + 1
    return float(mean[1].sum())

found = {}
numbers = torch.arange(1.0, 75.0)
for name, weight in (
    ("plain", numbers[:37].clone()), ("strided", numbers[::2]), ("half", numbers[:37].bfloat16()),
):
    hits(weight)
    found[name] = []
    for place in (0, 5, 36):
        for value in (inf, -inf, 2.0**101, 3.0):
            changed = weight.clone() if name != "strided" else numbers.clone()[::2]
            changed[place] = value
            found[name].append(hits(changed)[0])
for n in (8, 37):
    torch.var_mean(rows(2, n), -1)
    norm = lambda x: torch.native_layer_norm(x, [n], torch.ones(n), None, 1e-5)[1]
    norm(rows(2, n))
    for what, call in (("var_mean", lambda x: torch.var_mean(x, -1)[1]), ("norm", norm)):
        found[f"{what} {n}"] = [mean_beside(inf, place, n, call) for place in range(n)]
        found[f"{what} {n}"].append(mean_beside(-inf, n - 1, n, call))
# Equal numbers are their own mean; small ones their own tanh; large ones keep their variance. The
# tanh of a double is not the number itself until much later (of many: few have no kernel). Three
# times true is true.
equal, small = torch.full((3, 11), 1.1), 2.0 ** -torch.arange(10.0, 42.0)
double = 2.0 ** -torch.linspace(13.0, 27.0, 4096, dtype=torch.float64)
gelu = torch.nn.functional.gelu(double, approximate="tanh")
flags = torch.arange(400).view(20, 20) % 3 == 0
three = torch.ops.aten._foreach_add.List
far = 1000 + torch.linspace(-0.3, 0.4, 16 * 17).view(16, 17).sin()
calls = {
    "equal": lambda: torch.native_layer_norm(equal, [11], None, None, 1e-5)[0].abs().max(),
    "small": lambda: (torch.tanh(small) != small)[4:].sum(),
    "double": lambda: (torch.nn.functional.gelu(double, approximate="tanh") - gelu).abs().max(),
    "flags": lambda: (three([flags], [flags.t()], alpha=3)[0] ^ (flags | flags.t())).sum(),
    "far": lambda: (torch.var_mean(far, -2)[0] / far.double().var(-2) - 1).abs().max(),
}
for name, call in calls.items():
    call()
    before = eagercache.stats().hits
    found[name] = [float(call()), eagercache.stats().hits - before]
weight = torch.ones(8)
for count in (5, 6, 7, 9, 10):  # one kernel for them
    for _ in range(4):
        hits(weight, count)
found["many sizes"] = [hits(weight, 11)[0]]
weight[7] = -inf
found["many sizes"].append(hits(weight, 11)[0])
forms = {str(k.facts.get("form")) for k in eagercache.kernels() if k.decision == "kernel"}
report(found=found, forms=sorted(forms))
"""


def test_kernels_have_infinite_means_and_leave_infinite_weights_to_native(tmp_path: Path) -> None:
    result = run_program(PROGRAM, tmp_path / "cache", fills=True)
    found = result["found"]
    for name in ("plain", "strided", "half"):
        assert found[name] == [0, 0, 0, 1] * 3, (name, result["stderr"])
    for n in (8, 37):
        for name in ("var_mean", "norm"):
            assert found[f"{name} {n}"] == [INF] * n + [-INF], name
    assert found["equal"] == [0.0, 1]
    assert found["small"] == [0.0, 1]
    assert found["double"] == [0.0, 1]
    assert found["flags"] == [0.0, 1]
    assert found["far"][0] <= 2**-24 and found["far"][1] == 1
    assert found["many sizes"] == [1, 0]
    assert "reported an error" not in result["stderr"]
    assert result["forms"] == ["bare", "shapes"]
