"""What Inductor's lowerings are to compute, which is not what they compute: what native does.

They hold for every graph that a worker compiles: a single operator's, a function's, a module's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def compute_as_native() -> None:
    """Puts all of it in place. Imports Inductor."""
    _compute_as_cpu_does()
    _keep_infinite_means()
    _keep_small_numbers()
    _keep_booleans()
    _take_exact_functions()
    _take_exact_remainders()
    _keep_signs()
    _compute_checked_indices_anew()


def _compute_as_cpu_does() -> None:
    """Has Inductor decompose what torch lowers from 2.12 on in the order of CUDA's kernels, on CPU.

    Native computes ``self + value * tensor1 / tensor2`` from the left there, as the decompositions
    do that 2.12 took out; in any other order the last bit differs.
    """
    import torch
    from torch._decomp import decomposition_table
    from torch._inductor.decomposition import decompositions

    aten = torch.ops.aten
    for op in (aten.addcmul.default, aten.addcdiv.default, aten.lerp.Scalar, aten.lerp.Tensor):
        if op not in decompositions and op in decomposition_table:
            decompositions[op] = _on_cpu(decomposition_table[op])


def _on_cpu(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decomposition)
    def decompose(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.device.type != "cpu":
            return NotImplemented  # the operator stays as it is
        return decomposition(first, *args, **kwargs)

    return decompose


@functools.cache
def _keep_infinite_means() -> None:
    """Has kernels on CPU sum where Inductor's running mean (Welford's) has no answer, only there.

    Beside an infinity that is NaN, unless the infinity is the last number in an order of the
    kernel's own; native's order is another one, and where it keeps the infinity so must a kernel.
    A sum's mean, which Inductor takes for short rows, is further off than native's running one by
    what the row's numbers are larger than their differences.
    """
    import torch
    from torch._inductor import lowering

    aten = torch.ops.aten
    running, summing = lowering.var_mean_welford_, lowering.var_mean_sum_

    def lower(x: Any, axis: Any, *, keepdim: bool, return_mean: bool, **others: Any) -> Any:
        results = running(x, axis, keepdim=keepdim, return_mean=return_mean, **others)
        if not return_mean or x.get_device().type != "cpu":
            return results
        variance, mean = results
        summed = lowering.mean(x, axis, keepdim)
        no_answer = lowering.lowerings[aten.ne.Tensor](mean, mean)
        return variance, lowering.lowerings[aten.where.self](no_answer, summed, mean)

    def lower_short(x: Any, axis: Any, *, return_mean: bool, **others: Any) -> Any:
        on_cpu = return_mean and x.get_device().type == "cpu"
        return (lower if on_cpu else summing)(x, axis, return_mean=return_mean, **others)

    lowering.var_mean_welford_, lowering.var_mean_sum_ = lower, lower_short


@functools.cache
def _keep_small_numbers() -> None:
    """Has kernels on CPU give a small number as its own tanh, in float32 and half precision.

    It is, but for less than half of the last place; the vector function is off by one place there.
    In double precision such numbers would have to be smaller by far, and its function is native's.
    """
    import torch
    from torch._inductor import lowering

    narrow = (torch.float32, torch.float16, torch.bfloat16)
    aten = torch.ops.aten
    table = lowering.lowerings
    original = table[aten.tanh.default]

    @functools.wraps(original)
    def lower(x: Any) -> Any:
        if x.get_device().type != "cpu" or x.get_dtype() not in narrow:
            return original(x)
        small = table[aten.lt.Scalar](table[aten.abs.default](x), 2.0**-13)
        return table[aten.where.self](small, x, original(x))

    for op in (aten.tanh, aten.tanh.default):
        if op in table:
            table[op] = lower


@functools.cache
def _keep_booleans() -> None:
    """Has kernels take the ``alpha`` of a sum of booleans for a boolean, as native does.

    Inductor multiplies by the integer, and on CPU stores the vectors of int64 that this makes where
    booleans are to lie: past the end of the result's memory.
    """
    import torch
    from torch._inductor import lowering

    aten = torch.ops.aten
    table = lowering.lowerings
    original = table[aten.add.Tensor]

    @functools.wraps(original)
    def lower(x: Any, y: Any, *, alpha: Any = None) -> Any:
        if alpha is None or not (_is_boolean(x) and _is_boolean(y)):
            return original(x, y, alpha=alpha)
        return original(x, y) if alpha else original(x, table[aten.logical_and](y, False))

    for op in (aten.add, aten.add.Tensor, aten.add.Scalar):
        if op in table:
            table[op] = lower


def _is_boolean(value: Any) -> bool:
    import torch

    return isinstance(value, bool) or (
        hasattr(value, "get_dtype") and value.get_dtype() == torch.bool
    )


@functools.cache
def _take_exact_functions() -> None:
    """Has vectors on CPU compute expm1, asinh, acosh and atanh by functions that do just that.

    Inductor makes expm1 of exp and atanh of log, which leaves nothing of small numbers, and the
    vector functions for asinh and acosh square large ones. Native calls the standard library's for
    these three, and so do kernels then, element by element; elu, selu and celu are made of expm1.
    """
    from torch._inductor.codegen import cpp

    vectors: Any = cpp.CppVecOverrides
    vectors.expm1 = staticmethod(_expm1)
    for name in ("asinh", "acosh", "atanh"):
        if name in vars(vectors):
            delattr(vectors, name)
    vectors._initialize_scalarize()


def _expm1(x: Any) -> str:
    return f"{x}.expm1()"


@functools.cache
def _take_exact_remainders() -> None:
    """Has kernels make remainders and floored quotients of numbers of an exact one, as native does.

    Inductor multiplies by the floored quotient and takes that off, of which large quotients leave
    nothing, and floors a rounded quotient, which may be the next whole number: 0.5 / 0.1 is 5, and
    0.1, which is a little more than that, is in 0.5 four times.
    """
    import torch
    from torch._inductor import lowering

    aten = torch.ops.aten
    table: dict[Any, Any] = lowering.lowerings
    remainder, divide = table[aten.remainder.Tensor], table[aten.div.Tensor_mode]

    @functools.wraps(remainder)
    def lower_remainder(a: Any, b: Any) -> Any:
        return _remainder(table, a, b)[0] if _in_floats(a, b) else remainder(a, b)

    @functools.wraps(divide)
    def lower_division(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
        if rounding_mode == "floor" and _in_floats(a, b):
            return _floored_quotient(table, a, b)
        return divide(a, b, rounding_mode=rounding_mode)

    _replace(table, remainder, lower_remainder)
    _replace(table, divide, lower_division)


def _replace(table: dict[Any, Any], old: Any, new: Any) -> None:
    for op in [op for op, lower in table.items() if lower is old]:
        table[op] = new


def _in_floats(*values: Any) -> bool:
    """Whether an operation of these, tensors and numbers, is one of floating-point numbers."""
    dtypes = [value.get_dtype() for value in values if hasattr(value, "get_dtype")]
    return any(dtype.is_floating_point for dtype in dtypes) or (
        bool(dtypes) and any(isinstance(value, float) for value in values)
    )


def _remainder(table: dict[Any, Any], a: Any, b: Any) -> tuple[Any, Any, Any]:
    """The remainder of the sign of ``b``; that of the sign of ``a``, and where the two differ."""
    import torch

    aten = torch.ops.aten
    fmod, less, where = table[aten.fmod.Tensor], table[aten.lt.Scalar], table[aten.where.self]
    rest = fmod(a, b)
    b_negative = b < 0 if isinstance(b, (int, float)) else less(b, 0)
    other_sign = table[aten.logical_xor](less(rest, 0), b_negative)
    differ = table[aten.logical_and](table[aten.ne.Scalar](rest, 0), other_sign)
    return where(differ, table[aten.add.Tensor](rest, b), rest), rest, differ


def _floored_quotient(table: dict[Any, Any], a: Any, b: Any) -> Any:
    """Of ``a`` and ``b``, step by step as `c10::div_floor_floating`."""
    import torch

    aten = torch.ops.aten
    where, divide, subtract = table[aten.where.self], table[aten.div.Tensor], table[aten.sub.Tensor]
    _, rest, differ = _remainder(table, a, b)
    rounded = divide(a, b)
    # Of numbers whose quotient is past the range vectors have no remainder.
    endless = table[aten.eq.Scalar](table[aten.abs](rounded), math.inf)
    infinite = (
        table[aten.eq.Scalar](table[aten.abs](a), math.inf)
        if hasattr(a, "get_dtype")
        else (abs(a) == math.inf)
    )
    past = table[aten.logical_and](endless, table[aten.logical_not](infinite))
    exact = divide(where(past, a, subtract(a, rest)), b)
    exact = where(differ, subtract(exact, 1.0), exact)
    floored = table[aten.floor](exact)
    next_one = table[aten.gt.Scalar](subtract(exact, floored), 0.5)
    floored = where(next_one, table[aten.add.Tensor](floored, 1.0), floored)
    signed_zero = table[aten.mul.Tensor](rounded, 0.0)
    floored = where(table[aten.eq.Scalar](exact, 0), signed_zero, floored)
    if isinstance(b, (int, float)):
        return floored if b else rounded
    return where(table[aten.eq.Scalar](b, 0), rounded, floored)


@functools.cache
def _keep_signs() -> None:
    """Has kernels keep what native keeps in hardtanh and reciprocal roots.

    A zero that equals a bound stays itself (relu6 of -0.0); x ** -0.5 is a reciprocal root, which
    makes NaN of -inf.
    """
    import torch
    from torch._inductor import lowering
    from torch._inductor.decomposition import decompositions

    aten = torch.ops.aten
    table: dict[Any, Any] = lowering.lowerings
    power, rsqrt = table[aten.pow.Tensor_Scalar], table[aten.rsqrt]

    @functools.wraps(power)
    def lower_power(a: Any, b: Any) -> Any:
        floats = hasattr(a, "get_dtype") and a.get_dtype().is_floating_point
        return rsqrt(a) if floats and b == -0.5 else power(a, b)

    _replace(table, power, lower_power)

    def hardtanh(x: torch.Tensor, min_val: Any = -1, max_val: Any = 1) -> Any:
        if not x.is_floating_point() or x.device.type != "cpu":
            return NotImplemented
        return torch.where(x < min_val, min_val, torch.where(x > max_val, max_val, x))

    decompositions[aten.hardtanh.default] = hardtanh


@functools.cache
def _compute_checked_indices_anew() -> None:
    """Has kernels on CPU compute the index that they check right before the check.

    Inductor puts the check of an index that no data decide before the loads, and takes a variable
    for it that may be declared after these, where the kernel computes with the same index: a text
    that no compiler takes (torch 2.11; 2.15 checks after the load then).
    """
    from torch._inductor.codegen import cpp
    from torch.utils._sympy.symbol import SymT, free_symbol_is_type

    original = cpp.CppKernel.check_bounds

    @functools.wraps(original)
    def check(self: Any, expr: Any, *others: Any, **named: Any) -> None:
        known = self.cse
        if not free_symbol_is_type(expr, SymT.TMP):
            self.cse = known.clone()  # knows no variables, and gives new ones other names
        try:
            original(self, expr, *others, **named)
        finally:
            self.cse = known

    cpp.CppKernel.check_bounds = check
