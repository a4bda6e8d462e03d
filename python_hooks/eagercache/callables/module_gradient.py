"""Gradients of a module's call by its own forward, run again, and autograd."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from eagercache.base.load import core
from eagercache.callables.answer_structure import outcome_of
from eagercache.callables.answers import views_among
from eagercache.callables.module_identity import identify
from eagercache.callables.objects import CallObjects
from eagercache.callables.replay import Replayed, drawing_again

_lock = threading.RLock()


def _renew_lock() -> None:
    """A thread that a fork did not copy may have it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def eager_gradients(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rebuilt: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    drawn_from: torch.Tensor | None,
    before: Sequence[tuple[torch.Tensor, torch.Tensor]],
    identity: str,
    autocast: Mapping[str, torch.dtype],
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    grads: Sequence[torch.Tensor | None],
    parts: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> list[torch.Tensor | None]:
    """The gradients of ``inputs`` that are wanted, None for the others and where there is none.

    ``rebuilt`` stand for the arguments that are `...` there, in order: the forward reads no more of
    those than they hold. ``masks`` are the random ones that the call drew, ``drawn_from`` is the
    state of its device's generator before it where its kernel drew, ``before`` are buffers that
    the call read and wrote, with what they held. ``grads`` are those of the answer's tensors that
    have one. Where there are ``parts``, positions among these, the gradients of those parts of the
    answer come back instead: of each by the ways that lead through no other of them. To those
    of ``grads`` at the positions ``whole`` nothing is added that comes from others. All are
    recorded where autograd records: so gradients of gradients are those of the module's own
    forward. Called by autograd, on its threads, with the state of grad mode that it asks for.
    Raises RuntimeError when the module is another one than it was at the call.
    """
    records = torch.is_grad_enabled()
    if rebuilt:
        missing = iter(rebuilt)
        args = _filled(args, missing)
        kwargs = _filled(kwargs, missing)
    found = identify(module)
    known = {id(slot.tensor) for slot in found.slots} | {
        id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
    }
    if found.digest != identity or any(id(tensor) not in known for tensor in inputs):
        raise RuntimeError(
            "eagercache: a module was changed between its call and a backward that has to run its "
            "forward again"
        )
    shown = _shown(inputs, {id(slot.tensor) for slot in found.slots})
    args, kwargs = pytree.tree_map(lambda leaf: shown.get(id(leaf), leaf), (args, kwargs))
    replayed: AbstractContextManager[object] = Replayed(masks) if masks else nullcontext()
    again = nullcontext() if drawn_from is None else drawing_again(inputs[0].device, drawn_from)
    with _state(autocast), _buffers_kept(module, before), forwards_alone(), replayed, again:
        answer = module(*args, **kwargs)
    outputs = _differentiable(answer, args, kwargs)
    pairs = [(own, grad) for own, grad in zip(outputs, grads, strict=True) if grad is not None]
    if not pairs:
        return [None] * len(inputs)
    if parts:
        return _behind(pairs, [outputs[part] for part in parts], records)
    # A tensor that is given twice has one gradient of both.
    chosen = {id(tensor): tensor for tensor, needed in zip(inputs, wanted, strict=True) if needed}
    ends = _ending_at(shown.values()), _being((outputs[part], grads[part]) for part in whole)
    with torch.set_grad_enabled(True), ends[0], ends[1]:
        computed = torch.autograd.grad(
            [output for output, _ in pairs],
            [shown.get(key, tensor) for key, tensor in chosen.items()],
            [grad for _, grad in pairs],
            retain_graph=True,
            create_graph=records,
            allow_unused=True,
        )
    left = dict(zip(chosen, computed, strict=True))
    return [
        left.pop(id(tensor), None) if needed else None
        for tensor, needed in zip(inputs, wanted, strict=True)
    ]


def _behind(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    parts: Sequence[torch.Tensor],
    records: bool,
) -> list[torch.Tensor | None]:
    """What the gradients ``pairs`` have give to ``parts``, none of it through another of these."""
    taken: dict[int, torch.Tensor] = {}

    def taking(part: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def take(gradient: torch.Tensor) -> torch.Tensor:
            taken[part] = gradient
            return torch.zeros_like(gradient)

        return take

    # Gradients of these gradients go through the parts again, without the hooks.
    with _removing([part.register_hook(taking(number)) for number, part in enumerate(parts)]):
        torch.autograd.grad(
            [output for output, _ in pairs],
            parts,
            [gradient for _, gradient in pairs],
            retain_graph=True,
            create_graph=records,
            allow_unused=True,
        )
    return [taken.get(number) for number in range(len(parts))]


def _being(
    gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
) -> AbstractContextManager[None]:
    """The gradients of these tensors are those beside them in the block, whatever comes to them."""
    return _removing(
        [part.register_hook(lambda _, gradient=gradient: gradient) for part, gradient in gradients]
    )


@contextlib.contextmanager
def _removing(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    """The hooks are there in the block alone."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _shown(inputs: Sequence[torch.Tensor], own: set[int]) -> dict[int, torch.Tensor]:
    """Views of the arguments among ``inputs``, by the identities of those."""
    with torch.enable_grad():
        return {id(x): x.view_as(x) for x in inputs if id(x) not in own}


def _ending_at(views: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Gradients go no further than to these views in the block.

    Through an argument they would come to another one that it was made of, or to a parameter:
    these are not the call's gradients of them, and autograd goes that way itself.
    """
    nodes = [view.grad_fn for view in views]
    return _removing(
        [
            node.register_prehook(lambda gradients: (None,) * len(gradients))
            for node in nodes
            if node is not None
        ]
    )


def _filled(value: Any, missing: Iterator[torch.Tensor]) -> Any:
    """``value`` with tensors in the place of `...`, met in the order of `argument_tensors`."""
    if value is ...:
        return next(missing)
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(item, missing) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, missing) for key, item in value.items()}
    return value


def _differentiable(
    answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The parts of an answer that a kernel has gradients of, which views of others are not."""
    leaves = pytree.tree_leaves(outcome_of(answer, CallObjects(args, kwargs)))
    views = views_among(leaves)
    return [
        leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and index not in views
    ]


@contextlib.contextmanager
def _state(autocast: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Grad mode on and autocast as it was at the call."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(
                torch.autocast(
                    device,
                    autocast.get(device),
                    enabled=device in autocast,
                    cache_enabled=False,
                )
            )
        yield


@contextlib.contextmanager
def _buffers_kept(
    module: torch.nn.Module, before: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """The buffers have their values again after the block: the call has written them already.

    In the block they have those of ``before`` the call, as far as the forward reads them. No two
    threads are in it at once, which would take each other's for the module's own.
    """
    buffers = list(module.buffers())
    with _lock if buffers else nullcontext():
        values = [buffer.detach().clone() for buffer in buffers]
        try:
            for buffer, value in before:
                buffer.data.copy_(value)
            yield
        finally:
            for buffer, value in zip(buffers, values, strict=True):
                if not torch.equal(buffer, value):
                    buffer.data.copy_(value)


@contextlib.contextmanager
def forwards_alone() -> Iterator[None]:
    """Calls in the block are answered by forwards alone, on this thread."""
    assert core is not None
    core.modules_step_aside(True)
    try:
        yield
    finally:
        core.modules_step_aside(False)
