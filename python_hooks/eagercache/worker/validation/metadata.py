"""Layout, memory and version counters of outputs, which are native's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from eagercache.calls.numerics import ProofFailed


def version_of(value: Any) -> int | None:
    """The version counter of a tensor that has one."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version


_METADATA: tuple[tuple[str, Callable[[torch.Tensor], Any]], ...] = (
    ("dtype", lambda t: t.dtype),
    ("device", lambda t: t.device),
    ("layout", lambda t: t.layout),
    ("sizes", lambda t: tuple(t.size())),
    ("strides", lambda t: tuple(t.stride())),
    ("storage offset", lambda t: t.storage_offset()),
    ("requires_grad", lambda t: t.requires_grad),
    ("is_inference", lambda t: t.is_inference()),
    ("is_conj", lambda t: t.is_conj()),
    ("is_neg", lambda t: t.is_neg()),
)


def compare_metadata(expected: Sequence[Any], actual: Sequence[Any], where: str) -> None:
    """Raises ProofFailed where an output is laid out otherwise than native's."""
    if len(expected) != len(actual):
        raise ProofFailed(f"{len(actual)} outputs, native gives {len(expected)} ({where})")
    for index, (mine, native) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(mine, torch.Tensor):
            raise ProofFailed(f"output {index} is undefined ({where})")
        for name, read in _METADATA:
            if read(mine) != read(native):
                raise ProofFailed(
                    f"output {index}: {name} {read(mine)}, native gives {read(native)} ({where})"
                )
    if _sharing(expected) != _sharing(actual):
        raise ProofFailed(f"the outputs share memory otherwise than native's ({where})")


def compare_versions(expected: Sequence[Any], actual: Sequence[Any], where: str) -> None:
    """Raises ProofFailed where an output has another version counter than native's."""
    versions = [[version_of(output) for output in side] for side in (expected, actual)]
    if versions[0] != versions[1]:
        raise ProofFailed(f"version counters {versions[1]}, native gives {versions[0]} ({where})")


def _sharing(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the index of the first one with its memory."""
    pointers = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [pointers.index(pointer) for pointer in pointers]
