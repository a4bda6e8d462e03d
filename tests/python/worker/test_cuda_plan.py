"""CUDA wrappers are read into plans, or refused; no GPU is needed for any of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Program
from eagercache.worker.cuda.plan import CudaPlan, TritonKernel, make_plan
from eagercache.worker.cuda.wrapper import Number, read_wrapper
from eagercache.worker.inductor.wrapper_statements import NotUnderstood

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
