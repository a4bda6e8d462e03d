"""Attributes of modules that a forward assigns: what a call leaves there is part of what it does.

A recurrent layer keeps its state, an attention layer its weights for people to look at, an encoder
the loss that its caller adds. `ModuleStores` finds out what a forward assigns, tells what it left,
and puts back what was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.code_values import MISSING
from eagercache.callables.module_identity import Unfit
from eagercache.calls.opaque import Placeholder

_PLAIN = (bool, int, float, str)


@dataclass(frozen=True, order=True)
class StorePlace:
    """Where a forward puts something.

    Attributes:
        module: its number among the modules of the tree, as `identify` has them.
        in_buffers: whether it is among that module's buffers.
        name: of the attribute or buffer.
    """

    module: int
    in_buffers: bool
    name: str

    @property
    def steps(self) -> tuple[str, ...]:
        """From the module's dictionary."""
        return ("_buffers", self.name) if self.in_buffers else (self.name,)


class ModuleStores:
    """What a forward assigns to attributes of ``module`` and of everything below it.

    Attributes:
        places: those that it assigns, once `find` was asked.
        given: those to which it assigns an argument itself, with that one's number.
        again: those to which it assigns what it assigns to one of `places`, with that one's number.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.places: tuple[StorePlace, ...] = ()
        self.given: tuple[tuple[StorePlace, int], ...] = ()
        self.again: tuple[tuple[StorePlace, int], ...] = ()
        self._opaque: dict[StorePlace, Any] = {}
        self._tables = [(vars(part), part._buffers) for part in module.modules()]
        self._before = [(dict(own), dict(buffers)) for own, buffers in self._tables]

    def of(self, module: torch.nn.Module) -> ModuleStores:
        """The same places of another module of that kind, with what it holds now."""
        other = ModuleStores(module)
        other.places, other.given, other.again = self.places, self.given, self.again
        return other

    def find(self, arguments: Sequence[torch.Tensor] = (), *, has_kernel: bool = False) -> None:
        """Notes the places that have other tensors than before. Raises Unfit for other changes.

        After a call of a kernel the module has to be what it was before: one of the same identity.
        That has nothing of an attribute that is opaque, which may be given any plain value, too. In
        the program, where these have their values, a module that ``has_kernel`` assigns no others.
        ``arguments``: the tensors of the call.
        """
        found: list[StorePlace] = []
        given: list[tuple[StorePlace, int]] = []
        others: list[StorePlace] = []
        numbers = {id(tensor): number for number, tensor in enumerate(arguments)}
        for place, value, old in self._changed():
            is_unread = type(old) is Placeholder or (has_kernel and type(old) in _PLAIN)
            is_plain = value is None or type(value) in _PLAIN
            fits = is_plain if is_unread else _are_alike(value, old)
            if fits and id(value) in numbers:
                given.append((place, numbers[id(value)]))
            else:
                (found if fits else others).append(place)
            if type(old) is Placeholder:
                self._opaque[place] = value
        self.places, self.given, self.again = (), tuple(sorted(given)), ()
        firsts: dict[int, int] = {}
        for place in sorted(found):
            value = self._value(place)
            if not isinstance(value, torch.Tensor) or id(value) not in firsts:
                firsts[id(value)] = len(self.places)
                self.places += (place,)
            else:
                self.again += ((place, firsts[id(value)]),)
        if others:
            raise Unfit(f"it makes another thing of its attribute {others[0].name}")

    def values(self) -> Iterator[tuple[StorePlace, Any]]:
        """What the places have now."""
        for place in self.places:
            yield place, self._value(place)

    def have(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether places that are given arguments, or what others are, have those."""
        given = all(self._value(place) is arguments[number] for place, number in self.given)
        return given and all(
            self._value(place) is self._value(self.places[number]) for place, number in self.again
        )

    def settle(self) -> None:
        """Puts plain values where attributes are opaque, once nobody asks whether they are read."""
        for place, value in self._opaque.items():
            self._before[place.module][place.in_buffers][place.name] = value
        self.restore()

    def rows(self) -> dict[int, list[Any]]:
        """By the numbers of modules that it assigns to, rows (places/values.h) of what they have.

        For a process in which nobody else assigns: whatever is of the same type is the same.
        """
        return {
            number: [("dict", table, tuple(table), tuple((type(x), True) for x in table.values()))]
            for number in sorted({place.module for place in self._all()})
            for table in [self._tables[number][0]]
        }

    def restore(self) -> None:
        """Puts back what the places had when this was made."""
        for place in self._all():
            table = self._tables[place.module][place.in_buffers]
            table[place.name] = self._before[place.module][place.in_buffers][place.name]

    def _all(self) -> list[StorePlace]:
        return [*self.places, *(place for place, _ in (*self.given, *self.again))]

    def _value(self, place: StorePlace) -> Any:
        return self._tables[place.module][place.in_buffers][place.name]

    def _changed(self) -> Iterator[tuple[StorePlace, Any, Any]]:
        for number, (tables, befores) in enumerate(zip(self._tables, self._before, strict=True)):
            for in_buffers, (now, before) in enumerate(zip(tables, befores, strict=True)):
                for name in [*before, *(name for name in now if name not in before)]:
                    value, old = now.get(name, MISSING), before.get(name, MISSING)
                    if value is not old and not _is_equal(value, old):
                        yield StorePlace(number, bool(in_buffers), name), value, old


def _are_alike(value: Any, old: Any) -> bool:
    """Whether the identity of the module is the same with both tensors."""
    if type(value) is not torch.Tensor or type(old) is not torch.Tensor:
        return False
    return _metadata(value) == _metadata(old)


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided:
        return (tensor.layout, id(tensor))
    return (tensor.dtype, tensor.device, tensor.size(), tensor.stride())


def _is_equal(value: Any, old: Any) -> bool:
    if isinstance(value, tuple) and type(value) is type(old):
        return len(value) == len(old) and all(
            one is other or _is_equal(one, other) for one, other in zip(value, old, strict=True)
        )
    return type(value) is type(old) and type(value) in _PLAIN and repr(value) == repr(old)
