"""Other forms of a backend call: layouts, special values, writing forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .database import BackendCall, copy, tensors_in

Transform = Callable[[torch.Tensor], torch.Tensor]

_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38, -3e38, 1.0, -1.5)
_INTEGERS = (0, -1, 1, 2, -2, 7)


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() >= 2 else t


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    if t.dim() == 4:
        return t.contiguous(memory_format=torch.channels_last)
    if t.dim() == 5:
        return t.contiguous(memory_format=torch.channels_last_3d)
    return t


def _sliced(t: torch.Tensor) -> torch.Tensor:
    """The same sizes and strides, from the second element of its memory on."""
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.size())


def _stepped(t: torch.Tensor) -> torch.Tensor:
    """Every second element of its memory."""
    return t.repeat_interleave(2, dim=-1)[..., ::2] if t.dim() else t


def _expanded(t: torch.Tensor) -> torch.Tensor:
    return t[:1].expand(t.size()) if t.dim() and t.size(0) > 1 else t


def _zero_dim(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1)[0].clone() if t.numel() else t


def _empty(t: torch.Tensor) -> torch.Tensor:
    return t[:0].clone() if t.dim() else t


def _narrowed(t: torch.Tensor) -> torch.Tensor:
    return t[:-1].clone() if t.dim() and t.size(0) > 1 else t


_SAME_SIZES: tuple[tuple[str, Transform], ...] = (
    ("transposed", _transposed),
    ("channels_last", _channels_last),
    ("sliced", _sliced),
    ("step2", _stepped),
    ("expanded", _expanded),
)
_OTHER_SIZES: tuple[tuple[str, Transform], ...] = (
    ("0-dim", _zero_dim),
    ("empty", _empty),
    ("narrowed", _narrowed),
)


def forms(call: BackendCall, hooked: set[str]) -> Iterator[BackendCall]:
    """Every other form of the call that differs from it, writing ones of hooked overloads only."""
    yield from layouts(call)
    special = with_special_values(call)
    if special is not None:
        yield special
    yield from writing_forms(call, hooked)


def layouts(call: BackendCall) -> Iterator[BackendCall]:
    """The call with its tensors laid out otherwise; of other sizes where that is safe to ask."""
    if _share_memory(call):
        return
    chosen = _SAME_SIZES
    if not _is_internal(call.name) and not _asserts_on_device(call):
        chosen += _OTHER_SIZES
    for name, transform in chosen:
        changed = _changed(call, name, transform, everywhere=True)
        if changed is not None:
            yield changed
    if len(tensors_in((call.args, dict(call.kwargs)))) > 1:
        changed = _changed(call, "first transposed", _transposed, everywhere=False)
        if changed is not None:
            yield changed


def _is_internal(name: str) -> bool:
    """Operators that other operators call with sizes that fit; they do not check them all."""
    base = name.partition("::")[2]
    return (base.startswith("_") and not base.startswith("_foreach")) or "backward" in base


def _asserts_on_device(call: BackendCall) -> bool:
    """Whether indices past a smaller tensor's end would end all work on the GPU."""
    tensors = tensors_in((call.args, dict(call.kwargs)))
    on_gpu = any(t.is_cuda for t in tensors)
    indices = any(not t.is_floating_point() and not t.is_complex() for t in tensors)
    return on_gpu and indices and torch.Tag.pointwise not in call.func.tags


def _share_memory(call: BackendCall) -> bool:
    storages = [t.untyped_storage()._cdata for t in tensors_in((call.args, dict(call.kwargs)))]
    return len(set(storages)) != len(storages)


def _changed(
    call: BackendCall, form: str, transform: Transform, everywhere: bool
) -> BackendCall | None:
    """The call with tensors changed, all or the first; None where that changes nothing."""
    any_changed = False
    count = itertools.count()

    def change(leaf: Any) -> Any:
        nonlocal any_changed
        if not isinstance(leaf, torch.Tensor) or (next(count) and not everywhere):
            return leaf
        other = transform(leaf)
        any_changed |= (
            other.size() != leaf.size()
            or other.stride() != leaf.stride()
            or other.storage_offset() != leaf.storage_offset()
        )
        return other

    try:
        args, kwargs = tree_map(change, copy((call.args, dict(call.kwargs))))
    except RuntimeError:  # no such layout of this dtype or size
        return None
    return replace(call, args=args, kwargs=kwargs, form=form) if any_changed else None


