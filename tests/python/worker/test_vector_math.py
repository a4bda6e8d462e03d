"""exp, tanh and erf of vectors, as kernels have them inlined."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

import pytest
import torch
from eagercache.base import toolchain
from eagercache.base.load import core
from eagercache.base.toolchain import AVX2, AVX512, Isa
from eagercache.worker.inductor import vector_math

pytestmark = pytest.mark.once

# What of at::vec the functions touch, and a loop for each of them.
PROGRAM = """
#include <immintrin.h>
namespace at::vec {
template <typename T> struct Vectorized;
template <> struct Vectorized<float> {
  VECTOR values;
  explicit Vectorized(VECTOR v) : values(v) {}
  operator VECTOR() const { return values; }
};
template <typename T, int N> struct VectorizedN;
template <int N> struct VectorizedN<float, N> {
  Vectorized<float> values[N];
  template <typename F> VectorizedN unary_op(F f) const {
    VectorizedN result = *this;
    for (auto& value : result.values) value = f(value);
    return result;
  }
};
}  // namespace at::vec
SOURCE
#define LOOP(name)                                                                          \\
  extern "C" void name(const float* in, float* out, long count) {                           \\
    constexpr long kWidth = sizeof(VECTOR) / sizeof(float);                                 \\
    for (long i = 0; i < count; i += 2 * kWidth) {                                          \\
      using at::vec::Vectorized;                                                            \\
      const at::vec::VectorizedN<float, 2> x{                                               \\
          {Vectorized<float>(LOAD(in + i)), Vectorized<float>(LOAD(in + i + kWidth))}};     \\
      const auto y = eagercache_math::name(x);                                              \\
      STORE(out + i, y.values[0]);                                                          \\
      STORE(out + i + kWidth, y.values[1]);                                                 \\
    }                                                                                       \\
  }
