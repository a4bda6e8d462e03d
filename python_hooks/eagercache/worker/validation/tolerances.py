"""How far off a kernel may be, by what its operator computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from eagercache.calls.call import Call
from eagercache.calls.numerics import HALF, Tolerance, base_name
from eagercache.worker.validation.native import Native

# Data that show whether a kernel is bitwise. Terms of any size, and ones that cancel, leave of a
# sum what tells little of its rounding, and more steps than the sum itself (a mean, a square, a
# division) round it: there an accumulating kernel may err by so many times more.
HARD_FILLS = ("wide", "cancelling")
HARD_FACTOR = 4.0


# Operators that add elements up, by the name without its overload. Inductor unrolls short sums, so
# that the text of their kernels does not always show it.
_ACCUMULATING = frozenset({
    "sum", "mean", "nansum", "var", "std", "var_mean", "std_mean", "logsumexp", "norm",
    "linalg_vector_norm", "cumsum", "_softmax", "_log_softmax", "_softmax_backward_data",
    "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_batch_norm",
    "native_batch_norm_backward", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "avg_pool2d", "avg_pool2d_backward", "avg_pool3d",
    "avg_pool3d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "max_pool2d_with_indices_backward",
    "_foreach_norm",
})  # fmt: skip


def accumulates(call: Call) -> bool:
    """Whether the operator adds elements up, whatever its kernel's text looks like."""
    return base_name(call) in _ACCUMULATING


def rounding_hides_bits(native: Native) -> bool:
    """Whether float32 is rounded to half precision: its last bits show in one of thousands."""
    made = [*native.outputs, *(native.after.values if native.after else ())]
    return any(isinstance(tensor, torch.Tensor) and tensor.dtype in HALF for tensor in made)


def tolerance_of(
    call: Call, outputs: Sequence[torch.Tensor], reduces: bool, composed: bool = False
) -> Tolerance:
    """The tolerance for a kernel that ``reduces`` (accumulates over elements) or does not.

    1 ulp without a reduction. With one over n elements log2(n): the error bound of pairwise
    summation, log2(n) u sum|x| (N. J. Higham, Accuracy and Stability of Numerical Algorithms,
    section 4.2), which is what native's own sum promises. Native may do better on some operators
    (`var` accumulates in double), and a vectorised loop in the operand's own precision cannot.
    """
    sizes = [spec.numel for spec in call.tensors]
    if not (reduces or composed) or not sizes:
        return Tolerance()
    smallest = min((output.numel() for output in outputs), default=1)
    longest = max((max(spec.sizes, default=1) for spec in call.tensors), default=1)
    length = max(max(sizes) // max(smallest, 1), longest, 2)
    if composed:
        # Sums of sums: each adds its own bound, over all dimensions at most that of all elements.
        length = max(*sizes, 2)
    return Tolerance(ulps=max(1.0, math.log2(length)), reduces=True, composed=composed)
