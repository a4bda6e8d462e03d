"""Launch plans are read from AOTInductor's text, or the text is refused."""

from __future__ import annotations

import json

import pytest
from eagercache.worker.inductor.launch_plan import ENTRY_PREFIX, read_launch_plan
from eagercache.worker.inductor.wrapper_statements import NotUnderstood

KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  cpp_fused_a_0(const float* in_ptr0,
                       float* out_ptr0)
{
    #pragma omp parallel num_threads(2)
    out_ptr0[0] = in_ptr0[0];
}
extern "C"  void  cpp_fused_b_1(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{
    out_ptr0[0] = in_ptr0[ks0];
}
"""

BODY = """
    __check_inputs_outputs(input_handles, output_handles);
    auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 2);
    auto arg0_1 = std::move(inputs[0]);
    auto arg1_1 = std::move(inputs[1]);
    inputs.clear();
    [[maybe_unused]] auto& kernels = static_cast<AOTInductorModelKernels&>(*this->kernels_.get());
    if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(arg0_1, {4L, 1L}, {1L, 1L}, "input"); }
    static constexpr int64_t int_array_0[] = {4L, 1L};
    static constexpr int64_t int_array_1[] = {1L, 4L};
    static constexpr int64_t *int_array_2=nullptr;
    AtenTensorHandle buf0_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, int_array_0, int_array_1, cached_torch_dtype_float32, cached_torch_device_type_cpu, this->device_idx_, &buf0_handle));
    RAIIAtenTensorHandle buf0(buf0_handle);
    AtenTensorHandle buf1_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(0, int_array_2, int_array_2, cached_torch_dtype_bfloat16, cached_torch_device_type_cpu, this->device_idx_, &buf1_handle));
    RAIIAtenTensorHandle buf1(buf1_handle);
    auto buf2 = wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf0, 1, int_array_1, int_array_0, 3L));  // alias
    cpp_fused_a_0((const float*)(arg0_1.data_ptr()), (float*)(buf2.data_ptr()));
    buf2.reset();
    auto buf3 = std::move(buf0);  // reuse
    cpp_fused_b_1((const float*)(arg1_1.data_ptr()), (float*)(buf1.data_ptr()), 7L);
    arg0_1.reset();
    arg1_1.reset();
    output_handles[0] = buf3.release();
