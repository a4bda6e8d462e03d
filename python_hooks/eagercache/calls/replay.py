"""Random masks and numbers of a module's call drawn once more, for its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Operators that make a tensor of numbers: where the sizes stand among the arguments.
_MADE = {
    _aten.randn.default: 0,
    _aten.rand.default: 0,
    _aten.randint.default: 1,
    _aten.randint.low: 2,
    _aten.randperm.default: 0,
}
_LIKE = (
    _aten.randn_like.default,
    _aten.rand_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
)
_INTEGERS = (_aten.randint.default, _aten.randint.low, _aten.randperm.default)
_IN_PLACE = (
    _aten.bernoulli_.float,
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.exponential_.default,
)


def generator_of(device: torch.device) -> torch.Generator:
    """The one that operators on ``device`` draw from."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextlib.contextmanager
def drawing_again(device: torch.device, state: torch.Tensor) -> Iterator[None]:
    """The device's generator is in ``state`` in the block, and where it was after it."""
    generator = generator_of(device)
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


class Replayed(TorchDispatchMode):
    """Masks that were drawn before, instead of new ones, for what runs in the block.

    Raises RuntimeError where other ones are drawn than those were.
    """

    def __init__(self, masks: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._masks = iter(masks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _MADE or func in _LIKE:
            sizes = args[0].size() if func in _LIKE else args[_MADE[func]]
            dtype = (kwargs or {}).get("dtype")
            if dtype is None:
                usual = torch.int64 if func in _INTEGERS else torch.get_default_dtype()
                dtype = args[0].dtype if func in _LIKE else usual
            sizes = torch.Size([sizes] if isinstance(sizes, int) else sizes)
            return self._next(sizes).to(dtype, copy=True)
        if func in _IN_PLACE:
            return args[0].copy_(self._next(args[0].size()))
        if func is _aten.native_dropout.default and args[2] is not False and 0 < args[1] < 1:
            mask = self._next(args[0].size())
            scaled = args[0] * mask.to(args[0].dtype) * (1.0 / (1.0 - args[1]))
            return scaled.to(args[0].dtype), mask.to(torch.bool)
        return func(*args, **(kwargs or {}))

    def _next(self, sizes: torch.Size) -> torch.Tensor:
        mask = next(self._masks, None)
        if mask is None or mask.size() != sizes:
            raise RuntimeError(
                "eagercache: a module draws other random masks than it did in its call"
            )
        return mask
