"""CUDA wrappers are read into plans, of fixed and of open sizes, or refused; without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Program
from eagercache.worker.cuda.open_sizes import CudaShapePlan, make_open_plan, read_open
from eagercache.worker.cuda.plan import CudaPlan, TritonKernel, make_plan
from eagercache.worker.cuda.scalar_text import read_scalar_text
from eagercache.worker.cuda.sizes import (
    MAX_STEPS,
    Expression,
    Size,
    at_most,
    equal,
    largest,
    open_size,
    read_size,
    steps_of,
    value_of,
)
from eagercache.worker.cuda.wrapper import Number, read_wrapper
from eagercache.worker.inductor.shape_plan import Symbols
from eagercache.worker.inductor.wrapper_statements import NotUnderstood
from hypothesis import given
from hypothesis import strategies as st

CALL = """
def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    assert_size_stride(arg0_1, (4, 8), (8, 1))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.bfloat16)
        buf1 = empty_strided_cuda((4, ), (1, ), torch.float32)
        stream0 = get_raw_stream(0)
        triton_a.run(arg0_1, arg1_1.item(), buf0, 32, stream=stream0)
        del arg0_1
        buf2 = reinterpret_tensor(buf0, (4, 4), (8, 1), 4); del buf0  # reuse
        triton_b.run(buf2, buf1, 4, 8, stream=stream0)
        buf3 = buf1; del buf1  # reuse
    return (buf3, )
"""


def test_a_wrapper_is_read() -> None:
    text = read_wrapper(CALL)
    assert text.num_inputs == 2
    assert [call.kernel for call in text.calls] == ["triton_a", "triton_b"]
    assert text.calls[0].arguments[1] == Number(1)
    assert [output.dtype for output in text.output_specs()] == ["float32"]
    assert [buffer.bytes for buffer in text.scratch()] == [64]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("triton_b.run(", "extern_kernels.mm("),
        ("stream=stream0)\n        del", "stream=other)\n        del"),
        ("del arg0_1", "arg0_1.zero_()"),
        ("(8, 1), 4)", "(8, 1), 64)"),
        ("return (buf3, )", "return (arg1_1, )"),
        ("return (buf3, )", "return (buf3, buf3, )"),
        ("return (buf3, )", "return (buf2, )"),
        ("torch.cuda._DeviceGuard(0)", "torch.xpu._DeviceGuard(0)"),
        ("torch.bfloat16", "torch.float8_e4m3fn"),
        ("(4, ), (1, )", "(0, ), (1, )"),
        ("(4, ), (1, )", "(s0, ), (1, )"),
        ("buf2, buf1, 4", "buf2, buf1.data_ptr(), 4"),
        ("def call", "def other"),
    ],
)
def test_what_is_not_understood_is_refused(old: str, new: str) -> None:
    assert old in CALL
    with pytest.raises(NotUnderstood):
        read_wrapper(CALL.replace(old, new))


def kernel(name: str, cubin: bytes, **signature: str) -> TritonKernel:
    class Kernel(TritonKernel):
        def grid_of(self, numbers: Any) -> tuple[int, int, int]:
            return (max(numbers.values()), 1, 1)

        def grid_texts(self) -> Any:
            return ["raw = -((xnumel) // -(XBLOCK))"], ("raw", "1", "1"), {"XBLOCK": 64}

    return Kernel(
        cubin=cubin,
        function=name,
        threads=128,
        shared=0,
        names=tuple(signature),
        signature={n: t for n, t in signature.items() if t != "constexpr"},
        scratch_pointers=2,
        grid={},
    )


def plan() -> CudaPlan:
    return make_plan(
        read_wrapper(CALL),
        {
            "triton_a": kernel("a", b"A", p="*bf16", s="fp32", q="*bf16", n="i32"),
            "triton_b": kernel("b", b"B", p="*bf16", q="*fp32", n="constexpr", m="i64"),
        },
    )


def test_a_plan_numbers_pointers_and_drops_constants() -> None:
    made = json.loads(plan().to_json())
    first, second = made["launches"]
    assert first["arguments"] == [
        ["pointer", 0, 0], ["input", 1, "float32"], ["pointer", 3, 0], ["value", "int32", 32],
        ["null"], ["null"],
    ]  # fmt: skip
    # The view begins 4 bfloat16 elements into the scratch buffer; n is a constant of the code.
    assert second["arguments"][:3] == [["pointer", 3, 8], ["pointer", 2, 0], ["value", "int64", 8]]
    assert (first["object"], second["object"]) == (0, 1)
    assert plan().cubins() == [b"A", b"B"]


def test_a_launch_that_does_not_fit_its_kernel_is_refused() -> None:
    good = kernel("b", b"B", p="*bf16", q="*fp32", n="i32", m="i32")
    for bad in (
        kernel("a", b"A", p="*bf16", s="fp32", q="*bf16"),
        kernel("a", b"A", p="*bf16", s="*fp32", q="*bf16", n="i32"),
        kernel("a", b"A", p="fp32", s="fp32", q="*bf16", n="i32"),
        kernel("a", b"A", p="*bf16", s="nvTmaDesc", q="*bf16", n="i32"),
    ):
        with pytest.raises(NotUnderstood):
            make_plan(read_wrapper(CALL), {"triton_a": bad, "triton_b": good})


def test_inductor_and_triton_make_plans_without_a_gpu(program: Program) -> None:
    pytest.importorskip("triton", reason="this torch has no Triton")
    result = program(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        import json, fake_cuda
        report(**fake_cuda.compile_some())
        """
    )
    assert result["aten::mm"] == "NoKernelOfItsOwn: no kernel of its own"
    mul = json.loads(result["aten::mul"])
    assert [a[0] for a in mul["launches"][0]["arguments"]][:3] == ["pointer", "input", "pointer"]
    two_stages = json.loads(result["aten::sum"])
    assert len(two_stages["launches"]) == 2 and len(two_stages["scratch"]) == 1
    norm = json.loads(result["aten::native_layer_norm"])
    assert [o["dtype"] for o in norm["outputs"]] == ["bfloat16", "float32", "float32"]
    backward = json.loads(result["aten::native_layer_norm_backward"])
    assert [o["sizes"] for o in backward["outputs"]] == [[32, 256, 768], [768], [768]]
    # One for rows and columns, and the sums of what its blocks left of the columns.
    functions = [launch["function"] for launch in backward["launches"]]
    assert 3 <= len(functions) <= 5 and len(backward["scratch"]) >= 1, functions
    assert result["machine_code"] is True
    assert "not aligned" in result["aten::abs"]
    each = json.loads(result["aten::_foreach_mul_"])
    assert each["writes"] == list(range(140)) and not each["outputs"]
    assert len(each["launches"]) <= 3, "each tensor of a list has a launch of its own"


