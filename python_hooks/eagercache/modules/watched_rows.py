"""Rows of values of the program, which are compared or held before a kernel answers."""

from __future__ import annotations

import enum
import functools
import os
import threading
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from eagercache.callables.code_values import (
    MISSING,
    attribute_places,
    filled_cells,
    functions_in,
    is_class_of_program,
    is_covered,
    is_immutable,
    is_of_program,
    members,
)
from eagercache.callables.guard_rows import (
    OF_MEMBERS,
    GuardRow,
    Path,
    in_class,
    is_slot,
    path_text,
    step_from,
)
from eagercache.callables.module_identity import NOT_COMPARED
from eagercache.callables.module_tensors import own_tensors
from eagercache.modules.held_parts import Holdable, is_found_unasked, is_leaf

# (sort, place, keys, expected): see nn_modules/places/values.h.
Row = tuple[str, Any, tuple[Any, ...], tuple[tuple[Any, bool], ...]]

_NOT_THERE = (None, True)
_WITH_PARTS = (list, tuple, dict, set, frozenset, functools.partial, types.FunctionType)
# Nobody can give such an object another function.
_FIXED = (property, types.MethodType, types.BuiltinFunctionType)
_MAX_VALUES = 4096
# What a module keeps children and tensors in (nn_modules/guard.h compares them).
_TABLES = frozenset(("_modules", "_parameters", "_buffers"))


class Unwatchable(Exception):
    """A value that a kernel stands on may change without being noticed."""


