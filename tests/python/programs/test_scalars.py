"""Numbers that change from call to call: one kernel takes them as arguments, as native does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_program
from eagercache.calls.description import CallError
from eagercache.worker.inductor.scalar_text import read_scalar_plan, with_arguments
from eagercache.worker.inductor.wrapper_statements import NotUnderstood
from eagercache.worker.samples.scalar_class import ScalarFamily
from test_calls import describe, integer, tensor
from test_launch_plan import KERNEL, wrapper

# Each takes a number, on tensors that it makes anew.
CALLS = """
import math, torch
torch.manual_seed(0)
torch.set_num_threads(1)
x, y, z = torch.randn(40), torch.randn(40), torch.rand(40) + 0.5
def foreach(number):
    both = [x.clone(), y.clone()]
    torch._foreach_addcdiv_(both, [y, x], [z, z], [number, 1.1 * number])
    return torch.stack(both)
CALLS = {
    "add": lambda number: torch.add(x, y, alpha=number),
    "addcdiv_": lambda number: x.clone().addcdiv_(y, z, value=number),
    "clamp": lambda number: torch.clamp(x, -abs(number), abs(number)),
    "foreach": foreach,
}
OPERATORS = ["add.Tensor", "addcdiv_", "clamp", "_foreach_addcdiv_.ScalarList"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, math.inf, -math.inf, math.nan, 1e-45, 1e38, -3e38]
def bits(tensor):
    return tensor.numpy().tobytes().hex()
def native(numbers):
    return {name: [bits(call(n)) for n in numbers] for name, call in CALLS.items()}
"""


@pytest.fixture(scope="session")
def scalar_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A store with the calls' kernels for a schedule's first numbers, and what was seen."""
    path = tmp_path_factory.mktemp("scalars") / "cache"
    path.mkdir(mode=0o700)
    seen = run_program(
        CALLS
        + """
import eagercache
eagercache.enable(OPERATORS, on_miss="wait", choose="always")
for number in (-0.1, -0.09, -0.081, -0.0729):
    for call in CALLS.values():
        call(number)
stats = eagercache.stats()
report(compiles=stats.compiles, hits=stats.hits,
       forms=[[k.op, str(k.facts.get("form")), k.facts.get("numerics", "")]
              for k in eagercache.kernels()])
""",
        path,
        timeout=600,
        fills=True,
    )
    return path, seen


def test_the_third_number_makes_a_kernel_for_all(scalar_cache: tuple[Path, dict[str, Any]]) -> None:
    seen = scalar_cache[1]
    # Two for one number each, and the one that takes it as an argument, which answers the fourth.
    assert seen["compiles"] == 4 * 3, seen
    assert seen["hits"] == 4
    assert sum(form == "scalars" for _, form, _ in seen["forms"]) == 4
    assert all(numerics == "bitwise" for _, _, numerics in seen["forms"])


def test_a_schedule_is_answered_without_a_compile_as_native_answers(
    scalar_cache: tuple[Path, dict[str, Any]],
) -> None:
    seen = run_program(
        CALLS
        + """
import eagercache
numbers = [-0.05 * 0.9 ** step for step in range(40)]
expected = native(numbers)
eagercache.enable(OPERATORS, on_miss="native", choose="always")
same = native(numbers) == expected
stats = eagercache.stats()
call = eagercache.explain(torch.add, x, y, alpha=-0.0123)
report(same=same, hits=stats.hits, misses=stats.misses, outcome=call.outcome, reason=call.reason)
""",
        scalar_cache[0],
    )
    assert seen["same"]
    # The first call of each operator meets the store, the rest the kernel.
    assert seen["hits"] == 4 * 40 - seen["misses"] and seen["misses"] <= 4, seen
    assert seen["outcome"] == "hit" and "numbers" in seen["reason"], seen


def test_special_numbers_are_left_to_native_and_keep_their_bits(
    scalar_cache: tuple[Path, dict[str, Any]],
) -> None:
    seen = run_program(
        CALLS
        + """
import eagercache
expected = native(SPECIAL)
eagercache.enable(OPERATORS, on_miss="native", choose="always")
same = native(SPECIAL) == expected
report(same=same, hits=eagercache.stats().hits)
""",
        scalar_cache[0],
    )
    # clamp's bounds are of both signs; a class of its own, that has no kernel.
    assert seen["same"] and seen["hits"] == 0


