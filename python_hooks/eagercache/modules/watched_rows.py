"""Rows of values of the program, which are compared or held before a kernel answers."""

from __future__ import annotations

import copyreg
import enum
import functools
import os
import types
import weakref
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from eagercache.callables.code_values import (
    MISSING,
    attribute_places,
    filled_cells,
    functions_in,
    is_class_of_program,
    is_covered,
    is_of_program,
    members,
)
from eagercache.callables.guard_rows import (
    OF_MEMBERS,
)
from eagercache.callables.module_identity import NOT_COMPARED, never_changes
from eagercache.callables.module_tensors import OWN_ATTRIBUTES, own_tensors
from eagercache.calls.array_contents import contents_of, is_array
from eagercache.modules.held_parts import (
    Holdable,
    attributes_of,
    function_parts,
    held_parts,
    is_found_unasked,
    is_leaf,
)

# (sort, place, keys, expected): see nn_modules/places/values.h.
Row = tuple[str, Any, tuple[Any, ...], tuple["Value", ...]]
Value = tuple[Any, bool | None]

NOT_THERE = (None, True)
_WITH_PARTS = (list, tuple, dict, set, frozenset, functools.partial, types.FunctionType)
_MAX_VALUES = 4096
_MAX_BYTES = 256 << 10  # of arrays


class Unwatchable(Exception):
    """A value that a kernel stands on may change without being noticed."""


