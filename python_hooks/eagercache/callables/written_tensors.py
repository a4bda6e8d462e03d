"""Tensors that a forward writes into: in its call's objects, and the module's buffers.

A cache of fixed size is one, a norm's running mean in training mode another. A kernel writes into
the very tensors, too. Whoever runs a forward more than once on one call puts
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
from eagercache.callables.module_tensors import TensorSlot
from eagercache.calls.numerics import same_bits

# Up to this size a tensor may be a counter, which tells where the next call writes.
_COUNTER_BYTES = 4 << 10


@dataclass(frozen=True)
class Write:
    """That a forward writes into a tensor.

    Attributes:
        of_module: whether it is a buffer of the module.
        index: of the tensor among the module's slots, or among those of the call's arguments.
        times: by how much its version counter moves. Batch norm leaves that of its mean as it is.
    """

    of_module: bool
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

    def changed(self) -> list[torch.Tensor]:
        """Those that hold something else by now."""
        return [tensor for tensor, held in self._held if not same_bits(tensor.detach(), held)]


def counters(tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor] = ()) -> Contents:
    """The contents of those that may say where a forward writes, and that are quickly put back.

    A module's ``buffers`` of floating-point numbers are statistics.
    """
    small = [t for t in tensors if t.numel() * t.element_size() <= _COUNTER_BYTES]
    return Contents([*small, *(t for t in buffers if not t.is_floating_point())])


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
    """A forward runs once while `watched`; what it wrote is `found`, and is put back.

    ``slots`` are the module's tensors. Its buffers may be written, and its call's objects.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        objects: Sequence[Any],
        slots: Sequence[TensorSlot] = (),
    ) -> None:
        self.found: tuple[Write, ...] = ()
        self._tensors = argument_tensors(args, kwargs)
        self._in_objects = {id(tensor) for tensor in argument_tensors(objects, {})}
        self._slots = slots

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raises Unfit for a write into an argument that is in no object, or a parameter."""
        held = [tensor for tensor in self._tensors if id(tensor) in self._in_objects]
        buffers = [slot.tensor for slot in self._slots if slot.kind == "buffer"]
        contents = Contents([*held, *buffers])
        arguments = [tensor._version for tensor in self._tensors]
        slots = [slot.tensor._version for slot in self._slots]
        try:
            yield
            changed = {id(tensor) for tensor in contents.changed()}
            moves = [
                t._version - before for t, before in zip(self._tensors, arguments, strict=True)
            ]
            steps = [
                s.tensor._version - before for s, before in zip(self._slots, slots, strict=True)
            ]
        finally:
            contents.restore()
        self.found = (
            *(Write(False, index, times) for index, times in enumerate(moves) if times),
            *(
                Write(True, index, steps[index])
                for index, slot in enumerate(self._slots)
                if steps[index] or id(slot.tensor) in changed
            ),
        )
        for write in self.found:
            if not write.of_module and id(self._tensors[write.index]) not in self._in_objects:
                raise Unfit("it writes to its arguments")
            if write.of_module and self._slots[write.index].kind != "buffer":
                slot = self._slots[write.index]
                raise Unfit(f"it writes to its {slot.kind} {slot.full_name}")