def with_special_values(call: BackendCall) -> BackendCall | None:
    """The call with every third number replaced; integers only where they can be no index."""
    pointwise = torch.Tag.pointwise in call.func.tags
    on_gpu = any(t.is_cuda for t in tensors_in((call.args, dict(call.kwargs))))
    if on_gpu and "binary_cross_entropy" in call.name:
        return None  # raises for what is no probability, which ends all work there
    any_changed = False

    def change(leaf: Any) -> Any:
        nonlocal any_changed
        if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0:
            return leaf
        integral = not leaf.is_floating_point() and not leaf.is_complex()
        if leaf.dtype == torch.bool or (integral and not pointwise):
            return leaf
        changed = leaf.contiguous().clone()
        flat = changed.view(-1)
        values: tuple[Any, ...] = _SPECIAL
        if integral:
            limits = torch.iinfo(leaf.dtype)
            small = (v for v in _INTEGERS if limits.min <= v)
            values = (*small, limits.min, limits.max)
        elif leaf.dtype == torch.float16:
            values = tuple(v for v in _SPECIAL if not 1e5 < abs(v) < 1e39)
        step = 3 if flat.numel() > 3 else 1
        for place, value in zip(range(0, flat.numel(), step), itertools.cycle(values)):
            flat[place] = value
        any_changed = True
        return changed

    args, kwargs = tree_map(change, copy((call.args, dict(call.kwargs))))
    return replace(call, args=args, kwargs=kwargs, form="special") if any_changed else None


def writing_forms(call: BackendCall, hooked: set[str]) -> Iterator[BackendCall]:
    """The in-place form and the forms with out= that take the same arguments."""
    schema = call.func._schema
    space, _, base = schema.name.partition("::")
    if base.endswith("_") or any(a.is_out for a in schema.arguments):
        return
    namespace = getattr(torch.ops, space)
    inplace = getattr(namespace, base + "_", None)
    if inplace is not None and schema.overload_name in _named(inplace):
        func = getattr(inplace, schema.overload_name or "default")
        if _name_of(func) in hooked and _names(func) == _names(call.func):
            yield replace(_fresh(call), func=func, form="in-place")
    packet = getattr(namespace, base)
    for overload in packet.overloads():
        func = getattr(packet, overload)
        outs = [a.name for a in func._schema.arguments if a.is_out]
        if outs and _name_of(func) in hooked and _names(func) == _names(call.func) + outs:
            made = _outputs(call)
            if made is not None and len(made) == len(outs):
                given = _fresh(call)
                kwargs = {**given.kwargs, **dict(zip(outs, made, strict=True))}
                yield replace(given, func=func, kwargs=kwargs, form="out")


def _fresh(call: BackendCall) -> BackendCall:
    args, kwargs = copy((call.args, dict(call.kwargs)))
    return replace(call, args=args, kwargs=kwargs)


def _outputs(call: BackendCall) -> list[torch.Tensor] | None:
    """Tensors like those that the call makes; None where it makes none."""
    given = _fresh(call)
    try:
        made = given.func(*given.args, **given.kwargs)
    except Exception:  # native refuses: the plain form shows how
        return None
    made = [made] if isinstance(made, torch.Tensor) else list(made)
    if not all(isinstance(one, torch.Tensor) for one in made):
        return None
    return [torch.zeros_like(one) for one in made]


def _named(packet: Any) -> set[str]:
    return {"" if name == "default" else name for name in packet.overloads()}


def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _name_of(func: Any) -> str:
    schema = func._schema
    return f"{schema.name}.{schema.overload_name}".removesuffix(".")
