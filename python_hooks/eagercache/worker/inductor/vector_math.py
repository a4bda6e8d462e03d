"""What kernels on CPU compute in another way than Inductor's text does.

exp and tanh of float32 vectors are inlined. The text calls Sleef for each vector: a call, in which
nothing stays in registers, and most of what a fused gate costs. PyTorch's own exp and tanh are
MKL's, twice and five times as fast as that; those here are about as fast as MKL's.

Sums are made in chunks. The text adds up to 4,096 numbers one after the other, which errs by
many times as much as native's pairwise sum where they are much alike.

erf is at::vec's, whose absolute error is bounded: near 0 it is off by any number of places, and a
GELU by seven where oneDNN's is by one and a half. The one here errs by less than one, takes about
as long, and is in every kernel.

exp and tanh do not give native's bits, so that only kernels get them which need not have those: of
functions, where neither deterministic algorithms nor bitwise kernels are asked for, and of modules
that are trained, whose gradients add up what native adds up in double (batch norm's). Sums are in
chunks in every kernel: of numbers that are much alike 24 are off by more than pairwise summation
may be. The chunks are of as many numbers as in native's own sum (at::native, cascade_sum).
"""

from __future__ import annotations

import re
from collections.abc import Callable

NAMESPACE = "eagercache_math"

# What Inductor writes for a vector; it names each value, so that operands are words (of a sigmoid,
# a negative one).
_CALLS = (
    (re.compile(r"\b(\w+(?:\.neg\(\))?)\.exp\(\)"), "exp"),
    (re.compile(r"\b(\w+)\.tanh\(\)"), "tanh"),
)
_ERF = re.compile(r"\b(\w+)\.erf\(\)")


def improved(text: str) -> str:
    """The text of kernels with all of it: functions that are inlined and sums in chunks."""
    for pattern, name in _CALLS:
        text = pattern.sub(rf"{NAMESPACE}::{name}(\1)", text)
    return corrected(text)


def corrected(text: str) -> str:
    """The text of kernels with what is never less exact: erf, and sums in chunks."""
    text = _CASCADE.sub(rf"\g<1>{_CHUNK}>", text)
    return _with_chunks(_ERF.sub(rf"{NAMESPACE}::erf(\1)", text))


def improved_container(text: str) -> str:
    """`improved` for a file of Inductor's that is compiled alone: with `SOURCE` in it."""
    return _alone(text, improved)


def corrected_container(text: str) -> str:
    """`corrected` for such a file."""
    return _alone(text, corrected)


def _alone(text: str, change: Callable[[str], str]) -> str:
    """Means and variances (Welford's), which the text splits by 4,096, have chunks of `_SHORT`.

    Native adds up a batch norm's in double, and pairwise a layer norm's.
    """
    better = change(_WELFORD.sub(rf"\g<1>{_SHORT}>", text))
    if better == text:
        return text
    head, include, rest = better.partition(_INCLUDE)  # each kernel has its own
    return f"{head}{include}\n{SOURCE}{rest}" if include else text


_SHORT = 64
_CHUNK = 16  # of a sum, as in `SOURCE`
_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"
# Not a static one: it is meant for no more than one chunk, and begins once in a process.
_CASCADE = re.compile(r"^( *CascadeSumHelper<.*, )4096>", re.MULTILINE)
_WELFORD = re.compile(r"^( *WelfordHelper<.*, )4096>", re.MULTILINE)

# An accumulator that begins at zero.
_SUM = re.compile(r"( *)(at::vec::Vectorized<float>|float) (\w*tmp_acc\w+) = (?:\2\(0\)|0);")


def _with_chunks(text: str) -> str:
    lines = text.split("\n")
    for start, line in enumerate(lines):
        found = _SUM.fullmatch(line)
        if found is None:
            continue
        indent, kind, name = found.groups()
        # To the next accumulator of that name, or the end of the block that this one is in.
        last = re.compile(rf"{indent[:-4]}}}.*| *[\w:<>]+ {name} = .*")
        numbers = range(start + 1, len(lines))
        end = next((n for n in numbers if last.fullmatch(lines[n])), len(lines))
        uses = [_use_of_sum(lines[number], name, kind) for number in range(start + 1, end)]
        if all(use is not None for use in uses):
            lines[start:end] = [f"{indent}{NAMESPACE}::Sum<{kind}> {name};", *map(str, uses)]
    return "\n".join(lines)


