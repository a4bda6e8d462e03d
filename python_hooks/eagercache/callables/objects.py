"""Python objects among the arguments of a module's call: a cache of keys and values, for one.

The core reads such an object with all that it holds (nn_modules/objects.h), so that its plain
values are in the key of a call and its tensors are inputs. What a forward puts into it is part of
the kernel's answer. `CallObjects` finds the objects of a call, tells what a forward changed, and
puts back what was there. All walks go in the core's order.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.code_values import MISSING
from eagercache.callables.made_classes import (
    fields_of,
    is_fixed,
    is_model_output,
    is_named_tuple,
    make_object,
    set_field,
    slots_of,
)
from eagercache.callables.module_identity import Unfit
from eagercache.callables.module_stores import ModuleStores

# Where a changed value is in an object: the attribute's name, then keys and positions inside of it.
Place = tuple[Any, ...]


def is_object(value: Any) -> bool:
    """Whether an argument that the core has read is an instance of a class with attributes."""
    if isinstance(value, (type, torch.Tensor, list, enum.Enum)):
        return False
    if isinstance(value, tuple):
        return is_named_tuple(type(value))
    if isinstance(value, dict):
        return is_model_output(type(value))
    return isinstance(getattr(value, "__dict__", None), dict) or bool(slots_of(type(value)))


_MAX_COUNT = (1 << 31) - 1


def is_count(value: Any) -> bool:
    """Whether an integer that an object holds may be left open, as a size (kCount of the core)."""
    return type(value) is int and 0 <= value <= _MAX_COUNT


def parts_of(value: Any) -> Iterator[Any]:
    """What a container or an object holds; nothing of other values."""
    if is_object(value):
        yield from fields_of(value).values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of arguments with ``change(tensor)`` in the place of each tensor."""
    return map_sized(value, change, lambda count: count)