class Rows:
    """Collects rows; each place comes once.

    Of ``module``, which is watched: its tensors may be in rows, since its guard holds what holds
    them.
    """

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self._own = {} if module is None else own_tensors(module)
        self._tree = frozenset() if module is None else frozenset(map(id, module.modules()))
        # By identity of the place: it, and what its keys have.
        self._items: dict[int, tuple[Any, dict[Any, tuple[Any, bool]]]] = {}
        self._left = _MAX_VALUES  # of those
        self._insides: list[Row] = []
        self._looked: set[int] = set()  # identities of what is in the rows
        self._typed: set[int] = set()  # the same, of objects whose class and functions whose parts
        self._kept: list[Any] = []  # so that no identity is used twice meanwhile
        self._may_hold = Holdable(self._own, self._tree)

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
            self._item(namespace, chain[0], _NOT_THERE)  # a builtin, until the program has one
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
                self._item(place, name, _NOT_THERE)
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

    def environment(self, names: Iterable[str]) -> None:
        """Environment variables."""
        data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
        for name in names:
            key = os.fsencode(name)
            value = data.get(key)
            self._item(data, key, _NOT_THERE if value is None else (value, False))

    def guard(self, guard: GuardRow, module: torch.nn.Module) -> None:
        """Every step to the value of a guard, and the value. Raises Unwatchable."""
        owner = self._path(guard.path, module, guard.kind)
        if guard.kind == "same":
            self._path(tuple((step, key) for step, key in guard.argument), module, "type")
        elif guard.kind in ("contains", "lacks") and type(owner) is dict:
            if not self._may_hold(owner):
                raise Unwatchable(f"{guard.text} holds a tensor or module")
            self._presence(owner, guard.argument)
        elif guard.kind == "has" and isinstance(guard.argument, str):
            self._attribute(owner, guard.argument, guard.text)

    def _path(self, path: Path, module: torch.nn.Module, kind: str) -> Any:
        """What the path leads to; MISSING where it is compared by its steps alone."""
        owner: Any = None
        of_module = False  # whether owner is the table of a module's children or tensors
        for position, (step, key) in enumerate(path):
            value = step_from(owner, step, key, module)
            if value is MISSING:
                return MISSING  # comparing it says so
            if self._is_foreign(value):
                self._foreign(value, path_text(path[: position + 1]))
            if of_module:  # noticed otherwise, as another value in a module is
                owner, of_module = value, False
                continue
            of_module = isinstance(owner, torch.nn.Module) and key in _TABLES
            text = path_text(path[: position + 1])
            if isinstance(value, type) and not is_covered(value.__module__):
                self._class_and_members(value)
            elif isinstance(value, types.FunctionType):
                self._function_parts(value)
            else:
                self._type_of(value)
            if step == "variable":
                self.environment([key])
            elif step in ("attr", "item", "key"):
                last = position + 1 == len(path)
                self._step(owner, step, key, (value, text), last and kind == "type")
            owner = value
        if of_module:
            return MISSING
        if kind in ("keys", "length") or (kind == "contains" and type(owner) is not dict):
            self._parts_of(owner, path_text(path))
        elif kind in ("has", "names"):
            kind_of = owner if isinstance(owner, type) else type(owner)
            self._class(kind_of)
        return owner

    def _presence(self, place: dict[Any, Any], key: Any) -> None:
        """That a key is there, or is not."""
        found = place.get(key, MISSING)
        self._item(place, key, _NOT_THERE if found is MISSING else (type(found), True))

    def _attribute(self, owner: Any, name: str, text: str) -> None:
        """That an object has an attribute, or has none; in its class it is watched already."""
        if isinstance(owner, (type, torch.nn.Module)):
            return
        held = getattr(owner, "__dict__", None)
        if not isinstance(held, dict):
            return
        fixed = isinstance(owner, (types.ModuleType, types.FunctionType))
        if not fixed and not self._may_hold(owner):
            raise Unwatchable(f"{text} is beside a tensor or module")
        self._presence(held, name)

    def _step(self, owner: Any, step: str, key: Any, found: tuple[Any, str], by_type: bool) -> None:
        value, text = found
        if isinstance(owner, torch.nn.Module):
            return  # another value in a module is noticed otherwise (nn_modules/guard.h)
        # A subclass of either may have attributes.
        in_sequence = isinstance(owner, (tuple, list)) and (
            step == "item" or type(owner) in (tuple, list)
        )
        if step == "key" or (in_sequence and isinstance(owner, list)):
            self._parts_of(owner, text)
            return
        if in_sequence:
            return  # never another one
        if isinstance(owner, types.CellType):
            self._insides.append(("cell", owner, (), (self._held(value, text, by_type),)))
            return
        if isinstance(owner, types.CodeType):
            return
        if type(owner) is functools.partial and key in ("func", "args", "keywords"):
            return  # never others
        if type(owner) is defaultdict and key == "default_factory":
            return  # seldom another one, and read where a key is missing, which changes the dict
        if isinstance(owner, types.FunctionType) and key not in vars(owner):
            return  # its code, defaults and closure
        place = owner
        if isinstance(owner, type):
            self._class(owner)
            return
        if step == "attr" and is_slot(owner, key):
            if not self._may_hold(owner):
                raise Unwatchable(f"{text} is beside a tensor or module")
            self._class(type(owner))
            self._insides.append(("slots", owner, (key,), (self._held(value, text, by_type),)))
            return
        if step == "attr":
            place = self._dictionary_of(owner, key, text)
        if place is None:
            return
        if not isinstance(place, dict):
            raise Unwatchable(f"{text} is in a {type(owner).__name__}, which cannot be watched")
        if not isinstance(owner, types.ModuleType) and not self._may_hold(owner):
            raise Unwatchable(f"{text} is beside a tensor or module")
        self._item(place, key, self._held(value, text, by_type))

    def _dictionary_of(self, owner: Any, name: str, text: str) -> dict[str, Any] | None:
        """Where an attribute is that may be replaced; None where its class alone can be."""
        if isinstance(owner, threading.local):
            raise Unwatchable(f"{text} is another one in each thread")
        held = getattr(owner, "__dict__", None)
        if isinstance(owner, types.ModuleType):
            return vars(owner)
        found = in_class(owner, name)
        if isinstance(held, dict):
            self._class(type(owner))
            if name not in held:
                self._item(held, name, _NOT_THERE)
                return None
            return held
        kept_by_c = (types.MemberDescriptorType, types.GetSetDescriptorType)
        fixed = isinstance(owner, _FIXED) or is_immutable(owner)
        if isinstance(found, kept_by_c) and not fixed:
            raise Unwatchable(f"{text} is kept by C, where it cannot be watched")
        self._class(type(owner))
        return None

    def _is_foreign(self, value: Any) -> bool:
        return isinstance(value, torch.nn.Module) and id(value) not in self._tree

    def _foreign(self, value: torch.nn.Module, text: str) -> None:
        """A module beside the one that is watched, with all that it has."""
        if not self._may_hold(value):
            raise Unwatchable(f"{text} holds a tensor, or a part of the module")
        self._look_inside(value)

    def _held(self, value: Any, text: str, by_type: bool) -> tuple[Any, bool]:
        if isinstance(value, types.ModuleType) or self._may_hold(value):
            return value, False
        if by_type:
            return type(value), True
        raise Unwatchable(f"{text} holds a tensor or module")

    def _parts_of(self, value: Any, text: str) -> None:
        """All items of a container of the program's."""
        if isinstance(value, (tuple, frozenset, str, bytes, range)):
            return
        if isinstance(value, type):
            self._class(value)
            return
        if not self._may_hold(value):
            raise Unwatchable(f"{text} holds a tensor or module")
        if id(value) in self._looked:
            return
        if not isinstance(value, (list, dict, set)):
            raise Unwatchable(f"{text} is a {type(value).__name__}, which cannot be watched")
        self._look_inside(value)

    def inside(self, value: Any) -> None:
        """What is inside of ``value``, which itself is compared elsewhere."""
        if not is_leaf(value):
            self._expected(value)

    def _item(self, place: Any, key: Any, value: tuple[Any, bool]) -> None:
        if isinstance(place, type) and is_covered(place.__module__):
            return
        _, held = self._items.setdefault(id(place), (place, {}))
        if key not in held and self._left <= 0:
            raise Unwatchable(f"more than {_MAX_VALUES} values")
        self._left -= key not in held
        if key not in held or held[key][1]:  # what a guard expects of it says more than a type
            held[key] = value

    def _expected(self, value: Any) -> tuple[Any, bool]:
        if is_leaf(value):
            return value, False
        if not self._may_hold(value):
            return type(value), True
        if isinstance(value, _WITH_PARTS) or is_of_program(value) or self._is_foreign(value):
            self._look_inside(value)
        elif type(value) is weakref.ref:
            self._referred(value())
        return value, False

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
        parts = (
            *(value.__code__, value.__defaults__, value.__kwdefaults__),
            *(value.__name__, value.__qualname__, value.__doc__),
        )
        if id(value) not in self._typed and all(self._may_hold(part) for part in parts):
            self._typed.add(id(value))
            self._kept.append(value)
            held = tuple((part, False) for part in parts)
            self._insides.append(("function", value, (), held))
