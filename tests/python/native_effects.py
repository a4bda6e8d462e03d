"""What native operators really do to their arguments: observed, call by call.

`Recorder` is a dispatch mode that keeps a copy of every call that reaches a backend, `observe`
makes such a call anew and compares all memory that it could have touched before and after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from conformance.database import is_plain, tensors_in
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

LARGEST_CALL_BYTES = 1 << 22


@dataclass(frozen=True)
class RecordedCall:
    """An operator and arguments of its own, in schema order by name."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def named_arguments(self) -> dict[str, Any]:
        """The arguments that were passed, by their names in the schema."""
        schema = self.func._schema.arguments
        named = {argument.name: value for argument, value in zip(schema, self.args, strict=False)}
        return {**named, **self.kwargs}


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


def _copy(value: Any) -> Any:
    """The same values in memory of their own; what shared memory still does."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy_one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage = leaf.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        return torch.empty(0, dtype=leaf.dtype).set_(
            storages[storage._cdata], leaf.storage_offset(), leaf.size(), leaf.stride()
        )

    return tree_map(copy_one, value)


class Recorder(TorchDispatchMode):
    """Keeps up to `limit` calls of different metadata per operator."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.calls: list[RecordedCall] = []
        self.not_plain: set[str] = set()
        self._met: dict[Any, set[Any]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._keep(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        met = self._met[func]
        if len(met) >= self.limit:
            return
        tensors = tensors_in((args, kwargs))
        if not all(map(is_plain, tensors)):
            self.not_plain.add(str(func))
            return
        if sum(t.untyped_storage().nbytes() for t in tensors) > LARGEST_CALL_BYTES:
            return
        described = str(tree_map(_described, (args, kwargs)))
        if described in met:
            return
        met.add(described)
        args, kwargs = _copy((tuple(args), dict(kwargs)))
        self.calls.append(RecordedCall(func, args, kwargs))


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, tuple(leaf.size()), leaf.stride())
    return leaf


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


def observe(call: RecordedCall) -> Observed:
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
