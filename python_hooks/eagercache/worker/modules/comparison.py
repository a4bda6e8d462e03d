"""Whether a whole module's answer may stand for its forward's: structure, and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eagercache.callables.module_transfer import Transferred
from eagercache.calls.numerics import ProofFailed, in_parts, same_bits

_MOVES = 3
# A kernel sums in another order, often in longer runs; so are single sums judged (validate.py).
_MOVED_FACTOR = 4.0

_EPSILON_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}


class Moved:
    """The forward's tensors when all that it is given moves by its last place, up or down.

    By that of the coarsest dtype to which the forward casts: numbers that autocast rounds may not
    show a smaller step. Made when they are first asked for. ``call`` gives the tensors of a call,
    ``restore`` puts back what the call was given.
    """

    def __init__(
        self,
        rebuilt: Transferred,
        call: Callable[[], Sequence[torch.Tensor | None]],
        restore: Callable[[], None],
    ) -> None:
        self._rebuilt, self._call, self._restore = rebuilt, call, restore
        self._runs: list[list[torch.Tensor | None]] = []

    def of(self, index: int) -> list[torch.Tensor]:
        """One tensor of the call, as often as it was moved."""
        while len(self._runs) < _MOVES:
            self._rebuilt.move(seed=len(self._runs))
            try:
                self._runs.append(list(self._call()))
            finally:
                self._restore()
        return [run[index] for run in self._runs if run[index] is not None]


def compare(
    mine: torch.Tensor,
    native: torch.Tensor,
    reference: torch.Tensor,
    length: int,
    where: str,
    moved: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> tuple[float, float]:
    """Errors of the kernel and of the forward against ``reference``, in ulps of the largest value.

    The kernel's may be twice the forward's, in the mean square and at the worst element, or
    log2(length) ulps, the bound of one pairwise summation over ``length`` elements; a longer
    forward rounds more often than that on both sides. A kernel beyond that may be four times as far
    off as the forward is when what it is given moves by its last place: ``moved`` gives such
    answers.
    (A mixed forward-backward error, N. J. Higham, Accuracy and Stability of Numerical Algorithms,
    1.5. A gradient behind a rectifier needs it: it jumps where a sum that is nearly zero is rounded
    to the other side.) Integers must be equal, NaN and infinities at the same places. Raises
    ProofFailed.
    """
    bits = _EPSILON_BITS.get(native.dtype)
    if bits is None:
        if not same_bits(mine, native):
            raise ProofFailed(f"{native.dtype} must be equal bit for bit ({where})")
        return 0.0, 0.0
    if reference.size() != native.size():
        raise ProofFailed(f"the reference has other sizes ({where})")
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        if not torch.equal(test(mine), test(native)):
            raise ProofFailed(f"NaN or infinity where the forward has none ({where})")
    scale = _scale(native, reference)
    if scale is None:
        return 0.0, 0.0
    unit = (scale or 1.0) * 2.0**-bits
    own, natives = (_errors(one, native, reference, unit) for one in (mine, native))
    floor = max(1.0, math.log2(max(length, 2)))
    for measure, error in enumerate(own):
        if error <= max(2.0 * natives[measure], floor):
            continue
        among = (_errors(other, native, reference, unit)[measure] for other in moved())
        others = list(filter(math.isfinite, among))
        if not error <= _MOVED_FACTOR * max(others, default=0.0):
            text = "".join(f", {other:.3g}" for other in others)
            raise ProofFailed(
                f"off by {error:.3g} ulp, the forward by {natives[measure]:.3g}{text} ({where})"
            )
    return own[0], natives[0]


def _scale(native: torch.Tensor, reference: torch.Tensor) -> float | None:
    """The largest number of ``reference`` where both are finite; None where they nowhere are."""
    parts = zip(in_parts(native), in_parts(reference), strict=True)
    known = (wide[torch.isfinite(one) & torch.isfinite(wide)] for one, wide in parts)
    return max((float(part.abs().max()) for part in known if part.numel()), default=None)


def _errors(
    answer: torch.Tensor, native: torch.Tensor, reference: torch.Tensor, unit: float
) -> tuple[float, float]:
    """The largest error and the root of the mean square one, where `_scale` looks, in ``unit``.

    NaN where one is. What is made of the numbers in float64 takes many times their own memory.
    """
    worst = squares = 0.0
    count = 0
    parts = zip(in_parts(answer), in_parts(native), in_parts(reference), strict=True)
    for mine, forward, exact in parts:
        wide = exact.to(torch.float64)
        known = torch.isfinite(forward) & torch.isfinite(wide)
        error = (mine[known].to(torch.float64) - wide[known]).abs() / unit
        if error.numel():
            largest = float(error.max())
            worst = largest if math.isnan(largest) else max(largest, worst)
            if math.isnan(worst):
                return math.nan, math.nan
            squares, count = squares + float(error.square().sum()), count + error.numel()
    return worst, math.sqrt(squares / count)


def equal_answers(a: Any, b: Any) -> bool:
    """Whether two answers have the same leaves, tensors bit for bit."""
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(left) == len(right) and all(
        same_bits(x, y) if isinstance(x, torch.Tensor) else type(x) is type(y) and x == y
        for x, y in zip(left, right, strict=True)
    )


def tensor_leaves(answer: Any) -> list[torch.Tensor]:
    """The tensors of an answer, in order."""
    return [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
