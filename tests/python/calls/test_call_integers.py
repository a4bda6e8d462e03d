"""What the integer tensors of a real call held, in the data that its kernel is proved on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Program
from eagercache.calls.call import Call
from eagercache.calls.integers import OWN
from eagercache.calls.samples import FILLS
from eagercache.worker.samples.draws import SEED
from eagercache.worker.samples.shape_class import ShapeFamily
from eagercache.worker.validation.native import native_answers
from test_calls import boolean, describe, integer, integers, tensor


def held(place: int, values: list[int], whole: bool = True) -> dict[str, Any]:
    return {"tensor": place, "whole": whole, "values": values}


def index_select(sizes: tuple[int, ...] = (3,), **index: Any) -> dict[str, Any]:
    index = tensor(sizes, dtype="int64", **index)
    return describe("index_select", tensor((50, 4)), integer(0), index)


def with_integers(description: dict[str, Any], *samples: dict[str, Any]) -> Call:
    return Call({**description, "integers": list(samples)})


def filled(call: Call, fill: str) -> list[int]:
    """The values of the call's second tensor."""
    value = call.sample(fill, SEED).values[1]
    assert isinstance(value, torch.Tensor)
    return value.flatten().tolist()


@pytest.mark.parametrize("strides", [(1,), (3,)])
def test_the_own_sample_holds_what_the_call_held(strides: tuple[int, ...]) -> None:
    call = with_integers(index_select(strides=strides), held(1, [41, 7, 41]))
    assert call.fills == (OWN, *FILLS)
    assert filled(call, OWN) == [41, 7, 41]


def test_an_expanded_tensor_holds_it_too() -> None:
    described = describe(
        "gather",
        tensor((50, 4)),
        integer(0),
        tensor((2, 3), (1, 0), dtype="int64"),
        boolean(False),
    )
    call = with_integers(described, held(1, [9, 9, 9, 4, 4, 4]))
    assert filled(call, OWN) == [9, 9, 9, 4, 4, 4]


def test_values_that_are_some_of_many_are_drawn_from() -> None:
    call = with_integers(index_select((200,)), held(1, [3, 48], whole=False))
    assert set(filled(call, OWN)) == {3, 48}


@pytest.mark.parametrize("fill", FILLS)
def test_indices_are_in_the_range_of_the_real_ones_by_every_rule(fill: str) -> None:
    call = with_integers(index_select((200,)), held(1, [3, 48], whole=False))
    assert set(filled(call, fill)) <= set(range(3, 49))
    assert len(set(filled(call, fill))) > 10


@pytest.mark.parametrize("fill", FILLS)
def test_indices_that_are_not_known_are_of_rows_that_are_there(fill: str) -> None:
    """Others end the context of a worker on a GPU, where calls come without their values."""
    index = tensor((200,), dtype="int64")
    assert len(set(filled(Call(index_select((200,))), fill))) > 10
    for sizes, dim, rows in (((50, 4), 1, 4), ((50, 1), -1, 1), ((), 0, 1)):
        call = Call(describe("index_select", tensor(sizes), integer(dim), index))
        assert set(filled(call, fill)) == set(range(rows))
    assert set(filled(Call(describe("take", tensor((1, 3)), index)), fill)) == {0, 1, 2}


def test_indices_of_what_is_not_known_are_small() -> None:
    indices = {"kind": "tensor_list", "elements": [tensor((200,), dtype="int64")]}
    call = Call(describe("index.Tensor", tensor((50, 4)), indices))
    assert set(filled(call, "wide")) == {0, 1}


def test_indices_make_no_fill_one_that_native_refuses() -> None:
    call = with_integers(index_select(), held(1, [41, 7, 41]))
    assert tuple(native.fill for native in native_answers(call)) == (OWN, *FILLS)


def test_other_integers_still_have_their_extremes() -> None:
    described = describe(
        "bitwise_and.Tensor", tensor((64,), dtype="int32"), tensor((64,), dtype="int32")
    )
    call = with_integers(described, held(0, [1] * 64), held(1, [2] * 64))
    assert filled(call, OWN) == [2] * 64
    ends = torch.iinfo(torch.int32)
    assert {ends.min, ends.max} <= set(filled(call, "extreme"))


