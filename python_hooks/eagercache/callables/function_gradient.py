"""The gradient of an operator that is a Python function, as an operator of its own.

Its arguments are the gradients of the outputs (of those that are floating-point, in order), which
tensor arguments' gradients are wanted, and the function's own arguments. It returns the wanted
gradients, laid out as `torch.empty_like` of the arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from eagercache.base.load import core
from eagercache.calls.global_state import autocast_set

_KEYS = ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")


def backward_schema(schema: str) -> str:
    """The backward operator's schema, from the function's."""
    arguments = schema[schema.index("(") + 1 : schema.rindex("->")].rstrip().removesuffix(")")
    rest = f", {arguments}" if arguments.strip() else ""
    return f"(Tensor[] _grads, bool[] _wanted{rest}) -> Tensor[]"


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments, in order."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def fake(
    _grads: Sequence[torch.Tensor], _wanted: Sequence[bool], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """Tensors of the metadata that `gradients` gives."""
    pairs = zip(tensors_of(args, kwargs), _wanted, strict=True)
    return [torch.empty_like(tensor) for tensor, wanted in pairs if wanted]


def gradients(
    function: Callable[..., Any],
    grads: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[torch.Tensor]:
    """The wanted gradients, in memory of their own and with no history."""
    inference = torch.is_inference_mode_enabled()
    with _recording():
        replacements = {
            id(tensor): _leaf(tensor, needed)
            for tensor, needed in zip(tensors_of(args, kwargs), wanted, strict=True)
        }

        def put(value: Any) -> Any:
            return replacements.get(id(value), value) if isinstance(value, torch.Tensor) else value

        own = [put(value) for value in args]
        named = {name: put(value) for name, value in kwargs.items()}
        outputs = _differentiable(function(*own, **named))
        leaves = [t for t, needed in zip(tensors_of(own, named), wanted, strict=True) if needed]
        with _autocast_of_formulas():
            computed = _grad(outputs, leaves, [_plain(grad) for grad in grads], create_graph=False)
    seen = {grad.untyped_storage()._cdata for grad in (*grads, *tensors_of(args, kwargs))}
    results = []
    for leaf, grad in zip(leaves, computed, strict=True):
        with torch.no_grad():
            made = _laid_out(leaf, grad, seen)
        results.append(made.clone() if inference else made)
    return results


def recorded_gradients(
    function: Callable[..., Any],
    grads: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[torch.Tensor]:
    """The same, recorded by autograd, so that they have gradients themselves."""
    with torch.enable_grad():
        outputs = _differentiable(function(*args, **kwargs))
        tensors = tensors_of(args, kwargs)
        inputs = [tensor for tensor, needed in zip(tensors, wanted, strict=True) if needed]
        with _autocast_of_formulas():
            return _grad(outputs, inputs, grads, create_graph=True)


def _differentiable(answer: Any) -> list[torch.Tensor]:
    outputs = answer if isinstance(answer, (tuple, list)) else (answer,)
    return [
        value
        for value in outputs
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    ]


def _grad(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    *,
    create_graph: bool,
) -> list[torch.Tensor]:
    pairs = [
        (output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        inputs,
        [grad for _, grad in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
    return [
        torch.zeros_like(tensor) if grad is None else grad
        for tensor, grad in zip(inputs, found, strict=True)
    ]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _leaf(tensor: torch.Tensor, needed: bool) -> torch.Tensor:
    leaf = _plain(tensor).detach()
    return leaf.requires_grad_() if needed else leaf


def _laid_out(like: torch.Tensor, grad: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """``grad`` in memory that nothing of ``seen`` has, with the strides of `torch.empty_like`."""
    storage = grad.untyped_storage()._cdata
    wanted = torch.empty_like(like)
    fits = grad.stride() == wanted.stride() and grad.storage_offset() == 0
    if storage in seen or not fits or grad.dtype != like.dtype or grad.requires_grad:
        return wanted.copy_(grad)
    seen.add(storage)
    return grad


@contextlib.contextmanager
def _autocast_of_formulas() -> Iterator[None]:
    """The autocast that is on where gradients are asked for, which is mostly none."""
    theirs = None if core is None else core.autocast_of_formulas()
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            dtype = theirs[1] if theirs is not None and theirs[0] == device else None
            stack.enter_context(autocast_set(device, dtype))
        yield


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Autograd records in the block, below a caller that switched it off as well."""
    keys = [getattr(torch._C.DispatchKey, name) for name in _KEYS]
    before = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys]
    with torch.inference_mode(False), torch.enable_grad():
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        try:
            yield
        finally:
            for key, excluded in zip(keys, before, strict=True):
                torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)
