"""A call of every operator that is hooked by default on CPU, for benchmarks.

`calls` yields them on tensors of one size, `missing` names default operators that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import eagercache
import torch

# Operator and overload, sizes, and a function that makes the call.
Call = tuple[str, str, Callable[[], Any]]
# Operator and overload, and the arguments.
Arguments = tuple[Any, ...]

# Rows, columns: small enough for a warm-up of seconds, vectorised, and parallel.
SHAPES = ((4, 8), (64, 96), (512, 512))
LARGEST_IMAGE = 128  # of which a batch has eight

UNARY = (
    *("relu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "mish", "abs", "neg", "exp"),
    *("expm1", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf", "floor", "ceil"),
    *("round", "trunc", "sign", "logical_not", "isnan", "sum", "mean", "amax", "amin", "aminmax"),
    *("argmax", "prod", "any", "all", "max", "min", "clone", "gelu", "elu", "softplus"),
    *("argmin", "erfc", "hardtanh", "isinf", "log", "log_sigmoid_forward", "nansum", "tan", "triu"),
    *("tril", "linalg_vector_norm"),
)
BINARY = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "atan2"),
    *("eq.Tensor", "lt.Tensor", "logical_and", "tanh_backward", "mse_loss", "sigmoid_backward"),
    *("silu_backward", "gelu_backward", "hardswish_backward", "copysign.Tensor", "ge.Tensor"),
    *("gt.Tensor", "hardsigmoid_backward", "huber_loss", "hypot", "le.Tensor", "logical_or"),
    *("mish_backward", "ne.Tensor", "pow.Tensor_Tensor", "rsub.Tensor", "smooth_l1_loss"),
    *("soft_margin_loss", "binary_cross_entropy_with_logits"),
)
# With a number that is not special.
SCALAR = (
    *("add.Scalar", "div.Scalar", "mul.Scalar", "sub.Scalar", "rsub.Scalar", "pow.Tensor_Scalar"),
    *("eq.Scalar", "ge.Scalar", "gt.Scalar", "le.Scalar", "lt.Scalar", "ne.Scalar"),
    *("clamp_max", "clamp_min"),
)
# In-place, of values that stay where they are however often they are called.
SETTLING = ("hardsigmoid_", "hardtanh_", "leaky_relu_", "relu_", "sigmoid_", "tanh_")


def elementwise(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Iterator[Arguments]:
    """Of one value each: matrices ``x`` and ``y``, and a vector ``w`` as long as their rows."""
    for name in UNARY:
        yield name, x
    for name in BINARY:
        yield name, x, y
    for name in SCALAR:
        yield name, x, 0.7
    integers = (x * 100).int(), (y * 100).int()
    yield "add.Tensor", x, w
    yield "mul.Tensor", x, torch.rand(x.size(0), 1)
    yield "addcmul", x, y, y
    yield "addcdiv", x, y, y
    yield "bitwise_and.Tensor", *integers
    yield "bitwise_or.Tensor", *integers
    yield "bitwise_not", integers[0]
    yield "clamp", x, 0.6, 0.9
    yield "clamp.Tensor", x, y * 0.5, y * 1.5
    yield "elu_backward", x, 1.0, 1.0, 1.0, False, y
    yield "hardtanh_backward", x, y, -1.0, 1.0
    yield "huber_loss_backward", x, x, y, 0, 1.0
    yield "leaky_relu", x, 0.1
    yield "leaky_relu_backward", x, y, 0.1, False
    yield "lerp.Scalar", x, y, 0.3
    yield "lerp.Tensor", x, y, w
    yield "log_sigmoid_backward", x, y, torch.exp(-y.abs())
    yield "masked_fill.Scalar", x, y > 1, 0.3
    yield "mse_loss_backward", x, x, y, 0
    yield "smooth_l1_loss_backward", x, x, y, 0, 1.0
    yield "softplus_backward", x, y, 1.0, 20.0
    yield "threshold", x, 0.6, 0.1
    yield "threshold_backward", x, y, 0.0
    yield "where.self", x > 1, x, y


def in_place(x: torch.Tensor, y: torch.Tensor) -> Iterator[Arguments]:
    """Calls that write a copy of ``x``."""
    for name in SETTLING:
        yield name, x.clone()
    # These let large numbers be and bring small ones to 0, by way of denormals.
    for name in ("hardswish_", "silu_"):
        yield name, x + 20
    almost_one = torch.full_like(x, 1.00001)
    yield "add_.Scalar", x.clone(), 0.0001
    yield "add_.Tensor", x.clone(), y * 0.0001
    yield "sub_.Tensor", x.clone(), y * 0.0001
    yield "mul_.Scalar", x.clone(), 1.00001
    yield "mul_.Tensor", x.clone(), almost_one
    yield "div_.Scalar", x.clone(), 1.00001
    yield "div_.Tensor", x.clone(), almost_one
    yield "clamp_", x.clone(), 0.6, 0.9
    yield "masked_fill_.Scalar", x.clone(), y > 1, 0.3


def along_rows(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Iterator[Arguments]:
    """Reductions, scans, normalisations, copies of another layout."""
    rows, columns = x.shape
    each = torch.rand(rows, 1)
    for name in ("all.dim", "any.dim", "cumprod", "cumsum", "max.dim", "min.dim", "prod.dim_int"):
        yield name, x, 1
    for name in ("count_nonzero.dim_IntList", "logsumexp", "std.correction", "std_mean.correction"):
        yield name, x, [1]
    yield "var.correction", x, [1]
    yield "var_mean.correction", x, [1]
    yield "norm.ScalarOpt_dim", x, 2.0, [1]
    yield "sum.dim_IntList", x, [0]
    yield "mean.dim", x, [1], True
    yield "_softmax", x, -1, False
    yield "_log_softmax", x, -1, False
    yield "_softmax_backward_data", x, y, -1, torch.float32
    yield "_log_softmax_backward_data", x, y, -1, torch.float32
    yield "native_layer_norm", x, [columns], w, w, 1e-5
    yield "native_layer_norm_backward", x, y, [columns], each, each, w, w, [True] * 3
    yield "cat", [x, y], 1
    yield "stack", [x, y], 0
    yield "flip", x, [1]
    yield "glu", x, -1
    yield "glu_backward", x[:, : columns // 2].contiguous(), y, -1
    yield "repeat", x, [2, 1]
    yield "roll", x, [1], [1]


def images(rows: int, columns: int) -> Iterator[Arguments]:
    """Of batches of images."""
    image, gradient = torch.rand(2, 4, rows, columns), torch.rand(2, 4, rows, columns)
    quarter = torch.rand(2, 4, rows // 2, columns // 2)
    corners = torch.rand(2, 4, 2, 2)
    channel, other = torch.rand(4) + 0.5, torch.rand(4) + 0.5
    group = torch.rand(2, 2) + 0.5
    half = [rows // 2, columns // 2]
    slope = torch.rand(1, 4, 1, 1)
    pool = ([2, 2], [2, 2], [0, 0])
    indices = torch.ops.aten.max_pool2d_with_indices(image, *pool)[1]
    yield "_adaptive_avg_pool2d", image, [2, 2]
    yield "_adaptive_avg_pool2d_backward", corners, image
    yield "adaptive_max_pool2d", image, [2, 2]
    yield "avg_pool2d", image, [2, 2]
    yield "avg_pool2d_backward", quarter, image, *pool, False, True, None
    yield "avg_pool3d", torch.rand(1, 4, 2, rows, columns), [2, 2, 2]
    yield "max_pool2d_with_indices", image, [2, 2]
    yield "max_pool2d_with_indices_backward", quarter, image, *pool, [1, 1], False, indices
    yield "_native_batch_norm_legit.no_stats", image, channel, other, True, 0.1, 1e-5
    legit = (image, channel, other, other, channel, 0.1, 1e-5)
    yield "_native_batch_norm_legit_no_training", *legit
    saved = (channel, other, channel, other, channel)
    yield "native_batch_norm_backward", gradient, image, *saved, True, 1e-5, [True] * 3
    sizes = (2, 4, rows * columns, 2)
    yield "native_group_norm", image, channel, other, *sizes, 1e-5
    yield "native_group_norm_backward", gradient, image, group, group, channel, *sizes, [True] * 3
    yield "_prelu_kernel", image, slope
    yield "_prelu_kernel_backward", gradient, image, slope
    yield "channel_shuffle", image, 2
    yield "pixel_shuffle", image, 2
    yield "pixel_unshuffle", image, 2
    for name in ("constant_pad_nd", "reflection_pad2d", "replication_pad2d"):
        yield name, image, [1, 1, 1, 1]
    yield "upsample_nearest2d", image, [2 * rows, 2 * columns]
    yield "upsample_nearest2d_backward", image, [rows, columns], [2, 4, *half]
    yield "upsample_bilinear2d", image, half, False
    yield "upsample_bicubic2d", image, half, False


def calls(rows: int, columns: int) -> Iterator[Call]:
    """Every default operator with a call or more, on float32 tensors of ``rows`` x ``columns``."""
    default = eagercache.default_operators("cpu")
    return (call for call in _all_calls(rows, columns) if f"aten::{call[0]}" in default)


def _all_calls(rows: int, columns: int) -> Iterator[Call]:
    x = torch.rand(rows, columns) + 0.5
    y = torch.rand(rows, columns) + 0.5
    w = torch.rand(columns)
    matrix = f"{rows}x{columns}"

    def call(sizes: str, name: str, *args: Any, **kwargs: Any) -> Call:
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        return name, sizes, lambda: operator(*args, **kwargs)

    for some in (elementwise(x, y, w), in_place(x, y), along_rows(x, y, w)):
        for name, *arguments in some:
            yield call(matrix, name, *arguments)
    yield call(matrix, "_to_copy", x, dtype=torch.bfloat16)
    yield call(matrix, "clone", x.t(), memory_format=torch.contiguous_format)
    height, width = min(rows, LARGEST_IMAGE), min(columns, LARGEST_IMAGE)
    for name, *arguments in images(height, width):
        yield call(f"2x4x{height}x{width}", name, *arguments)


def missing() -> list[str]:
    """Default operators without a call here."""
    called = {f"aten::{name}" for name, _, _ in calls(4, 8)}
    return sorted(set(eagercache.default_operators("cpu")) - called)
