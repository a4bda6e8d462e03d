"""Whether a kernel's answer may stand for a module's: structure, and values of one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eagercache.base.load import core
from eagercache.calls.numerics import ProofFailed


def compare_structure(native: Any, answer: Any, where: str) -> None:
    """Raises ProofFailed unless both are the same but for the tensors' values."""
    mine, mine_spec = pytree.tree_flatten(answer)
    natives, native_spec = pytree.tree_flatten(native)
    if mine_spec != native_spec or type(answer) is not type(native):
        raise ProofFailed(f"the answer has another structure ({where})")
    for index, (a, b) in enumerate(zip(mine, natives, strict=True)):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                raise ProofFailed(f"output {index} is {a!r}, not {b!r} ({where})")
            continue
        for name in ("dtype", "device", "shape", "requires_grad"):
            if getattr(a, name) != getattr(b, name):
                raise ProofFailed(f"output {index} has another {name} ({where})")
        if a.stride() != b.stride():
            raise ProofFailed(
                f"output {index} has the strides {a.stride()}, not {b.stride()} ({where})"
            )
        if a.storage_offset() != b.storage_offset():
            raise ProofFailed(f"output {index} is another part of a larger tensor ({where})")
        if a.is_inference() != b.is_inference():
            raise ProofFailed(f"output {index} is of another mode ({where})")
    if _shared(mine) != _shared(natives):
        raise ProofFailed(f"its outputs do not share memory as the forward's do ({where})")


def views_among(leaves: Sequence[Any]) -> dict[int, int]:
    """Of each leaf that is autograd's view of another one (`scores, scores.t()`), which that is."""
    places = {id(leaf): index for index, leaf in enumerate(leaves) if torch.is_tensor(leaf)}
    bases = {index: leaf._base for index, leaf in enumerate(leaves) if torch.is_tensor(leaf)}
    return {
        index: places[id(base)]
        for index, base in bases.items()
        if base is not None and id(base) in places and leaves[index].requires_grad
    }


def _shared(leaves: Sequence[Any]) -> list[int]:
    """For each leaf the first one whose memory it has."""
    first: dict[int, int] = {}
    found = []
    for index, leaf in enumerate(leaves):
        held = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
        at = held.data_ptr() if held is not None else 0
        found.append(first.setdefault(at, index) if at != 0 else index)
    return found


def difference_from_forward(answer: Any, expected: Any) -> str:
    """Why a kernel's answer may not stand for the forward's, of one call; "" where it may.

    Floating-point values as `EAGERCACHE_VERIFY` compares those of operators (verification.h).
    """
    assert core is not None
    try:
        compare_structure(expected, answer, "")
    except ProofFailed as failure:
        return str(failure).removesuffix(" ()")
    for index, (mine, native) in enumerate(
        zip(pytree.tree_leaves(answer), pytree.tree_leaves(expected), strict=True)
    ):
        if isinstance(native, torch.Tensor):
            difference = core.difference_from_native(mine, native)
            if difference:
                return f"output {index}: {difference}"
    return ""