OPEN_CALL = """
def call(args):
    arg0_1, = args
    args.clear()
    arg0_1_size = arg0_1.size()
    s17 = arg0_1_size[0]
    s55 = arg0_1_size[1]
    assert_size_stride(arg0_1, (s17, s55), (s55, 1))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        ps0 = 2*s55
        buf0 = empty_strided_cuda((s17, s55), (s55, 1), torch.bfloat16)
        buf1 = empty_strided_cuda((ps0, ), (1, ), torch.float32)
        triton_a_xnumel = s17*s55
        stream0 = get_raw_stream(0)
        triton_a.run(arg0_1, buf1, ps0, triton_a_xnumel, stream=stream0)
        buf2 = reinterpret_tensor(buf1, (s55, ), (1, ), s55); del buf1  # reuse
        triton_b.run(buf2, buf0, s55, s17 + 1, 4, stream=stream0)
    return (buf0, )
"""
SYMBOLS = Symbols(("s17", "s55"), (("s17", "s55"),), ("s17 >= 2L", "s17*s55 <= 2147483647L"))
PATTERN = {"symbols": [[2, 0, 0], [3, 0, 1]], "ties": [], "words": []}


OPEN_KERNELS = {
    "triton_a": kernel("a", b"A", p="*bf16", q="*fp32", ks0="i64", xnumel="i32"),
    "triton_b": kernel("b", b"B", p="*fp32", q="*bf16", ks0="i64", xnumel="i32", r="constexpr"),
}


def open_plan(text: str = OPEN_CALL, symbols: Symbols = SYMBOLS) -> CudaShapePlan:
    return make_open_plan(read_open(text, symbols), OPEN_KERNELS, symbols, PATTERN)


def numbers(made: dict[str, Any], places: Sequence[int], values: Sequence[int]) -> list[Any]:
    return [value_of(Expression(tuple(made["numbers"][place])), values) for place in places]