def _use_of_sum(line: str, name: str, kind: str) -> str | None:
    """The line where ``name`` is a sum in chunks; None where it is used otherwise than a sum."""
    if not re.search(rf"\b{name}\b", line):
        return line
    added = re.fullmatch(rf"( *){name} = {name} \+ (.*);", line)
    masked = re.fullmatch(rf"( *){name} = sum_masked_reduce\({name}, (\w+), (.*)\);", line)
    if added is not None and not re.search(rf"\b{name}\b", added[2]):
        return f"{added[1]}{name}.add({added[2]});"
    if masked is not None:
        return f"{masked[1]}{name}.add(sum_masked_reduce({kind}(0), {masked[2]}, {masked[3]}));"
    if re.search(rf"\b{name}\b *[-+*/]?= ", line):
        return None
    return re.sub(rf"\b{name}\b", f"{name}.total()", line)


# exp: n = round(x log2(e)), r = x - n ln(2) in two steps, 2^n (1 + r + r^2 q(r)) with the q of
# degree 4 whose largest relative error is least (0.06 units). 2^n is put in so that overflow,
# underflow and denormals come out as they should; x is held within what does not overflow n, with
# NaN as the operand that min and max hand on.
# The error is at most one unit in the last place.
# tanh: of e = exp(-2|x|) and m = e - 1, which is made as exactly, -m / (1 + e) with the sign of x;
# nothing cancels on the way. From e = 1/4 down it is 1 - 2e / (1 + e), since a gradient is made of
# how far it is from 1. The error is at most 2.5 units, from there on at most 1.25.
# erf: x + x p(x^2) up to 0.9, and 1 - exp(q(|x|)) from there on, of which p and q, of degree 5 and
# 6, have the least largest error of erf. At most one unit.
SOURCE = """
#ifndef EAGERCACHE_VECTOR_MATH
#define EAGERCACHE_VECTOR_MATH
namespace eagercache_math {
// Up to sixteen numbers are added up, then so many sums, then the sums of those.
template <typename T> class Sum {
 public:
  void add(const T& x) {
    ones_ = ones_ + x;
    if ((++count_ & 15U) == 0) [[unlikely]] {
      chunks_ = chunks_ + ones_;
      ones_ = T(0);
      if (count_ == 256) {
        all_ = all_ + chunks_;
        chunks_ = T(0);
        count_ = 0;
      }
    }
  }
  T total() const { return all_ + (chunks_ + ones_); }

 private:
  T ones_ = T(0);
  T chunks_ = T(0);
  T all_ = T(0);
  unsigned count_ = 0;
};
template <typename T> inline T exp(const T& x) { return x.exp(); }
template <typename T> inline T tanh(const T& x) { return x.tanh(); }
template <typename T> inline T erf(const T& x) { return x.erf(); }
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#if defined(CPU_CAPABILITY_AVX512)
using Lanes = __m512;
inline Lanes all(float x) { return _mm512_set1_ps(x); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes fnma(Lanes a, Lanes b, Lanes c) { return _mm512_fnmadd_ps(a, b, c); }
inline Lanes least(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes largest(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes rounded(Lanes x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Lanes scaled(Lanes x, Lanes n) { return _mm512_scalef_ps(x, n); }
inline Lanes where_less(Lanes a, Lanes b, Lanes x, Lanes y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
inline Lanes without_sign(Lanes x) { return _mm512_andnot_ps(all(-0.0f), x); }
inline Lanes with_sign(Lanes x, Lanes sign) {
  return _mm512_or_ps(x, _mm512_and_ps(all(-0.0f), sign));
}
#else
using Lanes = __m256;
inline Lanes all(float x) { return _mm256_set1_ps(x); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
inline Lanes fnma(Lanes a, Lanes b, Lanes c) { return _mm256_fnmadd_ps(a, b, c); }
inline Lanes least(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
inline Lanes largest(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
inline Lanes rounded(Lanes x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Lanes power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline Lanes scaled(Lanes x, Lanes n) {  // in two steps: 2^n may be no float
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(half)),
                       power_of_two(_mm256_sub_epi32(whole, half)));
}
inline Lanes where_less(Lanes a, Lanes b, Lanes x, Lanes y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline Lanes without_sign(Lanes x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Lanes with_sign(Lanes x, Lanes sign) {
  return _mm256_or_ps(x, _mm256_and_ps(all(-0.0f), sign));
}
#endif
// r + r^2 q(r), and n; x is between -104 and 89, or NaN.
inline Lanes reduced_expm1(Lanes x, Lanes* n) {
  *n = rounded(x * all(0x1.715476p+0f));
  const Lanes r = fnma(*n, all(-0x1.05c61p-29f), fnma(*n, all(0x1.62e43p-1f), x));
  Lanes q = fma(all(0x1.6a23cep-10f), r, all(0x1.123a2p-7f));
  q = fma(q, r, all(0x1.5558f2p-5f));
  q = fma(q, r, all(0x1.555492p-3f));
  q = fma(q, r, all(0x1.fffffcp-2f));
  return fma(r * r, q, r);
}
inline Lanes exp_of(Lanes x) {
  Lanes n;
  const Lanes p = reduced_expm1(least(all(89.0f), largest(all(-104.0f), x)), &n);
  return scaled(p + all(1.0f), n);
}
inline Lanes tanh_of(Lanes x) {
  Lanes n;
  const Lanes p = reduced_expm1(largest(all(-20.0f), without_sign(x) * all(-2.0f)), &n);
  const Lanes power = scaled(all(1.0f), n);
  const Lanes m = fma(power, p, power - all(1.0f)), e = fma(power, p, power);
  const Lanes part = where_less(e, all(0.25f), e + e, without_sign(m)) / (e + all(1.0f));
  return with_sign(where_less(e, all(0.25f), all(1.0f) - part, part), x);
}
inline Lanes erf_of(Lanes x) {
  const Lanes size = without_sign(x), square = size * size;
  Lanes p = fma(all(-0x1.3c6124p-11f), square, all(0x1.47c716p-8f));
  p = fma(p, square, all(-0x1.b6a24ep-6f));
  p = fma(p, square, all(0x1.ce1bf0p-4f));
  p = fma(p, square, all(-0x1.8126eep-2f));
  p = fma(p, square, all(0x1.06eba6p-3f));
  const Lanes t = least(all(4.0f), size);  // from there on the answer is 1
  Lanes q = fma(all(0x1.9fb470p-13f), t, all(-0x1.91cd90p-9f));
  q = fma(q, t, all(0x1.6d9d00p-6f));
  q = fma(q, t, all(-0x1.aa7328p-4f));
  q = fma(q, t, all(-0x1.4621bap-1f));
  q = fma(q, t, all(-0x1.20b752p+0f));
  q = fma(q, t, all(-0x1.5d104ep-13f));
  Lanes n;
  const Lanes e = reduced_expm1(q, &n);
  const Lanes power = scaled(all(1.0f), n);
  const Lanes far = fnma(power, e, all(1.0f) - power);
  return with_sign(where_less(size, all(0.9f), fma(size, p, size), far), x);
}
using Floats = at::vec::Vectorized<float>;
template <int N> using ManyFloats = at::vec::VectorizedN<float, N>;
inline Floats exp(const Floats& x) { return Floats(exp_of(x)); }
inline Floats tanh(const Floats& x) { return Floats(tanh_of(x)); }
inline Floats erf(const Floats& x) { return Floats(erf_of(x)); }
template <int N> inline ManyFloats<N> exp(const ManyFloats<N>& x) {
  return x.unary_op([](const Floats& part) { return exp(part); });
}
template <int N> inline ManyFloats<N> tanh(const ManyFloats<N>& x) {
  return x.unary_op([](const Floats& part) { return tanh(part); });
}
template <int N> inline ManyFloats<N> erf(const ManyFloats<N>& x) {
  return x.unary_op([](const Floats& part) { return erf(part); });
}
#endif
}  // namespace eagercache_math
#endif
"""
