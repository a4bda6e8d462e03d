"""The tensors of a deployed module: inputs, outputs and constants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.calls.storage import extent

_KINDS = ("parameter", "buffer", "folded")


@dataclass(frozen=True)
class TensorInfo:
    """An input or an output of a deployed module.

    Attributes:
        sizes: of an input, None where any size is taken for which the module was compiled; of an
            output those of the call that was exported.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[int | None, ...]


@dataclass(frozen=True)
class ConstantInfo:
    """A constant of a deployed module.

    Attributes:
        name: as in the module's ``state_dict()``.
        kind: "parameter", "buffer", or "folded": computed from others, and never given.
        aliases: other names of the same tensor.
    """

    name: str
    kind: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Of memory, between its first and behind its last element."""
        return self.dtype.itemsize * extent(self.sizes, self.strides)


def constants_of(rows: Iterable[Any]) -> tuple[ConstantInfo, ...]:
    """Of the core's rows: names, number of the kind, dtype, sizes, strides."""
    return tuple(
        ConstantInfo(
            names[0],
            _KINDS[kind],
            getattr(torch, dtype),
            tuple(sizes),
            tuple(strides),
            tuple(names[1:]),
        )
        for names, kind, dtype, sizes, strides in rows
    )
