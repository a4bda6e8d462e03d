"""Tensors in the objects of a module's call that its forward writes into: a cache of fixed size.

A kernel writes into the very tensors, too. Whoever runs a forward more than once on one call puts
back what they held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Unfit

# Up to this size a tensor may be a counter, which tells where the next call writes.
_COUNTER_BYTES = 4 << 10


@dataclass(frozen=True)
class Write:
    """That a forward writes into a tensor.

    Attributes:
        index: of the tensor among those of the call's arguments.
        times: how often; its version counter moves by as much.
    """

    index: int
    times: int


class Contents:
    """What tensors hold; `restore` puts it back."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._held = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Writes it into the same tensors."""
        with torch.no_grad():
            for tensor, held in self._held:
                tensor.copy_(held)


def counters(tensors: Sequence[torch.Tensor]) -> Contents:
    """The contents of those that may say where a forward writes, and that are quickly put back."""
    return Contents([t for t in tensors if t.numel() * t.element_size() <= _COUNTER_BYTES])


def marks_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """What a forward may change of tensors beside their values, to be compared with an earlier one.

    Whether autograd records them, their gradients and hooks, memory and layout, own attributes.
    """
    return [
        (
            *(tensor.requires_grad, tensor.is_leaf, id(tensor.grad) if tensor.is_leaf else 0),
            *(len(tensor._backward_hooks or ()), tensor.data_ptr(), tensor.dtype),
            *(tensor.storage_offset(), tensor.shape, tensor.stride(), sorted(vars(tensor))),
        )
        for tensor in tensors
    ]


class WriteSearch:
    """A forward runs once while `watched`; what it wrote is `found`, and is put back."""

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], objects: Sequence[Any]
    ) -> None:
        self.found: tuple[Write, ...] = ()
        self._tensors = argument_tensors(args, kwargs)
        self._in_objects = {id(tensor) for tensor in argument_tensors(objects, {})}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raises Unfit for a write into an argument that is in no object."""
        contents = Contents([t for t in self._tensors if id(t) in self._in_objects])
        versions = [tensor._version for tensor in self._tensors]
        try:
            yield
            moves = [t._version - before for t, before in zip(self._tensors, versions, strict=True)]
        finally:
            contents.restore()
        self.found = tuple(Write(index, times) for index, times in enumerate(moves) if times)
        if any(id(self._tensors[write.index]) not in self._in_objects for write in self.found):
            raise Unfit("it writes to its arguments")
