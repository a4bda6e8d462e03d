"""Rows of the places that guards of a trace lead to."""

from __future__ import annotations

import functools
import threading
import types
from collections import defaultdict
from typing import Any

import torch

from eagercache.callables.code_values import MISSING, is_covered, is_immutable
from eagercache.callables.guard_rows import GuardRow, Path, in_class, is_slot, path_text, step_from
from eagercache.callables.module_tensors import OWN_ATTRIBUTES
from eagercache.calls.array_contents import is_array
from eagercache.modules.held_parts import is_leaf
from eagercache.modules.watched_rows import NOT_THERE, Row, Rows, Unwatchable, Value

# Nobody can give such an object another function.
_FIXED = (property, types.MethodType, types.BuiltinFunctionType)
# What a module keeps children and tensors in (nn_modules/guard.h compares them).
_TABLES = frozenset(("_modules", "_parameters", "_buffers"))


class GuardedRows(Rows):
    """Collects them beside those of functions."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        # Attributes of modules, by identity of the place: it, and what it has there.
        self._ways: dict[int, tuple[dict[str, Any], dict[str, Value]]] = {}

    @property
    def ways(self) -> list[Row]:
        """Rows of the attributes of modules by which guards go on to something in the rows.

        Apart, since another attribute is noticed otherwise (nn_modules/guard.h), but for an equal
        object in the place of one whose inside is compared.
        """
        return [
            ("items", place, tuple(held), tuple(held.values()))
            for place, held in self._ways.values()
        ]

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
                if isinstance(owner, torch.nn.Module):
                    self._way(owner, key, (value, text), last)
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

    def _way(self, owner: torch.nn.Module, key: Any, found: tuple[Any, str], last: bool) -> None:
        value, text = found
        attributes = vars(owner)
        # Two classes may have one name.
        is_one = is_leaf(value) and not isinstance(value, type)
        if attributes.get(key, MISSING) is not value or is_one:
            return
        if isinstance(value, torch.Tensor) or key in OWN_ATTRIBUTES:
            return  # its guard compares of these what kernels stand on (nn_modules/guard.h)
        # Its own methods lead to the watched module, whose dictionary its guard holds anyway.
        if isinstance(value, types.MethodType) or self._may_hold(value):
            self._ways.setdefault(id(attributes), (attributes, {}))[1][key] = (value, False)
        elif not last:
            raise Unwatchable(f"{text} holds a tensor or module")

    def _presence(self, place: dict[Any, Any], key: Any) -> None:
        """That a key is there, or is not."""
        found = place.get(key, MISSING)
        self._item(place, key, NOT_THERE if found is MISSING else (type(found), True))

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
        if isinstance(owner, BaseException) and isinstance(found, types.GetSetDescriptorType):
            raise Unwatchable(f"{text} is kept by C, where it cannot be watched")
        if isinstance(held, dict):
            self._class(type(owner))
            if name not in held:
                self._item(held, name, NOT_THERE)
                return None
            return held
        kept_by_c = (types.MemberDescriptorType, types.GetSetDescriptorType)
        fixed = isinstance(owner, _FIXED) or is_immutable(owner)
        if isinstance(found, kept_by_c) and not fixed:
            raise Unwatchable(f"{text} is kept by C, where it cannot be watched")
        self._class(type(owner))
        return None

    def _foreign(self, value: torch.nn.Module, text: str) -> None:
        """A module beside the one that is watched, with all that it has."""
        if not self._may_hold(value):
            raise Unwatchable(f"{text} holds a tensor, or a part of the module")
        self._look_inside(value)

    def _held(self, value: Any, text: str, by_type: bool) -> Value:
        if is_array(value):
            return self._expected(value)
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