def map_sized(
    value: Any,
    change: Callable[[torch.Tensor], Any],
    count: Callable[[int], Any],
    inside: bool = False,
) -> Any:
    """The same, with ``count(value)`` in the place of each count that an object holds.

    Both are called in the core's order. ``inside``: of an object.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if inside and is_count(value):
        return count(value)
    if type(value) in (tuple, list):
        return type(value)(map_sized(item, change, count, inside) for item in value)
    if type(value) is dict:
        return {key: map_sized(item, change, count, inside) for key, item in value.items()}
    if not is_object(value):
        return value
    held = fields_of(value).items()
    changed = {name: map_sized(item, change, count, inside=True) for name, item in held}
    return make_object(type(value), changed)


def filled(value: Any, missing: Iterator[torch.Tensor]) -> Any:
    """``value`` with tensors in the place of `...`, in the core's order."""
    if value is ...:
        return next(missing)
    if is_object(value):
        held = fields_of(value).items()
        return make_object(type(value), {name: filled(item, missing) for name, item in held})
    if isinstance(value, (tuple, list)):
        return type(value)(filled(item, missing) for item in value)
    if isinstance(value, dict):
        return {key: filled(item, missing) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Change:
    """What a forward put into an object, or assigned to an attribute of a module.

    Attributes:
        index: of the object among those of the call, or of the module in its tree.
        place: where in it.
        value: a tensor, a plain value, a dtype, a device or a member of an enum.
        of_module: whether it is a module's.
    """

    index: int
    place: Place
    value: Any
    of_module: bool = False


class CallObjects:
    """The objects of a call, and what they hold before it.

    Attributes:
        found: the objects, in the core's order.
        fields: what each of them held.
        stores: what the forward assigns to attributes of its module; None where that is nothing.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.found: list[Any] = []
        self.fields: list[dict[str, Any]] = []
        self.stores: ModuleStores | None = None
        # (list or dict that can be changed, what it held), in the order of the walk.
        self._held: list[tuple[Any, Any]] = []
        self._outside: list[Any] = []  # of those places, the ones in no object
        self._items: list[tuple[Any, list[tuple[str, Any]]]] = []  # of outputs of transformers
        for value in (*args, *kwargs.values()):
            self._walk(value, inside=False)
        if not self.found:  # what becomes of lists and dicts alone is seen by the tracer
            self._held.clear()
            self._outside.clear()

    def _walk(self, value: Any, inside: bool) -> None:
        if is_object(value):
            self.found.append(value)
            inside = True
            self.fields.append(dict(fields_of(value)))
            if isinstance(value, dict):
                self._items.append((value, list(value.items())))
        elif isinstance(value, (list, dict)):
            self._held.append((value, value.copy()))
            if not inside:
                self._outside.append(value)
        for part in parts_of(value):
            self._walk(part, inside)

    @property
    def may_change(self) -> bool:
        """Whether a call may change what was there before it: an object, an attribute."""
        return bool(self.found) or self.stores is not None

    def restore(self) -> None:
        """Puts back what the objects held when this was made, and attributes of the module."""
        if self.stores is not None:
            self.stores.restore()
        for place, held in self._held:
            if isinstance(place, list):
                place[:] = held
            else:
                place.clear()
                place.update(held)
        for owner, fields in zip(self.found, self.fields, strict=True):
            _restore_fields(owner, fields)
        for output, items in self._items:  # whose class forbids that
            OrderedDict.clear(output)
            for name, value in items:
                OrderedDict.__setitem__(output, name, value)

    def changes(self) -> list[Change]:
        """What differs from what they held, and what the module's attributes have. Raises Unfit."""
        found: list[Change] = []
        held_by = {id(place): held for place, held in self._held}
        for place in self._outside:
            self._compare(place, held_by[id(place)], held_by, ("",), 0, found)
        if found:
            raise Unfit("its forward changes a list or dict among its arguments")
        for index, owner in enumerate(self.found):
            self._compare(fields_of(owner), self.fields[index], held_by, (), index, found)
        changed = [self.found[change.index] for change in found] + [
            output
            for output, fields in self._items
            if [(name, id(value)) for name, value in output.items()]
            != [(name, id(value)) for name, value in fields]
        ]
        for kind in map(type, changed):
            if is_fixed(kind):
                raise Unfit(f"its forward changes a {kind.__name__} among its arguments")
        for store, value in () if self.stores is None else self.stores.values():
            found.append(Change(store.module, store.steps, value, of_module=True))
        return found

    def _compare(
        self,
        now: Any,
        before: Any,
        held_by: dict[int, Any],
        place: Place,
        index: int,
        found: list[Change],
    ) -> None:
        if isinstance(now, (list, tuple)):
            keys: list[Any] = list(range(len(now)))
            same = len(before) == len(now)
        else:
            keys = list(now)
            # What is new comes last, as when it is put there again.
            same = keys[: len(before)] == list(before) and (not place or len(keys) == len(before))
        if not same:
            raise Unfit("its forward adds to an argument's containers, or takes from them")
        for key in keys:
            old = before.get(key, MISSING) if isinstance(now, dict) else before[key]
            value, where = now[key], (*place, key)
            if value is old:
                if isinstance(value, (list, dict, tuple)) and not is_object(value):
                    # A tuple stays what it is, and may hold what does not.
                    held = held_by.get(id(value), value)
                    self._compare(value, held, held_by, where, index, found)
            elif not _is_equal(value, old):
                _check_value(value, old)
                found.append(Change(index, where, value))


def _restore_fields(owner: Any, fields: dict[str, Any]) -> None:
    held = getattr(owner, "__dict__", None)
    if isinstance(held, dict):
        held.clear()
        held.update(fields)
        return
    for name in slots_of(type(owner)):
        if name in fields:
            set_field(owner, name, fields[name])
        elif name in fields_of(owner):
            object.__delattr__(owner, name)


def _is_equal(value: Any, old: Any) -> bool:
    plain = (bool, int, float, str, torch.dtype, torch.device)
    return isinstance(value, plain) and type(value) is type(old) and repr(value) == repr(old)


def _check_value(value: Any, old: Any) -> None:
    allowed = (torch.Tensor, bool, int, float, str, torch.dtype, torch.device)
    if value is not None and type(value) not in allowed and not isinstance(value, enum.Enum):
        raise Unfit(f"its forward puts a {type(value).__name__} into an argument")
    if is_object(old) or isinstance(old, (list, dict)):
        raise Unfit("its forward replaces an object in an argument")
