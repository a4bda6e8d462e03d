"""What a worker is told of a tensor of a call or a module, in the place of the tensor.

Small tensors, and integers that may be indices, travel with their values; of others a few
statistics. A call that waits to be described holds sketches of its tensors (`sketched`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.objects import is_object, map_tensors, parts_of

# As many elements stand for a tensor's values.
SAMPLED = 1024
# Smaller tensors travel with their values.
EXACT_BYTES = 4 << 10
EXACT_INTEGER_BYTES = 256 << 10


class NotTransferable(Exception):
    """The module cannot be sent; the text is one clause that says why."""


@dataclass(frozen=True)
class Standin:
    """What is sent of one tensor."""

    dtype: torch.dtype
    device: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # of the data pointer from a multiple of 64 bytes
    parameter: bool
    requires_grad: bool
    mean: float = 0.0
    std: float = 1.0
    low: float = 0.0
    high: float = 0.0
    data: bytes | None = None
    attributes: tuple[str, ...] = ()  # names that the program gave it

    @property
    def extent(self) -> int:
        """Elements of memory that the tensor spans."""
        return 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))

    def make(self) -> torch.Tensor:
        """A tensor of this metadata, of zeros."""
        itemsize = self.dtype.itemsize
        lead = math.ceil(self.offset / itemsize)
        memory = torch.zeros(self.extent + lead + 64, dtype=self.dtype, device=self.device)
        # The allocator gives multiples of 64 bytes; the original's misalignment is made again.
        view = memory.as_strided(self.sizes, self.strides, lead)
        if self.parameter:
            return torch.nn.Parameter(view, requires_grad=self.requires_grad)
        return view


def describe(tensor: torch.Tensor) -> Standin:
    """What stands in for ``tensor``, or for what its sketch was made of. Raises NotTransferable."""
    if type(tensor) is TensorSketch:
        common = _metadata(tensor, tensor.offset, ())
        return Standin(**common, **statistics_of(tensor.sample.cpu()))
    reason = _why_not(tensor)
    if reason:
        raise NotTransferable(reason)
    common = _metadata(tensor, tensor.data_ptr() % 64, tuple(sorted(vars(tensor))))
    if _is_exact(tensor):
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return Standin(**common, data=bytes(flat.tolist()))
    return Standin(**common, **statistics_of(sample_of(tensor).cpu()))


def _metadata(tensor: torch.Tensor, offset: int, attributes: tuple[str, ...]) -> dict[str, Any]:
    """Fields of `Standin`."""
    return {
        "dtype": tensor.dtype,
        "device": tensor.device.type,
        "sizes": tuple(tensor.size()),
        "strides": tuple(tensor.stride()),
        "offset": offset,
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "requires_grad": tensor.requires_grad,
        "attributes": attributes,
    }


def statistics_of(sample: torch.Tensor) -> dict[str, Any]:
    """What stands in for values: fields of `Standin`."""
    if sample.is_complex():
        return {}
    if sample.dtype == torch.bool:
        return {"mean": float(sample.to(torch.float32).mean())}
    wide = sample.to(torch.float64)
    wide = wide[torch.isfinite(wide)]
    if wide.numel() == 0:
        return {}
    std = float(wide.std(correction=0))
    return {
        "mean": float(wide.mean()),
        "std": std if std > 0 else 1e-3,
        "low": float(wide.min()),
        "high": float(wide.max()),
    }


class TensorSketch(torch.Tensor):
    """What is to be told of a tensor, without its memory and without the graph that it ends.

    A call that waits for its description would otherwise keep all that its backward needs.

    Attributes:
        sample: some of its elements, one-dimensional, on its device.
        offset: of its data pointer from a multiple of 64 bytes.
    """

    sample: torch.Tensor
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        """A sketch of ``tensor``; the tensor itself where it is small, or says more."""
        values = tensor.is_floating_point() or tensor.is_complex()
        if type(tensor) is not torch.Tensor or not values or vars(tensor) or _why_not(tensor):
            return tensor
        if _is_exact(tensor):
            return tensor.detach().requires_grad_(tensor.requires_grad)
        made: TensorSketch = torch.Tensor._make_wrapper_subclass(
            TensorSketch,
            tensor.size(),
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        made.sample = sample_of(tensor).clone()
        made.offset = tensor.data_ptr() % 64
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: Any) -> Any:
        """A sketch has no values to compute with."""
        raise TypeError(f"{operator} of a tensor's sketch")


def sketched(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, with sketches of large tensors; as they are where objects are given."""
    if any(map(_holds_object, (*args, *kwargs.values()))):
        return args, kwargs
    known: dict[int, torch.Tensor] = {}  # a tensor that is given twice stays one

    def sketch(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = TensorSketch.of(tensor)
        return known[id(tensor)]

    return map_tensors(args, sketch), map_tensors(kwargs, sketch)


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """About `SAMPLED` elements; a view of the tensor's memory where that has no gaps."""
    detached = tensor.detach()
    step = max(1, tensor.numel() // SAMPLED)
    spans = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    if spans == tensor.numel():
        return detached.as_strided((-(-spans // step),), (step,))
    return detached.reshape(-1)[::step]


def _is_exact(tensor: torch.Tensor) -> bool:
    """Whether it travels with its values."""
    most = EXACT_BYTES if tensor.is_floating_point() else EXACT_INTEGER_BYTES
    return tensor.numel() * tensor.itemsize <= most


def _why_not(tensor: torch.Tensor) -> str:
    """Why nothing can stand in for it; empty where something can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return f"it holds a {type(tensor).__name__}"
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return "it holds a tensor of an unusual kind"
    if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
        # Of a sharded model, whose parameters have memory during a forward or a backward alone.
        return "it holds a tensor whose memory was given up"
    return ""


def _holds_object(value: Any) -> bool:
    return is_object(value) or any(map(_holds_object, parts_of(value)))
