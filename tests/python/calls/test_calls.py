"""Calls are rebuilt with exactly the described metadata, and filled reproducibly."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from eagercache.calls.call import Call
from eagercache.calls.description import ALIGNMENT, CallError
from eagercache.calls.global_state import GlobalState
from eagercache.calls.integers import MOST_STEPS, keep_countable
from eagercache.calls.samples import FILLS

STATE: dict[str, Any] = {
    "default_dtype": "float32",
    "deterministic": False,
    "deterministic_warn_only": False,
    "fill_uninitialized_memory": True,
    "num_threads": 2,
}


def tensor(
    sizes: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    dtype: str = "float32",
    wrapped: bool = False,
    aligned: bool = True,
) -> dict[str, Any]:
    if strides is None:
        strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
    return {
        "kind": "tensor",
        "dtype": dtype,
        "device": "cpu",
        "sizes": list(sizes),
        "strides": list(strides),
        "wrapped": wrapped,
        "aligned": aligned,
    }


def bits(value: float) -> str:
    return f"0x{int.from_bytes(struct.pack('<d', value), 'little'):016x}"


def number(value: float) -> dict[str, Any]:
    return {"kind": "float", "bits": bits(value), "value": str(value)}


def integer(value: int) -> dict[str, Any]:
    return {"kind": "int", "value": value}


def boolean(value: bool) -> dict[str, Any]:
    return {"kind": "bool", "value": value}


def integers(*values: int) -> dict[str, Any]:
    return {"kind": "int_list", "values": list(values)}


NONE: dict[str, Any] = {"kind": "none"}


def describe(op: str, *args: dict[str, Any], **state: Any) -> dict[str, Any]:
    name, _, overload = op.partition(".")
    return {
        "id": 1,
        "op": f"aten::{name}",
        "overload": overload,
        "dispatch_key": "CPU",
        "digest": "0" * 64,
        "calls": 1,
        "state": {**STATE, **state},
        "args": list(args),
    }


LAYOUTS = [
    ((4, 5), (5, 1)),
    ((4, 5), (1, 4)),
    ((4, 5), (0, 1)),
    ((4, 5), (2, 1)),  # overlapping
    ((3, 1, 2), (7, 99, 3)),
    ((), ()),
    ((2, 3, 4, 5), (60, 1, 15, 3)),
]
DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("sizes", "strides"), LAYOUTS)
def test_metadata_is_exactly_the_described_one(
    sizes: tuple[int, ...], strides: tuple[int, ...], aligned: bool
) -> None:
    for dtype in DTYPES:
        call = Call(describe("abs", tensor(sizes, strides, dtype, aligned=aligned)))
        for fill in FILLS:
            (value,) = call.sample(fill, 1).values
            assert isinstance(value, torch.Tensor)
            assert value.dtype == getattr(torch, dtype)
            assert (tuple(value.size()), value.stride()) == (sizes, strides)
            assert (value.data_ptr() % ALIGNMENT == 0) == aligned


def test_a_sample_depends_on_its_seed_and_fill_alone() -> None:
    call = Call(describe("abs", tensor((50,))))

    def fill(name: str, seed: int) -> torch.Tensor:
        (value,) = call.sample(name, seed).values
        assert isinstance(value, torch.Tensor)
        return value

    assert torch.equal(fill("normal", 1), fill("normal", 1))
    assert not torch.equal(fill("normal", 1), fill("normal", 2))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    fill("special", 1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_special_values_are_all_there(dtype: str) -> None:
    (value,) = Call(describe("abs", tensor((3000,), dtype=dtype))).sample("special", 3).values
    assert isinstance(value, torch.Tensor)
    info = torch.finfo(value.dtype)
    assert torch.isnan(value).any()
    assert torch.isposinf(value).any() and torch.isneginf(value).any()
    assert ((value == 0) & torch.signbit(value)).any()
    assert ((value == 0) & ~torch.signbit(value)).any()
    assert ((value != 0) & (value.abs() < info.smallest_normal)).any()
    assert (value == info.max).any() and (value == info.min).any()
    (finite,) = Call(describe("abs", tensor((3000,), dtype=dtype))).sample("extreme", 3).values
    assert isinstance(finite, torch.Tensor) and torch.isfinite(finite).all()


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_degrees_that_take_native_weeks_to_count_to_are_not_made_up(dtype: str) -> None:
    polynomial = "special_laguerre_polynomial_l"
    call = Call(
        describe(polynomial, tensor((3000,), dtype="float64"), tensor((3000,), dtype=dtype))
    )
    largest = 0.0
    for fill in call.fills:
        x, n = call.sample(fill, 3).values
        assert isinstance(x, torch.Tensor) and isinstance(n, torch.Tensor)
        size = n.to(torch.float64).abs()
        assert not bool(((size > MOST_STEPS) & (size < 2.0**63)).any()), fill
        largest = max(largest, float(x[x.isfinite()].abs().max()))
    assert largest == torch.finfo(torch.float64).max  # only degrees are held back


def test_no_degree_is_past_all_integers_on_a_gpu_which_counts_to_the_largest() -> None:
    made = [float("inf"), -1e300, 2.0**63, 2.0**50, 7.0, float("nan")]
    values = torch.tensor(made, dtype=torch.float64)
    keep_countable(values, "cuda:0")
    assert values[:5].tolist() == [MOST_STEPS] * 4 + [7.0]
    assert bool(values[5].isnan())


def test_a_clone_has_the_same_bits_and_layout_in_other_memory() -> None:
    call = Call(describe("abs", tensor((4, 5), (2, 1), "float32", aligned=False)))
    sample = call.sample("special", 1)
    copy = sample.clone()
    (a,), (b,) = sample.values, copy.values
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert a.stride() == b.stride() and a.data_ptr() % ALIGNMENT == b.data_ptr() % ALIGNMENT
    b.fill_(7)
    assert not torch.equal(a, b)


def test_arguments_go_where_the_schema_wants_them() -> None:
    call = Call(describe("var.correction", tensor((4, 8)), integers(-1), integer(0), boolean(True)))
    sample = call.sample("normal", 1)
    args, kwargs = call.bind(sample.values)
    assert args[1] == [-1] and kwargs == {"correction": 0, "keepdim": True}
    (out,) = call.invoke(sample.values)
    assert torch.equal(out, torch.var(args[0], -1, correction=0, keepdim=True))


def test_tensor_lists_numbers_and_several_outputs() -> None:
    cat = Call(
        describe(
            "cat",
            {"kind": "tensor_list", "elements": [tensor((2, 3)), tensor((4, 3))]},
            integer(0),
        )
    )
    assert cat.invoke(cat.sample("normal", 1).values)[0].size() == (6, 3)
    add = Call(
        describe("add.Tensor", tensor((3,)), tensor((), dtype="float64", wrapped=True), integer(1))
    )
    values = add.sample("normal", 1).values
    assert isinstance(values[1], float)
    assert add.invoke(values)[0].dtype == torch.float32
    norm = Call(
        describe("native_layer_norm", tensor((4, 8)), integers(8), NONE, NONE, number(1e-5))
    )
    assert [t.size() for t in norm.invoke(norm.sample("normal", 1).values)] == [
        (4, 8),
        (4, 1),
        (4, 1),
    ]


def test_enumerated_arguments_become_torchs_own() -> None:
    call = Call(
        describe(
            "_to_copy",
            tensor((2, 3)),
            {"kind": "scalar_type", "value": 15, "dtype": "bfloat16"},
            {"kind": "layout", "value": 0, "layout": "strided"},
            {"kind": "device", "type": 0, "index": -1, "device": "cpu"},
            NONE,
            boolean(False),
            {"kind": "memory_format", "value": 1, "memory_format": "preserve_format"},
        )
    )
    assert call.invoke(call.sample("normal", 1).values)[0].dtype == torch.bfloat16


def test_doubles_come_back_bit_for_bit() -> None:
    for value in (-0.0, 5e-324, math.inf, 0.1):
        call = Call(describe("clamp", tensor((3,)), number(value), NONE))
        args, _ = call.bind([torch.ones(3)])
        assert struct.pack("<d", args[1]) == struct.pack("<d", value)


def test_the_wide_call_is_the_same_call_in_double_precision() -> None:
    call = Call(
        describe(
            "sum.dim_IntList",
            tensor((4, 8), (1, 4), "bfloat16"),
            integers(0),
            boolean(False),
            {"kind": "scalar_type", "value": 6, "dtype": "float32"},
        )
    )
    sample = call.sample("normal", 1)
    wide = call.with_wide_floats()
    (out,) = wide.invoke(call.widen(sample))
    (value,) = sample.values
    assert isinstance(value, torch.Tensor)
    assert out.dtype == torch.float64
    assert torch.equal(out, value.double().sum(0))
    assert call.widen(sample)[0].stride() == (1, 4)  # type: ignore[union-attr]


def test_state_is_applied_and_put_back() -> None:
    before = GlobalState.current()
    call = Call(
        describe("abs", tensor((3,)), default_dtype="float64", deterministic=True, num_threads=1)
    )
    with pytest.raises(KeyError), call.state.applied():
        assert GlobalState.current() == call.state
        raise KeyError
    assert GlobalState.current() == before


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (describe("no_such_operator", tensor((3,))), "there is no operator"),
        (describe("abs", tensor((3,)), tensor((3,))), "takes 1 arguments"),
        (describe("abs", {"kind": "generator"}), "unknown argument kind"),
        (describe("abs", tensor((3,), dtype="float3")), "no dtype 'float3'"),
        (describe("abs", tensor((3,), strides=(-1,))), "negative stride"),
        (describe("abs", {**tensor((3,)), "strides": []}), "number of strides"),
    ],
)
def test_a_description_that_makes_no_call_is_refused(
    description: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CallError, match=expected):
        Call(description)
