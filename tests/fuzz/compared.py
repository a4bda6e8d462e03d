"""Whether two answers are the same to the letter, and how an answer is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuzz.judge import Disagreement

# By how much, relative to the largest element, gradients may differ whose operators all agree:
# what the forward operators kept for them differs within the numerics class.
_KEPT = {torch.float64: 1e-12, torch.float32: 2e-2, torch.bfloat16: 0.5, torch.float16: 0.5}


def check_kept(native: torch.Tensor, mine: torch.Tensor, seed: torch.Tensor, where: str) -> None:
    """Gross differences; of a sum that cancels nothing is left to measure by but what came in."""
    known = torch.isfinite(native) & torch.isfinite(mine)
    if not bool(known.any()) or native.dtype not in _KEPT:
        return
    given = seed[torch.isfinite(seed)].double().abs()
    largest = max(float(native[known].abs().max()), float(given.max()) if given.numel() else 0.0)
    apart = float((native[known].double() - mine[known].double()).abs().max())
    if apart > _KEPT[native.dtype] * largest:
        raise Disagreement(
            "values", f"{where}: gradients are {apart:.3g} apart, the largest being {largest:.3g}"
        )


def outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def described(error: Exception | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {error}"


def flat(answer: Any) -> list[Any]:
    if answer is None:
        return []
    if isinstance(answer, (tuple, list)):
        return [leaf for part in answer for leaf in (flat(part) if part is not None else [None])]
    return [answer]


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All of a tensor that is neither data nor address."""
    inference = tensor.is_inference()
    return (
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
        inference,
        -1 if inference else tensor._version,
        tensor.is_contiguous(),
        _grad_fn(tensor),
    )


def _grad_fn(tensor: torch.Tensor) -> str:
    """The name of what made it; of a view that may not be asked, why."""
    try:
        made_by = tensor.grad_fn if tensor.requires_grad else None
    except RuntimeError as error:
        return str(error)
    return made_by.name() if made_by is not None else ""


_FIELDS = ("dtype", "sizes", "strides", "offset", "requires_grad", "is_inference", "version",
           "contiguity", "grad_fn")  # fmt: skip


def differs(native: torch.Tensor, mine: torch.Tensor) -> str:
    pairs = zip(_FIELDS, metadata(mine), metadata(native), strict=True)
    return "; ".join(f"{name} {a}, native {b}" for name, a, b in pairs if a != b)
