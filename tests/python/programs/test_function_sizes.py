"""Operators made of functions, called with sizes that change: one kernel for a class of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run_program
from eagercache.worker.inductor.size_expressions import evaluate

FUNCTIONS = """
import torch, eagercache
from torch import Tensor
torch.manual_seed(0)
@eagercache.op("demo::gated")
def gated(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * y / x.size(-1)
@eagercache.op("demo::picked", autograd=False)
def picked(x: Tensor, index: Tensor) -> Tensor:
    return torch.tanh(x.gather(-1, index.unsqueeze(-1)).squeeze(-1)) * 2
@eagercache.op("demo::branched", autograd=False)
def branched(x: Tensor) -> Tensor:
    if x.size(0) > 16:
        return torch.exp(x) * 2
    return torch.sigmoid(x) + 1
@eagercache.op("demo::unrolled", autograd=False)
def unrolled(x: Tensor) -> Tensor:
    total = x[0] * 1
    for row in range(1, x.size(0)):
        total = total * 0.5 + x[row]
    return total
def tensors(rows, columns):
    return (torch.randn(rows, columns, requires_grad=True),
            torch.randn(rows, columns, requires_grad=True))
def close(some, others):
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) and a.stride() == b.stride()
               for a, b in zip(some, others, strict=True))
def compare(rows, columns, names=("gated", "picked", "branched")):
    x, y = tensors(rows, columns)
    wrong = []
    if "gated" in names:
        both = []
        for f in (gated, gated.function):
            made = f(x, y)
            both.append([made, *torch.autograd.grad(made.sum(), (x, y))])
        wrong += [] if close(*both) else ["gated"]
    index = torch.randint(columns, (rows,))
    plain = x.detach()
    for f, args in ((picked, (plain, index)), (branched, (plain,)), (unrolled, (plain,))):
        if f.name[6:] in names and not close([f(*args)], [f.function(*args)]):
            wrong.append(f.name[6:])
    return [[name, rows, columns] for name in wrong]
def forms():
    rows = {}
    for kernel in eagercache.kernels():
        row = rows.setdefault(kernel.op[6:], [])
        row.append(kernel.facts.get("form", kernel.decision + " " + kernel.reason))
    return {name: sorted(row) for name, row in rows.items()}
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A store that calls of several sizes have filled, and what was seen meanwhile."""
    path = tmp_path_factory.mktemp("sizes") / "cache"
    path.mkdir(mode=0o700)
    seen = run_program(
        FUNCTIONS
        + """
eagercache.enable((), on_miss="wait", choose="always")
wrong = []
for rows, columns in ((20, 24), (30, 40), (17, 512), (64, 3), (100, 33)):
    wrong += compare(rows, columns)
    wrong += compare(rows, columns)
above = eagercache.stats()
kernels = forms()
for rows in (3, 4, 5):
    wrong += compare(rows, 8, ["unrolled"])
    wrong += compare(rows, 8, ["unrolled"])
report(wrong=wrong, kernels=kernels, unrolled=forms()["unrolled"], compiles=above.compiles,
       failures=eagercache.stats().failures,
       native={name: row.native for name, row in above.operators.items() if row.native})
""",
        path,
        timeout=600,
        fills=True,
    )
    yield path, seen


@pytest.fixture
def with_kernels(filled: tuple[Path, dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Programs on that store: nothing is compiled."""

    def run(code: str) -> dict[str, Any]:
        enable = "eagercache.enable((), on_miss='native', choose='always')\n"
        return run_program(FUNCTIONS + enable + code, filled[0])

    return run


def test_the_second_size_brings_a_kernel_for_all_and_no_more_are_made(
    filled: tuple[Path, dict[str, Any]],
) -> None:
    seen = filled[1]
    assert not seen["wrong"]
    assert seen["failures"] == 0
    both = ["bare", "shapes"]
    wanted = {"gated": both, "gated_backward": both, "picked": both, "branched": both}
    assert seen["kernels"] == wanted
    assert seen["compiles"] == 8


