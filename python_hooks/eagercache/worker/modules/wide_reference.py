"""What a forward gives in float64, beside which errors are measured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from eagercache.callables.module_tensors import own_tensors
from eagercache.calls.numerics import ProofFailed, is_out_of_memory

_NARROW = (torch.float16, torch.bfloat16, torch.float32)

Answer = TypeVar("Answer")


def wide_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose numbers are float64, in the same tensors wherever it keeps these."""
    copied = copy.deepcopy(module)
    for tensor in own_tensors(copied).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float64)
    return copied


def in_float64(run: Callable[[], Answer]) -> Answer:
    """What ``run`` gives, which calls a float64 copy of a module. Raises ProofFailed.

    A forward that casts to a dtype by its name (`t.float()`) mixes that with its weights, which may
    raise. So may one that makes a tensor of the least number of its weights' dtype, which the
    default dtype does not hold. It is run again with each such cast made one to float64, and that
    for the default.
    """
    try:
        return run()
    except Exception as error:
        if isinstance(error, ProofFailed) or is_out_of_memory(error):
            raise
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            with _Widened():
                return run()
        except Exception as again:
            if isinstance(again, ProofFailed) or is_out_of_memory(again):
                raise
            raise ProofFailed("not equal bit for bit, and there is no wider reference") from again
        finally:
            torch.set_default_dtype(default)


class _Widened(TorchDispatchMode):
    """A block in which operators take and give float64 in the place of narrower floats."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        if func._schema.is_mutable and any(map(_is_narrow, pytree.tree_leaves(given))):
            raise ProofFailed(
                "not equal bit for bit, and its wider reference writes narrow numbers"
            )
        args, kwargs = pytree.tree_map(_widened, given)
        return pytree.tree_map(_widened, func(*args, **kwargs))


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _NARROW


def _widened(value: Any) -> Any:
    if _is_narrow(value):
        return value.to(torch.float64)
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