def test_a_plan_computes_what_depends_on_the_sizes() -> None:
    made = json.loads(open_plan().to_json([(1, True)]))
    sizes = (10, 12)
    (output,) = made["outputs"]
    assert numbers(made, output["sizes"], sizes) == [10, 12]
    assert numbers(made, output["strides"], sizes) == [12, 1]
    assert numbers(made, made["scratch"], sizes) == [96]
    assert numbers(made, [made["elements"]], sizes) == [120]
    first, second = made["launches"]
    assert numbers(made, first["grid"], sizes) == [2, 1, 1]
    assert first["arguments"][:2] == [["pointer", 0, 0], ["pointer", 2, 0]]
    kind, place, type_name = first["arguments"][2]
    assert (kind, type_name, *numbers(made, [place], sizes)) == ("number", "int64", 24)
    # The view begins a row into the scratch buffer; the last argument is a constant of the code.
    kind, pointer, place = second["arguments"][0]
    assert (kind, pointer, *numbers(made, [place], sizes)) == ("part", 2, 48)
    assert second["arguments"][4:] == [["null"], ["null"]]
    assert open_plan().admits(sizes) and not open_plan().admits((1, 12))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("triton_b.run(", "extern_kernels.mm("),
        ("s17 = arg0_1_size[0]", "s17 = arg0_1_size[2]"),
        ("s17 = arg0_1_size[0]", "s17 = arg0_1.shape[0]"),
        ("ps0 = 2*s55", "ps0 = 2*u0"),
        ("ps0 = 2*s55", "ps0 = s55 / 2"),
        ("arg0_1.size()", "arg0_1.stride()"),
        ("return (buf0, )", "return (buf2, )"),
        ("return (buf0, )", "return (arg0_1, )"),
        ("(ps0, ), (1, )", "(s99, ), (1, )"),
        ("buf1, ps0,", "buf1, ps0 / 2,"),
        ("s17 + 1, 4", "s17 + 1"),
    ],
)
def test_what_is_not_understood_of_open_sizes_is_refused(old: str, new: str) -> None:
    assert old in OPEN_CALL
    with pytest.raises(NotUnderstood):
        made = open_plan(OPEN_CALL.replace(old, new))
        # A part of a buffer where the whole is returned is a condition, which no size meets.
        if not made.admits((10, 12)):
            raise NotUnderstood("the call itself is not admitted")


def test_strides_of_single_rows_are_natives() -> None:
    text = OPEN_CALL.replace(
        "buf0 = empty_strided_cuda((s17, s55), (s55, 1)",
        "buf0 = empty_strided_cuda((s17, s55, 1), (s55, 1, 7)",
    )
    made = open_plan(text)
    right = made.with_strides([((10, 12), [[12, 1, 1]]), ((3, 5), [[5, 1, 1]])])
    assert right.outputs[0].strides[2] == 1
    with pytest.raises(NotUnderstood):
        made.with_strides([((10, 12), [[1, 10, 1]])])
    with pytest.raises(NotUnderstood):  # a coincidence of one call's sizes
        made.with_strides([((10, 12), [[12, 1, 12]]), ((3, 5), [[5, 1, 1]])])


KNOWN = {"a": open_size(0), "b": open_size(1)}


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("-((a*b) // -(64))", "-((a*b) // -(64))"),
        ("max(a, b, 3)", "max(a, b, 3)"),
        ("(312 + 640*a) // 313", "(312 + 640*a) // 313"),
        ("c10::div_floor_integer(a, 4L) + b % 3L", "a // 4 + b % 3"),
        ("std::max(a, 7L) - std::min(b, 2L)", "max(a, 7) - min(b, 2)"),
        ("a >= 2L && b != a", "int(a >= 2 and b != a)"),
        ("a > 5L || b == 3L", "int(a > 5 or b == 3)"),
    ],
)
@given(a=st.integers(1, 1 << 20), b=st.integers(1, 1 << 20))
def test_an_expression_is_what_its_text_is(text: str, python: str, a: int, b: int) -> None:
    expected = eval(python, {"a": a, "b": b, "max": max, "min": min, "int": int})
    assert value_of(read_size(text, KNOWN), (a, b)) == expected


def test_what_is_known_is_folded() -> None:
    a = KNOWN["a"]
    assert read_size("0 + 1*a", KNOWN) == a
    assert read_size("3*4 - 2", KNOWN) == 10
    assert at_most(a, a) == 1 and equal(a + 1, a + 1) == 1
    assert at_most(3, 2) == 0 and largest([1, a, a]) == a


def test_what_the_hook_would_refuse_is_refused() -> None:
    value: Size = KNOWN["a"]
    with pytest.raises(NotUnderstood):
        for _ in range(200):
            value = value + 1
    assert len(steps_of(value)) <= MAX_STEPS
    assert value_of(read_size("a*a", KNOWN), (1 << 40, 1)) is None
    assert value_of(read_size("b // (a - a)", KNOWN), (1, 1)) is None
    for text in ("a.b", "f(a)", "a if b else 1", "a**b", "a[0]", "'s'", "1.5"):
        with pytest.raises(NotUnderstood):
            read_size(text, KNOWN)