def test_frozen_kernels_go_on_with_other_numbers_and_verification_sees_them(
    scalar_cache: tuple[Path, dict[str, Any]],
) -> None:
    seen = run_program(
        CALLS
        + """
import eagercache
eagercache.enable(OPERATORS, on_miss="native", choose="always")
CALLS["add"](-0.3)
eagercache.freeze()
CALLS["add"](-0.31), CALLS["addcdiv_"](-0.31)
report(hits=eagercache.stats().hits)
""",
        scalar_cache[0],
        EAGERCACHE_VERIFY="1",
    )
    assert seen["hits"] == 1


def real(value: float) -> dict[str, Any]:
    import struct

    return {"kind": "float", "bits": struct.pack(">d", value).hex(), "value": value}


def family(*numbers: float, dtype: str = "float32") -> ScalarFamily:
    tensors = [tensor((4, 4), dtype=dtype) for _ in range(3)]
    (number,) = numbers
    description = describe("addcdiv", *tensors, real(number))
    masked = [*description["args"][:3], real(1 / 3 if number > 0 else -1 / 3)]
    return ScalarFamily({**description, "class_args": masked})


def test_members_differ_in_their_numbers_alone() -> None:
    mine = family(-0.25125)
    assert mine.numbers == (-0.25125,)
    (_, kwargs) = mine.member((-0.125001,)).bind([torch.ones(4, 4)] * 3)
    assert kwargs == {"value": -0.125001}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_kernel_is_proved_at_the_ends_of_what_is_ordinary(dtype: str) -> None:
    numbers = family(-0.3, dtype=dtype).proof_numbers()
    assert numbers[0] == (-0.3,)
    assert all(-0.5 < number < 0 for (number,) in numbers)
    smallest = min(abs(number) for (number,) in numbers)
    assert smallest < (2.0**-13 if dtype == "float16" else 2.0**-99)


def test_marks_are_exact_in_every_dtype_and_differ() -> None:
    first, second = family(-0.3).marks(0), family(-0.3).marks(1)
    assert first is not None and second is not None and first != second
    for (mark,) in (first, second):
        assert -0.5 < mark < 0
        assert torch.tensor(mark, dtype=torch.bfloat16).item() == mark


def test_a_class_of_another_call_is_refused() -> None:
    description = describe("addcdiv", *[tensor((4, 4))] * 3, real(0.1))
    for masked in (description["args"], description["args"][:3], [integer(1)] * 4):
        with pytest.raises(CallError):
            ScalarFamily({**description, "class_args": masked})


def text_of(number: str) -> tuple[str, str]:
    return wrapper(), KERNEL.replace("in_ptr0[0]", f"static_cast<float>({number}) * in_ptr0[0]")


def plan_of(first: str, marks: Sequence[float], second: str, others: Sequence[float]) -> Any:
    return read_scalar_plan(text_of(first), marks, text_of(second), others)


def test_marks_become_elements_of_the_numbers() -> None:
    text = "static_cast<float>(-0.2519531250) + 1.0 + x0.25 + 0.2519531250 * 3.5e-3"
    assert with_arguments(text, (-0.251953125, 0.0035)) == (
        "static_cast<float>(eagercache_scalars[0]) + 1.0 + x0.25 + -eagercache_scalars[0] * "
        "eagercache_scalars[1]"
    )


def test_texts_that_differ_in_the_marks_alone_are_a_plan() -> None:
    plan = plan_of("0.25390625", (0.25390625,), "0.26171875", (0.26171875,))
    assert plan.scalars == 1
    assert "const double* s" in plan.source and "(s, " in plan.source
    assert plan.to_json().endswith('"scalars":1,"version":1}')


@pytest.mark.parametrize(
    ("first", "second"),
    [("0.74609375", "0.73828125"), ("0.25390625", "0.25390625"), ("0.125", "0.125")],
)
def test_a_number_that_is_folded_into_another_is_no_argument(first: str, second: str) -> None:
    with pytest.raises(NotUnderstood):
        plan_of(first, (0.25390625,), second, (0.26171875,))