def test_values_that_depend_on_each_other_are_never_made_up() -> None:
    described = describe(
        "ctc_loss.IntList",
        tensor((4, 2, 5)),
        tensor((2, 2), dtype="int64"),
        {"kind": "int_list", "values": [4, 4]},
        {"kind": "int_list", "values": [2, 2]},
        integer(0),
        integer(1),
        boolean(False),
    )
    lengths = describe(
        "ctc_loss.Tensor",
        *described["args"][:2],
        *(tensor((2,), dtype="int64") for _ in range(2)),
        *described["args"][4:],
    )
    call = with_integers(lengths, held(2, [4, 3]), held(3, [2, 1]))
    for fill in call.fills:
        sample = call.sample(fill, SEED)
        assert [value.tolist() for value in sample.values[2:]] == [[4, 3], [2, 1]]  # type: ignore[union-attr]


def test_another_member_of_a_shape_class_has_no_indices_of_this_one() -> None:
    pattern = {"symbols": [["s0", 0, 0]], "ties": []}
    description = {**index_select(), "integers": [held(1, [41, 7, 41])], "pattern": pattern}
    family = ShapeFamily(description)
    assert filled(family.member((50,)), OWN) == [41, 7, 41]
    smaller = family.member((2,))
    assert smaller.fills == FILLS
    assert set(filled(smaller, "special")) <= {0, 1}


def pooled(sizes: tuple[int, ...], *samples: dict[str, Any]) -> Call:
    half = (*sizes[:2], sizes[2] // 2, sizes[3] // 2)
    two, none = integers(2, 2), integers(0, 0)
    described = describe(
        "max_pool2d_with_indices_backward",
        *(tensor(half), tensor(sizes), two, two, none, integers(1, 1), boolean(False)),
        tensor(half, dtype="int64"),
    )
    return with_integers(described, *samples)


@pytest.mark.parametrize("fill", ["normal", "special", "integers"])
def test_indices_that_another_operator_makes_are_made_by_it(fill: str) -> None:
    values = pooled((1, 3, 8, 6)).sample(fill, SEED).values
    expected = torch.ops.aten.max_pool2d_with_indices(values[1], [2, 2], [2, 2])[1]
    assert torch.equal(values[2], expected)  # type: ignore[arg-type]


def test_some_of_the_real_ones_do_not_take_their_place() -> None:
    sizes = (1, 3, 8, 6)
    values = pooled(sizes, held(2, [47], whole=False)).sample(OWN, SEED).values
    expected = torch.ops.aten.max_pool2d_with_indices(values[1], [2, 2], [2, 2])[1]
    assert torch.equal(values[2], expected)  # type: ignore[arg-type]


def test_no_floating_point_tensor_is_taken_for_an_index() -> None:
    described = describe("mse_loss", tensor((64,)), tensor((64,)), integer(1))
    values = Call(described).sample("special", SEED).values[1]
    assert isinstance(values, torch.Tensor) and values.isnan().any()


def test_kernels_are_proved_on_the_integers_of_the_call_that_asked_for_them(
    program: Program,
) -> None:
    seen = program(
        """
        import eagercache, json, torch
        with eagercache.enable(["aten::bitwise_and.Tensor"], on_miss="wait", choose="always"):
            torch.tensor([7, 3, 41]) & torch.tensor([5, 5, -9])
        (kernel,) = [k for k in eagercache.kernels() if "integers" in k.facts]
        report(decision=kernel.decision, reason=kernel.reason, fills=kernel.facts.get("fills"),
               known=json.loads(kernel.facts["integers"]), kept="integers" in kernel.facts["call"])
        """,
        fills=True,
    )
    assert (seen["decision"], seen["reason"]) == ("kernel", "")
    assert seen["fills"].split()[0] == OWN
    assert len(seen["fills"].split()) == 1 + len(FILLS)
    # Of the values no more than their ends is kept.
    ends = [[3, 41], [-9, 5]]
    assert seen["known"] == [
        {"tensor": place, "whole": False, "values": ends[place]} for place in (0, 1)
    ]
    assert not seen["kept"]