def test_inductor_and_triton_take_numbers_as_arguments_without_a_gpu(program: Program) -> None:
    pytest.importorskip("triton", reason="this torch has no Triton")
    result = program(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        import fake_cuda
        report(**fake_cuda.compile_scalars())
        """
    )
    passed = {}
    for name in ("add", "div_", "addcdiv_", "_foreach_add_", "_foreach_addcdiv_"):
        made = json.loads(result[f"aten::{name}"])
        kinds = ("scalar", "inverse")
        rows = [a for launch in made["plan"]["launches"] for a in launch["arguments"]]
        passed[name] = made["scalars"], [row for row in rows if row[0] in kinds]
    assert passed["add"] == (1, [["scalar", 0, "float32"]])
    assert passed["div_"] == (1, [["inverse", 0, "float32"]])
    assert passed["addcdiv_"] == (1, [["scalar", 0, "float64"]])
    assert set(map(tuple, passed["_foreach_add_"][1])) == {("scalar", 0, "float32")}
    each = [["scalar", index, "float32"] for index in range(6)]
    assert passed["_foreach_addcdiv_"] == (6, each)
    assert "no number" in result["aten::mm"]


KERNEL = """
triton_a = async_compile.triton('triton_a', '''
@triton_heuristics.pointwise(
    triton_meta={'signature': {'in_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}})
@triton.jit
def triton_a(in_ptr0, xnumel, XBLOCK : tl.constexpr):
    # 0.25 of it
    tmp1 = tl.full([1], 1.0078125, tl.float32)
    tmp2 = tmp0 * -1.0078125 + 2.5
''', device_str='cuda')
def call(args):
    triton_a.run(arg0_1, 24, stream=stream0)
"""


def test_each_number_gets_a_parameter_behind_those_of_every_launch() -> None:
    others = KERNEL.replace("1.0078125", "1.0234375").replace("of it", "of another")
    text = read_scalar_text(KERNEL, [1.0078125], others, [1.0234375])
    assert "def triton_a(in_ptr0, xnumel, eagercache_argument_0, XBLOCK : tl.constexpr):" in text
    assert "'xnumel': 'i32', 'eagercache_argument_0': 'fp32', 'XBLOCK'" in text
    assert "tmp2 = tmp0 * -eagercache_argument_0 + 2.5" in text
    assert "triton_a.run(arg0_1, 24, eagercache_scalars[0], stream=stream0)" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ 2.5", "+ 3.5"),  # in one of both
        ("'xnumel': 'i32'", "'other': 'i32'"),
        ("'*fp32'", "'*fp64', 'in_ptr1': '*fp32'"),
        ("tl.float32", "tl.float64"),
        ("1.0078125", "4.0"),
        ("def triton_a(", "def triton_b("),
    ],
)
def test_what_else_depends_on_numbers_is_refused(old: str, new: str) -> None:
    assert old in KERNEL
    first = KERNEL.replace(old, new)
    second = (first if "3.5" not in new else KERNEL).replace("1.0078125", "1.0234375")
    with pytest.raises(NotUnderstood):
        read_scalar_text(first, [1.0078125], second, [1.0234375])


def test_inductor_and_triton_make_plans_of_open_sizes_without_a_gpu(program: Program) -> None:
    pytest.importorskip("triton", reason="this torch has no Triton")
    result = program(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        import fake_cuda
        report(**fake_cuda.compile_open())
        """
    )
    assert result["aten::mm"] == "NoKernelOfItsOwn: no kernel of its own"
    tanh = json.loads(result["aten::tanh"])
    assert numbers(tanh, tanh["outputs"][0]["sizes"], (7, 9)) == [7, 9]
    norm = json.loads(result["aten::native_layer_norm"])
    assert [output["dtype"] for output in norm["outputs"]] == ["bfloat16", "float32", "float32"]
    assert numbers(norm, norm["outputs"][1]["strides"], (50,)) == [50, 1, 1]
    added = json.loads(result["aten::add"])
    guards = [Expression(tuple(steps)) for steps in added["guards"]]
    assert all(value_of(guard, (50, 50)) for guard in guards)
    assert not all(value_of(guard, (50, 51)) for guard in guards)
    two_stages = json.loads(result["aten::sum"])
    assert len(two_stages["launches"]) == 2 and len(two_stages["scratch"]) == 1
    assert "launches" in json.loads(result["aten::_softmax"])