extern "C" float chunked(const float* in, long count) {
  eagercache_math::Sum<float> sum;
  for (long i = 0; i < count; ++i) sum.add(in[i]);
  return sum.total();
}
extern "C" float one_by_one(const float* in, long count) {
  float sum = 0;
  for (long i = 0; i < count; ++i) sum += in[i];
  return sum;
}
LOOP(exp)
LOOP(tanh)
LOOP(erf)
"""
PREFIX = {"avx512": "_mm512", "avx2": "_mm256"}
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "erf": torch.erf,
}
MOST = {"exp": 1.0, "tanh": 2.5, "erf": 1.0}  # units in the last place


@pytest.fixture(scope="module", params=[AVX512, AVX2], ids=lambda isa: isa.name)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    isa: Isa = request.param
    assert core is not None
    if not set(isa.features) <= set(core.host_cpu_features()):
        pytest.skip(f"NOT RUN: this processor has no {isa.name}")
    folder = tmp_path_factory.mktemp(isa.name)
    source, target = folder / "functions.cpp", folder / "functions.so"
    source.write_text(PROGRAM.replace("SOURCE", vector_math.SOURCE, 1))
    prefix = PREFIX[isa.name]
    defines = {
        "VECTOR": prefix.replace("_mm", "__m"),
        "LOAD": f"{prefix}_loadu_ps",
        "STORE": f"{prefix}_storeu_ps",
        f"CPU_CAPABILITY_{isa.name.upper()}": "",
    }
    words = [toolchain.find_compiler().path, "-O3", "-std=c++17", "-shared", "-fPIC"]
    words += ["-ffp-contract=fast", "-fno-math-errno", "-fno-builtin", f"-march={isa.march}"]
    words += [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run([*words, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def answers(library: ctypes.CDLL, name: str, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
    getattr(library, name)(*pointers, ctypes.c_long(x.numel()))
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_error_is_what_is_promised_everywhere(library: ctypes.CDLL, name: str) -> None:
    # Every 2,048th float, of both signs, denormals and NaN among them.
    bits = torch.arange(-(1 << 31), 1 << 31, 1 << 11, dtype=torch.int64).to(torch.int32)
    dense = torch.linspace(-110, 110, 1 << 18)
    x = torch.cat([bits.view(torch.float32), dense, dense / 64])
    exact = FUNCTIONS[name](x.double())
    y = answers(library, name, x)
    native = exact.float()
    assert torch.equal(torch.isnan(y), torch.isnan(x))
    known = torch.isfinite(native)
    assert torch.equal(y[~known & ~torch.isnan(x)], native[~known & ~torch.isnan(x)])
    size = native.abs().clamp_min(2.0**-126)[known]
    unit = torch.exp2(torch.floor(torch.log2(size.double())) - 23)
    error = (y.double()[known] - exact[known]).abs() / unit
    worst = error.argmax()
    assert error[worst] <= MOST[name], (x[known][worst].item(), error[worst].item())
    assert error.mean() < 0.2


def test_a_tanh_near_one_is_as_far_from_it_as_it_should_be(library: ctypes.CDLL) -> None:
    # A gradient is made of what is left of 1: native's own proof allows it little more than one.
    x = torch.linspace(0.75, 9, 1 << 18)
    error = (answers(library, "tanh", x).double() - torch.tanh(x.double())).abs()
    assert error.max() * 2**24 <= 1.25


def test_signs_of_zero_and_infinities_are_those_of_the_functions(library: ctypes.CDLL) -> None:
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38]
    x = torch.tensor(special * 4)
    for name, function in FUNCTIONS.items():
        y, native = answers(library, name, x), function(x)
        assert torch.equal(y.isnan(), native.isnan())
        assert torch.equal(y.nan_to_num(9.0), native.nan_to_num(9.0)), name
        assert torch.equal(y.signbit(), native.signbit()) or name == "exp"


def test_inductors_text_is_rewritten_where_it_calls_them() -> None:
    text = (
        "auto tmp1 = decltype(tmp0)(1)/(decltype(tmp0)(1) + tmp0.neg().exp());\n"
        "auto tmp2 = tmp1.exp();\nauto tmp3 = std::exp(tmp2);\nauto tmp4 = tmp3.tanh();\n"
        "auto tmp5 = tmp4.expm1();\nauto tmp6 = tmp5.erf();\n"
    )
    assert vector_math.corrected(text) == text.replace("tmp5.erf()", "eagercache_math::erf(tmp5)")
    assert vector_math.improved(text) == (
        "auto tmp1 = decltype(tmp0)(1)/(decltype(tmp0)(1) + eagercache_math::exp(tmp0.neg()));\n"
        "auto tmp2 = eagercache_math::exp(tmp1);\nauto tmp3 = std::exp(tmp2);\n"
        "auto tmp4 = eagercache_math::tanh(tmp3);\nauto tmp5 = tmp4.expm1();\n"
        "auto tmp6 = eagercache_math::erf(tmp5);\n"
    )


@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 256, 257, 4096, 100_000])
def test_sums_in_chunks_lose_little(library: ctypes.CDLL, count: int) -> None:
    x = torch.full((count,), 0.1)
    errors = []
    for name in ("chunked", "one_by_one"):
        add = getattr(library, name)
        add.restype = ctypes.c_float
        total = add(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(count))
        errors.append(abs(total / x.double().sum().item() - 1) * 2**24)
    assert errors[0] <= 12
    assert count < 256 or errors[0] < errors[1]


def test_only_accumulators_that_are_sums_alone_become_sums_in_chunks() -> None:
    text = """
            {
                float tmp_acc0 = 0;
                at::vec::Vectorized<float> tmp_acc0_vec = at::vec::Vectorized<float>(0);
                at::vec::Vectorized<float> masked_tmp_acc0_vec = at::vec::Vectorized<float>(0);
                for(;;)
                {
                    tmp_acc0_vec = tmp_acc0_vec + tmp1;
                    masked_tmp_acc0_vec = sum_masked_reduce(masked_tmp_acc0_vec, tmp2, tail);
                }
                tmp_acc0 = tmp_acc0 + reduce(tmp_acc0_vec);
                out_ptr0[x0] = static_cast<float>(tmp_acc0);
            }
            {
                float tmp_acc0 = -std::numeric_limits<float>::infinity();
                float tmp_acc1 = 0;
                tmp_acc0 = max_propagate_nan(tmp_acc0, tmp1);
                tmp_acc1 = other(tmp_acc1, tmp1);
            }