def test_a_function_that_is_another_program_for_each_size_has_kernels_of_its_own_for_each(
    filled: tuple[Path, dict[str, Any]],
) -> None:
    forms = filled[1]["unrolled"]
    assert forms.count("bare") == 3 and "shapes" not in forms


def test_another_process_has_kernels_for_sizes_that_nobody_has_met(
    with_kernels: Callable[..., dict[str, Any]],
) -> None:
    seen = with_kernels(
        """
wrong = []
for rows, columns in ((18, 2), (51, 77), (19, 1000)):
    wrong += compare(rows, columns)
report(wrong=wrong, hits={name: row.hits for name, row in eagercache.stats().operators.items()},
       native=eagercache.stats().native)
"""
    )
    assert not seen["wrong"]
    names = ["gated", "gated_backward", "picked", "branched"]
    assert {name: seen["hits"][f"demo::{name}"] for name in names} == dict.fromkeys(names, 3)


def test_what_the_function_asked_about_sizes_is_a_guard(
    with_kernels: Callable[..., dict[str, Any]],
) -> None:
    seen = with_kernels(
        """
hits = []
for rows in (17, 16, 15, 18):
    before = eagercache.stats().hits
    wrong = compare(rows, 24, ["branched"])
    hits.append([eagercache.stats().hits - before, wrong])
report(hits=hits)
"""
    )
    assert seen["hits"] == [[1, []], [0, []], [0, []], [1, []]]


def test_an_index_out_of_range_of_this_size_raises_as_the_function_does(
    with_kernels: Callable[..., dict[str, Any]],
) -> None:
    seen = with_kernels(
        """
errors, right = [], []
for columns in (50, 60):
    x, index = torch.randn(21, columns), torch.randint(columns, (21,))
    index[4] = 49
    right.append(close([picked(x, index)], [picked.function(x, index)]))
    index[3] = columns
    for f in (picked, picked.function):
        try:
            f(x, index)
        except RuntimeError as error:
            errors.append(str(error))
row = eagercache.stats().operators["demo::picked"]
report(errors=errors, right=right, hits=row.hits)
"""
    )
    assert seen["right"] == [True, True]
    assert len(seen["errors"]) == 4 and seen["errors"][::2] == seen["errors"][1::2]
    assert "out of bounds" in seen["errors"][0]
    assert seen["hits"] == 2


@pytest.mark.once
def test_conditions_read_the_same_in_python_as_in_c() -> None:
    text = "a == 3L & b == 4L || c10::div_floor_integer(a, 2L) == 7L"
    assert [bool(evaluate(text, {"a": a, "b": b})) for a, b in ((3, 4), (3, 5), (15, 0))] == [
        True,
        False,
        True,
    ]


def test_a_function_that_asks_for_a_stride_that_sizes_do_not_say_answers_as_it_does(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    seen = run_program(
        """
import torch, eagercache
from torch import Tensor
@eagercache.op("demo::by_stride", autograd=False)
def by_stride(x: Tensor, y: Tensor) -> Tensor:
    if x.stride(0) > 6000:
        return torch.exp(y) * x
    return torch.sigmoid(y) + x
rows = [(torch.randn(1, 1).as_strided((1, 1), (stride, 1)), torch.randn(3, columns))
        for columns, stride in enumerate((100, 200, 300, 5000, 7000, 9000), start=8)]
expected = [by_stride.function(*both) for both in rows]
with eagercache.enable((), on_miss="wait", choose="always"):
    wrong = sum(not torch.allclose(by_stride(*both), known, rtol=1e-5, atol=1e-6)
                for _ in range(2) for both, known in zip(rows, expected, strict=True))
    hits = eagercache.stats().hits
report(wrong=wrong, hits=hits)
""",
        cache,
        fills=True,
    )
    assert seen["wrong"] == 0
    assert seen["hits"] > 0
