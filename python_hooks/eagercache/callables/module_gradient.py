"""Gradients of a module's call by its own forward, run again, and autograd."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from eagercache.base.load import core
from eagercache.callables.answer_structure import outcome_of
from eagercache.callables.answers import views_among
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Identity, Unfit, identify
from eagercache.callables.module_stores import ModuleStores
from eagercache.callables.module_tensors import OWN_ATTRIBUTES
from eagercache.callables.objects import CallObjects, filled, map_tensors
from eagercache.calls.known_hooks import DESCRIBED_HOOKS, others
from eagercache.calls.opaque import Placeholder, hide
from eagercache.calls.replay import Replayed, drawing_again

_lock = threading.RLock()

_CHANGED = (
    "eagercache: a module, or a value that it reads, was changed between its call and a backward "
    "that has to run its forward again"
)

# By their identities, modules that have kernels for calls with gradients.
_kept: dict[str, _Kept] = {}


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
    then: Sequence[tuple[int, torch.Tensor, bool]] = (),
    values_changes: int | None = None,
) -> list[torch.Tensor | None]:
    """The gradients of ``inputs`` that are wanted, None for the others and where there is none.

    ``rebuilt`` stand for the arguments that are `...` there, in order: the forward reads no more of
    those than they hold. ``masks`` are the random ones that the call drew, ``drawn_from`` is the
    state of its device's generator before it where its kernel drew, ``before`` are buffers that
    the call read and wrote, with what they held. ``grads`` are those of the answer's tensors that
    have one. Where there are ``parts``, positions among these, the gradients of those parts of the
    answer come back instead: of each by the ways that lead through no other of them. To those
    of ``grads`` at the positions ``whole`` nothing is added that comes from others. ``then`` are
    the tensors that the call read: each with its slot in the module, -1 for an argument's, and
    whether gradients of it were wanted; ``values_changes`` is how often values outside of the
    module, which its forward reads, had been seen to change by then. All are recorded where
    autograd records: so gradients of gradients are those of the module's own forward. Called by
    autograd, on its threads, with the state of grad mode that it asks for. Raises RuntimeError
    where these values, or the module, are no longer what they were and cannot be made again.
    """
    assert core is not None
    if core.module_values_changes(module) not in (None, values_changes):
        raise RuntimeError(_CHANGED)
    records = torch.is_grad_enabled()
    if rebuilt:
        missing = iter(rebuilt)
        args = filled(args, missing)
        kwargs = filled(kwargs, missing)
    module, shown = _at_the_call(module, identity, then)
    found = {id(x) for slot, x, _ in then if slot >= 0}
    found.update(map(id, argument_tensors(args, kwargs)))
    if any(id(x) not in found for x in inputs):
        raise RuntimeError(_CHANGED)
    args, kwargs = map_tensors((args, kwargs), lambda tensor: shown.get(id(tensor), tensor))
    replayed: AbstractContextManager[object] = Replayed(masks) if masks else nullcontext()
    again = nullcontext() if drawn_from is None else drawing_again(inputs[0].device, drawn_from)
    around = _state(autocast), _buffers_kept(module, before), forwards_alone(), _unbatched()
    with around[0], around[1], around[2], around[3], replayed, again:
        outputs = _differentiable(module, args, kwargs)
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


def keep_as_it_is(module: torch.nn.Module, identity: str) -> None:
    """Remembers what a module of ``identity`` is, without its tensors.

    A gradient may have to run the forward of a call after which the module was changed:
    `torch.func.functional_call` gives it other tensors for the time of a call alone.
    """
    if identity in _kept:
        return
    with contextlib.suppress(Exception):  # an attribute that cannot be copied
        found = identify(module, allow_opaque=True)
        if found.digest != identity or _has_hooks(found):
            return
        places = [_empty(slot.tensor, torch.device("meta")) for slot in found.slots]
        instead: dict[int, Any] = {
            id(one.value): Placeholder(one.reason) for one in found.opaque if not one.is_shared
        }
        instead.update((id(slot.tensor), at) for slot, at in zip(found.slots, places, strict=True))
        kept = _copied(module, instead)
        hide(kept, [(one.path, one.name, one.reason) for one in found.opaque])
        _kept[identity] = _Kept(
            kept,
            [instead[id(slot.tensor)] for slot in found.slots],
            [slot.tensor.device for slot in found.slots],
        )


def _at_the_call(
    module: torch.nn.Module, identity: str, then: Sequence[tuple[int, torch.Tensor, bool]]
) -> tuple[torch.nn.Module, dict[int, torch.Tensor]]:
    """What is the module that was called, and what stands for tensors there, by their identities.

    That is the module itself unless it was changed.
    """
    shown = {id(x): _seen(x, needed, is_own=False) for slot, x, needed in then if slot < 0}
    own = [(slot, x, needed) for slot, x, needed in then if slot >= 0]
    found = None
    with contextlib.suppress(Unfit):
        found = identify(module, allow_opaque=True)
    if found is not None and found.digest == identity and not _has_hooks(found):
        tensors = [item.tensor for item in found.slots]
        if all(tensors[slot] is x and _seen(x, needed) is x for slot, x, needed in own):
            for _, x, _ in own:
                shown[id(x)] = x
            return module, shown
    kept = _kept.get(identity)
    if kept is None:
        raise RuntimeError(_CHANGED)
    for _, x, needed in own:
        shown[id(x)] = _seen(x, needed)
    return kept.with_tensors({slot: shown[id(x)] for slot, x, _ in own}, identity), shown


def _seen(tensor: torch.Tensor, needed: bool, is_own: bool = True) -> torch.Tensor:
    """What a forward that is run again has in the place of a tensor of its call.

    It needs gradients if they were ``needed`` then. Those that come to a view of the tensor stop
    there (`_ending_at`), before its hooks and before what it was made of: autograd goes that way
    itself.
    """
    if not needed:
        return tensor.detach() if tensor.requires_grad else tensor
    if not tensor.requires_grad:
        return tensor.detach().requires_grad_()
    if is_own and tensor.is_leaf and not tensor._backward_hooks:
        return tensor
    with torch.enable_grad():
        return tensor.view_as(tensor)


def _has_hooks(found: Identity) -> bool:
    """Whether a call of the module that was described would run hooks that are not described."""
    return any(
        others(part, DESCRIBED_HOOKS if path in found.hooked else ())
        for path, part in found.modules
    )


@dataclass(frozen=True)
class _Kept:
    """A module as it was, with ``places`` where it had tensors, which are of no memory."""

    module: torch.nn.Module
    places: list[torch.Tensor]
    devices: list[torch.device]

    def with_tensors(self, tensors: Mapping[int, torch.Tensor], identity: str) -> torch.nn.Module:
        """A copy with the tensors in their slots; memory of no meaning in those it does not read.

        Raises RuntimeError where the code of its classes is another one by now.
        """
        instead = {}
        for slot, (place, device) in enumerate(zip(self.places, self.devices, strict=True)):
            if slot in tensors or id(place) not in instead:
                instead[id(place)] = tensors[slot] if slot in tensors else _empty(place, device)
        made = _copied(self.module, instead)
        if identify(made).digest != identity:
            raise RuntimeError(_CHANGED)
        return made


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _copied(module: torch.nn.Module, instead: Mapping[int, Any]) -> torch.nn.Module:
    """A copy of all of ``module``, with others in the place of tensors, by their identities."""
    parts = list(module.modules())
    memo: dict[int, Any] = {id(part): object.__new__(type(part)) for part in parts}
    memo.update(instead)
    for part in parts:
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                copied: Any = {key: memo.get(id(item), item) for key, item in value.items()}
            elif name in OWN_ATTRIBUTES:
                copied = copy.copy(value)
            else:
                copied = copy.deepcopy(value, memo)
            vars(memo[id(part)])[name] = copied
    copy_of_it: torch.nn.Module = memo[id(module)]
    return copy_of_it


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


def _differentiable(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The parts of a call's answer that a kernel has gradients of, which views of others are not.

    What it assigns to attributes is undone: the call that has a kernel has assigned already.
    """
    objects, stores = CallObjects(args, kwargs), ModuleStores(module)
    answer = module(*args, **kwargs)
    try:
        stores.find(argument_tensors(args, kwargs), has_kernel=True)
        objects.stores = stores if stores.places else None
        leaves = pytree.tree_leaves(outcome_of(answer, objects))
    except Unfit as error:
        raise RuntimeError(_CHANGED) from error
    finally:
        stores.restore()
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
def _unbatched() -> Iterator[None]:
    """Beside batched gradients (`is_grads_batched`) nothing may be drawn; the call was outside."""
    level = torch._C._vmapmode_increment_nesting()
    for _ in range(level):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(level - 1):
            torch._C._vmapmode_increment_nesting()


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
