"""What native operators really do to their arguments: observed, call by call.

`observe` makes a call of a backend operator anew and compares all memory that it could have touched
before and after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from conformance.database import BackendCall, tensors_in


@dataclass
class Observed:
    """What one native call did.

    Attributes:
        written: names of arguments with a tensor whose memory changed.
        bumped: names of arguments with a tensor whose version counter moved.
        reshaped: names of arguments with a tensor whose sizes, strides, offset or memory changed.
        aliases: per output, the names of the arguments that it shares memory with.
        same_object: per output, the names of the arguments that it is.
    """

    written: set[str] = field(default_factory=set)
    bumped: set[str] = field(default_factory=set)
    reshaped: set[str] = field(default_factory=set)
    aliases: list[set[str]] = field(default_factory=list)
    same_object: list[set[str]] = field(default_factory=list)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, copied."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def _layout(tensor: torch.Tensor) -> Any:
    return (
        tensor.dtype,
        tuple(tensor.size()),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().data_ptr(),
    )


def observe(call: BackendCall) -> Observed:
    """Makes the call and says what it did. Raises what native raises."""
    named = call.named_arguments()
    before = [
        (name, tensor, _memory(tensor), tensor._version, _layout(tensor))
        for name, value in named.items()
        for tensor in tensors_in(value)
    ]
    results = call.func(*call.args, **call.kwargs)
    observed = Observed()
    pointers: dict[int, set[str]] = defaultdict(set)
    for name, tensor, memory, version, layout in before:
        if _layout(tensor) != layout:
            observed.reshaped.add(name)
        elif not torch.equal(_memory(tensor), memory):
            observed.written.add(name)
        if tensor._version != version:
            observed.bumped.add(name)
        if tensor.untyped_storage().nbytes() != 0:
            pointers[tensor.untyped_storage()._cdata].add(name)
    count = len(call.func._schema.returns)
    for result in [results] if count == 1 else results or ():
        aliases: set[str] = set()
        same: set[str] = set()
        for tensor in tensors_in(result):
            aliases |= pointers.get(tensor.untyped_storage()._cdata, set())
            same |= {name for name, argument, *_ in before if argument is tensor}
        observed.aliases.append(aliases)
        observed.same_object.append(same)
    return observed


def samples(op: Any, dtype: torch.dtype, limit: int | None) -> Iterator[Any]:
    """The operator database's samples for a dtype on CPU, at most `limit`."""
    differentiable = dtype.is_floating_point or dtype.is_complex
    grad = bool(differentiable and op.supports_autograd)
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=grad)):
        if limit is not None and index >= limit:
            return
        yield sample


def run_sample(op: Any, sample: Any) -> None:
    """Calls the operator as a user would, and its backward where there is one."""
    result = op(sample.input, *sample.args, **sample.kwargs)
    outputs: Sequence[torch.Tensor] = [t for t in tensors_in(result) if t.requires_grad]
    if outputs:
        torch.autograd.backward(list(outputs), [torch.ones_like(t) for t in outputs])