class Rows:
    """Collects rows; each place comes once.

    Of ``module``, which is watched: its tensors and the modules below it may be in rows, since its
    guard holds these and what holds them.
    """

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self._own = {} if module is None else own_tensors(module)
        self._tree = frozenset() if module is None else frozenset(map(id, module.modules()))
        # By identity of the place: it, and what its keys have.
        self._items: dict[int, tuple[Any, dict[Any, Value]]] = {}
        self._left, self._left_bytes = _MAX_VALUES, _MAX_BYTES
        self.arrays: set[int] = set()  # ids of those that are compared by what they hold
        self._insides: list[Row] = []
        self._looked: set[int] = set()  # identities of what is in the rows
        self._typed: set[int] = set()  # the same, of objects whose class and functions whose parts
        self._kept: list[Any] = []  # so that no identity is used twice meanwhile
        self._may_hold = Holdable(self._own, self._tree - {id(module)}, id(module))

    @property
    def made(self) -> list[Row]:
        """All rows."""
        items: list[Row] = [
            ("items", place, tuple(held), tuple(held.values()))
            for place, held in self._items.values()
        ]
        return items + self._insides

    def chain(self, chain: tuple[str, ...], namespace: Mapping[str, Any]) -> None:
        """A global name, and the attributes that code asks of it."""
        if chain[0] not in namespace:
            self._item(namespace, chain[0], NOT_THERE)  # a builtin, until the program has one
            return
        owner: Any = None
        places: list[Any] = [namespace]
        for position, name in enumerate(chain, 1):
            found = MISSING
            place: Any = None
            for place in places:
                found = members(place).get(name, MISSING)
                if found is not MISSING:
                    break
                self._item(place, name, NOT_THERE)
            goes_on = position < len(chain) and self._may_hold(found)
            places = attribute_places(found) if goes_on else []
            if found is not MISSING:
                self._item(place, name, (found, False) if places else self._expected(found))
            # What a method or property reads of its object is not known.
            if found is MISSING or (isinstance(place, type) and any(functions_in(found))):
                self.inside(owner)
            if not places:
                return
            owner = found

    def compares(self, holder: Any) -> bool:
        """Whether all that is in a holder of modules is in the rows, or never changes."""
        return never_changes(holder) or id(holder) in self._looked

    def environment(self, names: Iterable[str]) -> None:
        """Environment variables."""
        data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
        for name in names:
            key = os.fsencode(name)
            value = data.get(key)
            self._item(data, key, NOT_THERE if value is None else (value, False))

    def _is_foreign(self, value: Any) -> bool:
        return isinstance(value, torch.nn.Module) and id(value) not in self._tree

    def inside(self, value: Any) -> None:
        """What is inside of ``value``, which itself is compared elsewhere.

        What an array holds that is a module's own is compared where that has it.
        """
        if not is_leaf(value) and not is_array(value):
            self._expected(value)

    def attribute(self, place: Any, name: str, value: Any) -> None:
        """What is inside of an attribute, which itself is noticed when it is assigned."""
        if is_array(value):
            self._item(place, name, self._expected(value))
        else:
            self.inside(value)

    def empty_places(self, module: torch.nn.Module) -> None:
        """That nothing gets into the places that a module has for tensors, and that are empty."""
        for group in (module._parameters, module._buffers):
            for name in [name for name, tensor in group.items() if tensor is None]:
                self._item(group, name, (None, False))

    def attributes_row(self, module: torch.nn.Module, unread: Container[str]) -> Row | None:
        """All that a module's dictionary has; None where something in it may not be held.

        Of tensors, which its guard compares, of arrays, whose bytes are compared and which numpy
        resizes where nobody else has them, and of what is ``unread`` only that they are there.
        """
        keys, values = [], []
        for name, value in list(vars(module).items()):
            by_type = name in unread or isinstance(value, torch.Tensor) or is_array(value)
            if not (by_type or name in OWN_ATTRIBUTES or self._may_hold(value)):
                return None
            keys.append(name)
            values.append((type(value), True) if by_type else (value, False))
        return ("dict", vars(module), tuple(keys), tuple(values))

    def _item(self, place: Any, key: Any, value: Value) -> None:
        if isinstance(place, type) and is_covered(place.__module__):
            return
        _, held = self._items.setdefault(id(place), (place, {}))
        if key not in held and self._left <= 0:
            raise Unwatchable(f"more than {_MAX_VALUES} values")
        self._left -= key not in held
        if key not in held or held[key][1]:  # what a guard expects of it says more than a type
            held[key] = value

    def _expected(self, value: Any) -> Value:
        if is_leaf(value):
            return value, False
        if (held := contents_of(value)) is not None:
            self._left_bytes -= len(held[-1])
            if self._left_bytes < 0:
                raise Unwatchable("arrays that are too large to compare at each call")
            self.arrays.add(id(value))
            return held, None
        if not self._may_hold(value):
            return type(value), True
        if isinstance(value, _WITH_PARTS) or is_of_program(value) or self._is_foreign(value):
            self._look_inside(value)
        elif type(value) is weakref.ref:
            self._referred(value())
        # By its type: an object may say that it is of another class.
        elif issubclass(type(value), (types.MethodType, Mapping)):
            self._library_parts(value)
        return value, False

    def _library_parts(self, value: Any) -> None:
        """What is behind a method, or behind a mapping of the library's (a proxy of a dict).

        The module's identity says what that is, and not all of it has guards of TorchDynamo's.
        """
        if id(value) in self._looked:
            return
        self._looked.add(id(value))
        self._kept.append(value)
        attributes = None if isinstance(value, types.MethodType) else attributes_of(value)
        if attributes is not None:
            self._dictionary(attributes)
        for part in held_parts(value):
            self.inside(part)

    def _referred(self, value: Any) -> None:
        """That a tensor which a weak reference leads to stays, and no other one gets its place."""
        if id(value) in self._own:
            self._insides.append(("type", value, (), ((type(value), False),)))

    def _look_inside(self, value: Any) -> None:
        if id(value) in self._looked:
            return
        self._looked.add(id(value))
        if isinstance(value, list):
            self._insides.append(("list", value, (), tuple(map(self._expected, value))))
        elif isinstance(value, tuple) and any(map(is_array, value)):
            self._insides.append(("tuple", value, (), tuple(map(self._expected, value))))
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                self.inside(item)
        elif isinstance(value, set):
            if not all(map(is_found_unasked, items := tuple(value))):  # at one moment, too
                raise Unwatchable("a set whose members compare themselves")
            self._insides.append(("set", value, (), tuple((item, False) for item in items)))
        elif isinstance(value, dict):
            self._dictionary(value)
        elif isinstance(value, functools.partial):
            self._type_of(value)
            for part in (value.func, value.args, value.keywords):
                self.inside(part)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        else:
            self._dictionary(vars(value))
        self._type_of(value)

    def _type_of(self, value: Any) -> None:
        """That an object of a class of the program stays one, and its class what it is."""
        kind = type(value)
        if isinstance(value, torch.nn.Module):
            if not self._is_foreign(value):
                return
            self.metaclasses(kind)
        elif isinstance(value, torch.Tensor) or not is_class_of_program(kind):
            return
        self._class(kind)
        if id(value) not in self._typed and self._may_hold(value):
            self._typed.add(id(value))
            self._kept.append(value)
            self._insides.append(("type", value, (), ((kind, False),)))

    def metaclasses(self, kind: type) -> None:
        """That nothing is assigned to a class's metaclasses, which is no write to the class."""
        for base in type.mro(type(kind))[:-2]:  # but type and object
            self._class(base)

    def _class(self, kind: type) -> None:
        if id(kind) not in self._looked:
            self._looked.add(id(kind))
            if not issubclass(kind, type):
                # The first object that is pickled, as for a worker, writes this to its class. A
                # write to a class counts as one to all below it.
                for base in reversed(kind.__mro__):
                    copyreg._slotnames(base)  # type: ignore[attr-defined]
            self._insides.append(("class", kind, (), ()))

    def _class_and_members(self, kind: type) -> None:
        """A class that code of the program reads from, its metaclass, and members of an enum."""
        self._class(kind)
        self._class(type(kind))
        for member in kind._member_map_.values() if issubclass(kind, enum.Enum) else ():
            for name, value in list(vars(member).items()):
                if name == "_value_" or name not in OF_MEMBERS:
                    self._item(vars(member), name, self._expected(value))

    def _dictionary(self, value: dict[Any, Any]) -> None:
        items = list(value.items())  # at one moment: other threads may add to it
        # Its order is its own, and its keys are looked up one by one (`has_order`).
        if isinstance(value, OrderedDict) and not all(map(is_leaf, value)):
            raise Unwatchable(f"an {type(value).__name__}, whose keys compare themselves")
        values = tuple(
            (type(item), True) if key in NOT_COMPARED else self._expected(item)
            for key, item in items
        )
        self._insides.append(("dict", value, tuple(key for key, _ in items), values))

    def _function(self, value: types.FunctionType) -> None:
        if is_covered(str(value.__module__)):
            return
        self._function_parts(value)
        for default in (value.__defaults__, value.__kwdefaults__):
            self.inside(default)
        for cell, content in filled_cells(value):
            self._insides.append(("cell", cell, (), (self._expected(content),)))

    def _function_parts(self, value: types.FunctionType) -> None:
        """That nothing is assigned to a function, which marks no dictionary."""
        parts = function_parts(value)
        if id(value) not in self._typed and all(self._may_hold(part) for part in parts):
            self._typed.add(id(value))
            self._kept.append(value)
            held = tuple((part, False) for part in parts)
            self._insides.append(("function", value, (), held))
