"""The tensors that a module has: its own, and those in lists and dicts that are its attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Attributes of torch.nn.Module itself: hooks are looked at on every call, the rest does not change
# what a forward computes.
OWN_ATTRIBUTES = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_backward_pre_hooks",
        "_backward_hooks",
        "_is_full_backward_hook",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_version",
        "dump_patches",
    }
)

_MOST_HELD_BYTES = 16 << 20  # in containers


@dataclass(frozen=True)
class TensorSlot:
    """One tensor of the tree, in the order in which the guard holds them."""

    path: str  # of the module that owns it, "" for the root
    kind: str  # "parameter", "buffer", "attribute" or "item", of a container that is an attribute
    name: str
    tensor: torch.Tensor
    steps: tuple[str | int, ...] = ()  # from the container to an item

    @property
    def full_name(self) -> str:
        """The name as `named_parameters` and an exported program spell it."""
        name = self.name + "".join(f"[{step!r}]" for step in self.steps)
        return f"{self.path}.{name}" if self.path else name


def groups_of(module: torch.nn.Module) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """What a module keeps tensors under, by their kind."""
    return (
        ("parameter", module._parameters),
        ("buffer", module._buffers),
        ("attribute", {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}),
    )


def own_tensors(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """The tensors that the guard of a module holds, by identity: its own and its parts'."""
    modules = list(module.named_modules())
    items = [slot.tensor for slots in items_of(modules).values() for slot in slots]
    return {id(tensor): tensor for tensor in (*_registered(modules), *items)}


def _registered(modules: list[tuple[str, torch.nn.Module]]) -> list[torch.Tensor]:
    """All tensors that are attributes, parameters and buffers themselves."""
    groups = [group for _, part in modules for _, group in groups_of(part)]
    return [tensor for group in groups for tensor in list(group.values()) if tensor is not None]


def items_of(modules: list[tuple[str, torch.nn.Module]]) -> dict[str, list[TensorSlot]]:
    """By path, tensors in lists, tuples and dicts that are attributes of modules; each comes once.

    The guard's rows hold them until the next call, even where the program lets go of them before:
    none where they are many, or large, or one would keep a graph of autograd alive.
    """
    found: dict[str, list[TensorSlot]] = {}
    seen: set[int] = set()
    left = _MOST_HELD_BYTES
    for path, part in modules:
        for name, value in list(vars(part).items()):
            if type(value) not in (list, tuple, dict) or name in OWN_ATTRIBUTES:
                continue
            for steps, tensor in _held_in(value, ()):
                if not seen:
                    seen.update(map(id, _registered(modules)))
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                slot = TensorSlot(path, "item", name, tensor, steps)
                found.setdefault(path, []).append(slot)
                left -= max(tensor.numel() * tensor.element_size(), _MOST_HELD_BYTES >> 8)
                if left < 0 or tensor.grad_fn is not None:
                    return {}
    return found


def _held_in(value: Any, steps: tuple[str | int, ...]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The tensors in a container, with the steps to them that the core can take."""
    if isinstance(value, torch.Tensor):
        yield steps, value
    elif len(steps) > 3:
        return
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _held_in(item, (*steps, index))
    elif type(value) is dict and all(type(key) in (str, int) for key in list(value)):
        for key, item in list(value.items()):
            yield from _held_in(item, (*steps, key))


def tensor_row(slot: TensorSlot) -> list[Any]:
    """What a description has of a tensor."""
    tensor = slot.tensor
    return [
        slot.full_name,
        slot.kind,
        str(tensor.dtype),
        tensor.device.type,
        list(tensor.size()),
        list(tensor.stride()),
        tensor.data_ptr() % 64 == 0,
    ]


def sharing(slots: list[TensorSlot]) -> list[list[int]]:
    """Slots that are one tensor: a kernel is traced for exactly that."""
    groups: dict[int, list[int]] = {}
    for index, slot in enumerate(slots):
        groups.setdefault(id(slot.tensor), []).append(index)
    return [group for group in groups.values() if len(group) > 1]