"""
    assert (
        vector_math.improved(text)
        == """
            {
                eagercache_math::Sum<float> tmp_acc0;
                eagercache_math::Sum<at::vec::Vectorized<float>> tmp_acc0_vec;
                eagercache_math::Sum<at::vec::Vectorized<float>> masked_tmp_acc0_vec;
                for(;;)
                {
                    tmp_acc0_vec.add(tmp1);
                    masked_tmp_acc0_vec.add(sum_masked_reduce(VECTOR(0), tmp2, tail));
                }
                tmp_acc0.add(reduce(tmp_acc0_vec.total()));
                out_ptr0[x0] = static_cast<float>(tmp_acc0.total());
            }
            {
                float tmp_acc0 = -std::numeric_limits<float>::infinity();
                float tmp_acc1 = 0;
                tmp_acc0 = max_propagate_nan(tmp_acc0, tmp1);
                tmp_acc1 = other(tmp_acc1, tmp1);
            }
""".replace("VECTOR", "at::vec::Vectorized<float>")
    )


def test_sums_are_in_chunks_where_functions_stay() -> None:
    text = """
            {
                float tmp_acc0 = 0;
                at::vec::Vectorized<float> tmp_acc0_vec = at::vec::Vectorized<float>(0);
                tmp_acc0_vec = tmp_acc0_vec + tmp1.exp();
                tmp_acc0 = tmp_acc0 + tmp2;
                double tmp_acc1 = 0;
                tmp_acc1 = tmp_acc1 + tmp3;
                out_ptr0[x0] = tmp_acc0;
            }
"""
    vector = "at::vec::Vectorized<float>"
    assert vector_math.corrected(text) == (
        text.replace("float tmp_acc0 = 0;", "eagercache_math::Sum<float> tmp_acc0;")
        .replace(
            f"{vector} tmp_acc0_vec = {vector}(0);", f"eagercache_math::Sum<{vector}> tmp_acc0_vec;"
        )
        .replace("tmp_acc0_vec = tmp_acc0_vec + tmp1.exp();", "tmp_acc0_vec.add(tmp1.exp());")
        .replace("tmp_acc0 = tmp_acc0 + tmp2;", "tmp_acc0.add(tmp2);")
        .replace("= tmp_acc0;", "= tmp_acc0.total();")
    )


def test_long_sums_of_a_container_have_short_chunks() -> None:
    vector = "at::vec::Vectorized<float>"
    head = '\n#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel()\n{\n'
    text = f"""    {vector} tmp_acc0_vec = {vector}(0);
    CascadeSumHelper<{vector}, 4096> cascade_helper0(static_cast<int64_t>(12544L));
    WelfordHelper<{vector}, 4096> welford_helper0(static_cast<int64_t>(12544L));
    static WelfordHelper<{vector}, 4096> masked_helper0(static_cast<int64_t>(0L));
    tmp_acc0_vec = cascade_sum_combine(tmp1, &cascade_helper0);
    tmp_acc0_vec = cascade_sum_final(&cascade_helper0);
}}

#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void other_kernel()
{{
}}
"""
    shorter = text.replace(
        f"    CascadeSumHelper<{vector}, 4096>", f"    CascadeSumHelper<{vector}, 16>"
    )
    shorter = shorter.replace(
        f"\n    WelfordHelper<{vector}, 4096>", f"\n    WelfordHelper<{vector}, 64>"
    )
    found = vector_math.improved_container(head + text)
    assert found == head.replace(".h>", f".h>\n{vector_math.SOURCE}", 1) + shorter
    same = head + "    auto tmp0 = in_ptr0[0];\n}\n"
    assert vector_math.improved_container(same) == same