"""  # noqa: E501 - as it is generated


def wrapper(body: str = BODY) -> str:
    return (
        "void AOTInductorModel::run_impl(\n    AtenTensorHandle* input_handles, // array\n) {"
        + body
        + "} // AOTInductorModel::run_impl\n"
    )


def test_a_wrapper_becomes_a_plan() -> None:
    plan = read_launch_plan(wrapper(), KERNEL)
    assert json.loads(plan.to_json()) == {
        "version": 2,
        "writes": [],
        "entry": plan.entry,
        "inputs": 2,
        "outputs": [{"dtype": "float32", "sizes": [4, 1], "strides": [1, 4]}],
        "scratch": [2],
    }
    assert plan.entry.startswith(ENTRY_PREFIX)
    assert "cpp_fused_a_0((const float*)(p[0]), (float*)(p[2]) + 3);" in plan.source
    assert "cpp_fused_b_1((const float*)(p[1]), (float*)(p[3]), 7L);" in plan.source
    assert 'extern "C"  void' not in plan.source and "#include" not in plan.source


def test_an_input_that_a_kernel_takes_as_non_const_is_written() -> None:
    body = BODY.replace("(const float*)(arg1_1.data_ptr())", "(float*)(arg1_1.data_ptr())")
    plan = read_launch_plan(wrapper(body), KERNEL)
    assert plan.writes == (1,)
    assert "cpp_fused_b_1((float*)(p[1]), (float*)(p[3]), 7L);" in plan.source
    without = body.replace("    output_handles[0] = buf3.release();\n", "")
    assert read_launch_plan(wrapper(without), KERNEL).outputs == ()


def test_equal_text_gives_an_equal_entry_and_other_text_another() -> None:
    plan = read_launch_plan(wrapper(), KERNEL)
    assert read_launch_plan(wrapper(), KERNEL) == plan
    assert read_launch_plan(wrapper(), KERNEL.replace("[0] =", "[1] =")).entry != plan.entry
    assert read_launch_plan(wrapper(BODY.replace("7L", "8L")), KERNEL).entry != plan.entry


def test_strides_of_dimensions_of_size_one_are_natives() -> None:
    plan = read_launch_plan(wrapper(), KERNEL)
    assert plan.with_strides([[1, 1]]).outputs[0].strides == (1, 1)
    assert plan.with_strides([[2, 1]]).outputs[0].strides == (1, 4)
    assert plan.with_strides([]).outputs == plan.outputs


def test_pointers_that_have_their_buffer_to_themselves_are_distinct() -> None:
    plan = read_launch_plan(wrapper(), KERNEL, distinct=True)
    # Each has one argument of each buffer; numbers are no pointers.
    assert "cpp_fused_b_1(const float* __restrict__ in_ptr0, float* __restrict__ out_ptr0, " in (
        plan.source
    )
    assert "const int64_t ks0)" in plan.source
    assert "[[gnu::noinline]]\nstatic void cpp_fused_b_1(" in plan.source  # else it is forgotten
    assert plan.entry != read_launch_plan(wrapper(), KERNEL).entry
    assert "__restrict__" not in read_launch_plan(wrapper(), KERNEL).source


def test_pointers_into_one_buffer_are_not_distinct() -> None:
    # Another call of the kernel has both arguments in one buffer, one of them a view of it.
    again = (
        "    auto buf4 = wrap_with_raii_handle_if_needed("
        "reinterpret_tensor_wrapper(buf3, 1, int_array_1, int_array_0, 3L));\n"
        "    cpp_fused_b_1((const float*)(buf4.data_ptr()), (float*)(buf3.data_ptr()), 8L);\n"
    )
    body = BODY.replace("    arg0_1.reset();\n", again)
    source = read_launch_plan(wrapper(body), KERNEL, distinct=True).source
    assert "cpp_fused_b_1(const float* in_ptr0, float* out_ptr0, " in source
    assert "cpp_fused_a_0(const float* __restrict__ in_ptr0," in source


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("buf2.reset();", "aoti_torch_cpu_mm_out(buf2, arg0_1, arg1_1);"),
        ("buf2.reset();", "buf9.reset();"),
        ("buf2.reset();", "if (true) { buf2.reset(); }"),
        ("cpp_fused_b_1(", "cpp_fused_c_2("),
        ("7L)", "buf1_size)"),
        ("dtype_bfloat16", "dtype_float8_e4m3fn"),
        ("device_type_cpu", "device_type_cuda"),
        ("int_array_0, 3L)", "int_array_0, 4L)"),
        ("auto buf3 = std::move(buf0);", "auto buf3 = std::move(arg0_1);"),
        ("output_handles[0]", "output_handles[1]"),
        ("output_handles[0] = buf3.release();", ""),
        ("{4L, 1L};", "{4L, s0};"),
        ("int_array_0[] = {4L, 1L}", "int_array_0[] = {0L, 1L}"),
        ("(input_handles, 2)", "(input_handles, 1)"),
        ("output_handles[0] = buf3.release();", "output_handles[0] = buf3.release()"),
        (
            "output_handles[0] = buf3.release();",
            "auto v = wrap_with_raii_handle_if_needed("
            "reinterpret_tensor_wrapper(buf3, 1, int_array_0, int_array_1, 0L));"
            "output_handles[0] = buf3.release(); output_handles[1] = v.release();",
        ),
        (
            "output_handles[0] = buf3.release();",
            "auto v = wrap_with_raii_handle_if_needed("
            "reinterpret_tensor_wrapper(buf3, 1, int_array_1, int_array_0, 0L));"
            "output_handles[0] = v.release();",
        ),
    ],
)
def test_text_of_another_form_is_refused(old: str, new: str) -> None:
    assert old in BODY
    with pytest.raises(NotUnderstood):
        read_launch_plan(wrapper(BODY.replace(old, new, 1)), KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('extern "C"  void  cpp_fused_b_1', 'extern "C"  void  cpp_fused_a_0'),
        ('extern "C"  void  cpp_fused_b_1', 'extern "C"  int  cpp_fused_b_1'),
        ("#include <torch", "#define X\n#include <torch"),
        ("#pragma omp", "#error omp"),
    ],
)
def test_kernels_of_another_form_are_refused(old: str, new: str) -> None:
    with pytest.raises(NotUnderstood):
        read_launch_plan(wrapper(), KERNEL.replace(old, new, 1))


@pytest.mark.parametrize("text", ["", "int main() {}", wrapper("")])
def test_a_wrapper_without_calls_is_refused(text: str) -> None:
    with pytest.raises(NotUnderstood):
        read_launch_plan(text, KERNEL)
