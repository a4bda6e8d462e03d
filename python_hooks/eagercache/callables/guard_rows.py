"""What TorchDynamo guarded while a forward was traced, in a form that another process can compare.

Dynamo interprets the very bytecode of a forward and guards what it reads: global variables, what is
inside of objects, tables and closures, patched functions. A row says where such a value is, as a
path from an imported module or from the traced module itself, and what it must be. A worker writes
the rows (worker/modules/guards.py), an entry keeps them beside the used functions
(`used_functions`), and the user's process compares them before a kernel answers and has the core
watch their places from then on (modules/watch.py).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import re
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.call_hooks import as_torch_made
from eagercache.callables.code_values import (
    MISSING,
    is_covered,
    is_immutable,
    is_python_class,
    own_members,
    plain_value,
    type_name,
)
from eagercache.callables.made_classes import getter_position
from eagercache.callables.module_identity import Unfit, identify
from eagercache.calls.code_digest import code_digest
from eagercache.calls.known_hooks import others

# A step of a path: ("import", name) or ("self", "") first, then ("attr", name), ("item", key),
# ("key", position in a dict), ("type", ""), ("variable", of the environment).
Step = tuple[str, Any]
Path = tuple[Step, ...]

_KINDS = ("value", "type", "length", "keys", "contains", "lacks", "has", "same", "names", "module")
# What Python puts into a member of an enum beside its name and value, some of it when asked.
OF_MEMBERS = frozenset(("_name_", "_value_", "__objclass__", "_sort_order_", "_inverted_"))
_MOST_ITEMS = 64  # of a container that are written down one by one
# In a row's first place, where a used function has the name of its module.
MARK = ""
# What begins the description of a module that has none.
NO_GUARD = "it cannot be guarded"


@dataclass(frozen=True)
class GuardRow:
    """A value that a trace stands on.

    Attributes:
        path: where it is.
        kind: what is compared: its "value" (or name and code, of a function), "type", "length",
            "keys" (of a dict, in order), whether it "contains" or "lacks" a key or "has" an
            attribute, that it is the "same" object as another path's, what stands under
            "names" of a class, or all that a "module" without tensors is.
        argument: that key, attribute, path or those names; None for other kinds.
        expected: what `describe` wrote.
    """

    path: Path
    kind: str
    argument: Any
    expected: Any

    def to_row(self) -> list[str]:
        """As an entry keeps it, beside `UsedFunction.to_row`."""
        return [
            MARK,
            json.dumps(self.path, separators=(",", ":")),
            json.dumps([self.kind, self.argument], separators=(",", ":")),
            json.dumps(self.expected, separators=(",", ":")),
        ]

    @staticmethod
    def from_row(row: list[str]) -> GuardRow:
        """The inverse of `to_row`. Raises ValueError for something else."""
        path, (kind, argument), expected = map(json.loads, row[1:])
        if kind not in _KINDS or not path:
            raise ValueError(f"no guard: {row}")
        return GuardRow(tuple((str(step), key) for step, key in path), kind, argument, expected)

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether this process's value is the expected one. Runs no code of the program."""
        found = resolve(self.path, module)
        if found is MISSING:
            return False
        # As JSON has it: of a tuple's keys and a list's nothing but the items is left.
        now = describe(found, self.kind, self.argument, module)
        return bool(json.loads(json.dumps(now)) == self.expected)

    @property
    def text(self) -> str:
        """The path as one would write it: ``program.args.scale``."""
        return path_text(self.path)


def path_text(path: Path) -> str:
    """A path as one would write it."""
    text = ""
    for step, key in path:
        if step == "import":
            text = str(key)
        elif step == "self":
            text = "self"
        elif step == "attr":
            text += f".{key}"
        elif step == "type":
            text = f"type({text})"
        elif step == "key":
            text = f"list({text})[{key}]"
        else:
            text += f"[{key!r}]"
    return text


def resolve(path: Path, module: torch.nn.Module) -> Any:
    """What a path leads to; MISSING where that is not known without running code."""
    value: Any = MISSING
    for step, key in path:
        value = step_from(value, step, key, module)
        if value is MISSING:
            return MISSING
    return value


def step_from(owner: Any, step: str, key: Any, module: torch.nn.Module) -> Any:
    """One step of a path; MISSING where it leads nowhere."""
    if step == "self":
        return module
    if step == "import":
        return sys.modules.get(key, MISSING)
    if step == "type":
        return type(owner)
    if step == "variable":  # of the environment; None where there is none
        return os.environ.get(key)
    if step == "attr":
        return attribute(owner, key)
    try:
        if step == "key":
            return list(dict.keys(owner))[key]
        if isinstance(owner, dict):
            return dict.get(owner, key, MISSING)
        if isinstance(owner, (list, tuple, deque)):
            return owner[key]
    except (IndexError, TypeError):
        pass
    return MISSING


def attribute(owner: Any, name: str) -> Any:
    """``owner.name``, without running a property or ``__getattr__`` of the program."""
    if isinstance(owner, torch.nn.Module):
        for place in (vars(owner), owner._modules, owner._parameters, owner._buffers):
            if name in place:
                return place[name]
    held = vars(owner) if isinstance(getattr(owner, "__dict__", None), dict) else {}
    if name in held:
        # But for a property of the class, which comes first.
        first = in_class(owner, name)
        return first if hasattr(type(first), "__set__") else held[name]
    bases = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    for base in bases:
        if name in vars(base):
            # A worker traces with torch's own `torch.nn.Module.__call__`.
            found = as_torch_made(vars(base)[name])
            if isinstance(owner, type):
                return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
            if isinstance(found, types.MemberDescriptorType | types.GetSetDescriptorType):
                return getattr(owner, name, MISSING)  # a slot, or what C has
            return found
    if isinstance(owner, (type, types.FunctionType, types.CellType)):
        # __defaults__, __closure__, __code__, cell_contents and the like, which C answers.
        try:
            return getattr(owner, name, MISSING)
        except ValueError:  # an empty cell
            return MISSING
    return MISSING


def in_class(owner: Any, name: str) -> Any:
    """What the class of an object has under a name; None where it has nothing."""
    return next((vars(k)[name] for k in type(owner).__mro__ if name in vars(k)), None)


def is_slot(owner: Any, name: Any) -> bool:
    """Whether an attribute is in a slot of a Python class; of C's own they are seldom written."""
    found = in_class(owner, name)
    of_slot = isinstance(found, types.MemberDescriptorType) and is_python_class(found.__objclass__)
    return of_slot and not isinstance(owner, threading.local)


def describe(value: Any, kind: str, argument: Any, module: torch.nn.Module) -> Any:
    """What a row of that kind expects of ``value``, as JSON has it."""
    if kind == "same":
        return resolve(tuple((step, key) for step, key in argument), module) is value
    if kind in ("contains", "lacks"):
        if isinstance(value, type):
            return argument in vars(value)
        return isinstance(value, (dict, set, frozenset)) and argument in value
    if kind == "has":
        return attribute(value, argument) is not MISSING
    if kind == "module":
        return _foreign_module(value)
    if kind == "names":
        return [_named(vars(value).get(name)) for name in argument]
    written: list[Any] = [type_name(value)]
    if not is_covered(type(value).__module__):
        written.append(class_shape(type(value)))
    if kind == "length":
        written.append(len(value) if hasattr(value, "__len__") else None)
    elif kind == "keys":
        written += [_named(key) for key in value] if isinstance(value, dict) else []
    elif kind == "value":
        written.append(_named(value))
    return written


def _foreign_module(value: Any) -> str:
    """A digest of what a module beside the traced one is; a reason where a guard cannot say that.

    Hooks on it are no part of an identity, and tensors of it no inputs of a kernel.
    """
    try:
        identity = identify(value)
    except Unfit as reason:
        return f"{NO_GUARD}: {reason}"
    if identity.slots:
        return f"{NO_GUARD}: it has tensors"
    hooked = any(others(part, ()) for _, part in identity.modules)
    return f"{NO_GUARD}: it has hooks" if hooked else identity.digest


def _named(value: Any) -> Any:
    """A plain value, or the name of a function or class and what it does."""
    if isinstance(value, enum.Enum):
        held = vars(value)
        more = sorted(set(held) - OF_MEMBERS)
        return [
            *("enum", type_name(value), held.get("_name_"), _named(held.get("_value_"))),
            *([name, _named(held[name])] for name in more),
        ]
    if isinstance(value, type) and not is_covered(value.__module__):
        names = [value.__module__, value.__qualname__, value.__name__]
        return ["class", *names, _constants(value)]
    plain = plain_value(value)
    if plain is not None:
        return plain
    if isinstance(value, types.FunctionType):
        names = [str(value.__module__), value.__qualname__, value.__name__]
        return ["function", *names, code_digest(value.__code__)]
    if isinstance(value, types.MethodType):
        return ["method", _named(value.__func__)]
    if isinstance(value, (staticmethod, classmethod)):
        return [type_name(value), _named(value.__func__)]
    if isinstance(value, property):
        return [type_name(value), *map(_named, (value.fget, value.fset))]
    if isinstance(value, (tuple, list)):
        return [type_name(value), *_in_short(list(map(_named, value)))]
    if isinstance(value, (set, frozenset)):
        return [type_name(value), *_in_short(sorted(map(_named, value), key=json.dumps))]
    position = getter_position(value)  # of a named tuple
    if position is not None:
        return [type_name(value), position]
    if isinstance(value, dataclasses.Field):
        return [type_name(value), value.name, value.init, value.kw_only]
    if type(value) is dict:
        return [type_name(value), *([_named(key), _named(item)] for key, item in value.items())]
    if isinstance(value, re.Pattern):
        return [type_name(value), _named(value.pattern), value.flags]
    if is_immutable(value):
        return [type_name(value), repr(value)]
    return [type_name(value), str(getattr(value, "__qualname__", ""))]


def _in_short(items: list[Any]) -> list[Any]:
    """Many items as their number and a digest."""
    if len(items) <= _MOST_ITEMS:
        return items
    return [len(items), hashlib.sha256(json.dumps(items).encode()).hexdigest()[:16]]


def class_shape(kind: type) -> str:
    """8 digits over the names in a class of the program, bases included, and its functions' code.

    Of other values in it those that are read have guards of their own.
    """
    rows = [
        [name, [code_digest(function.__code__) for function in functions] or type_name(value)]
        for base in kind.__mro__
        if not is_covered(base.__module__)
        for name, value, functions in own_members(base)
    ]
    return hashlib.sha256(json.dumps([kind.__name__, rows]).encode()).hexdigest()[:8]


def _constants(kind: type) -> list[Any]:
    """The plain values in a class of the program, its bases and its metaclasses."""
    meta: type = type(kind)
    bases = kind.__mro__ + meta.__mro__
    return [
        [name, _named(value) if isinstance(value, enum.Enum) else plain_value(value)]
        for base in bases
        if not is_covered(base.__module__)
        for name, value in sorted(vars(base).items())
        if not name.startswith("__")
        and not isinstance(value, type)
        and plain_value(value) is not None
    ]


def guards_in(rows: list[list[str]]) -> Iterator[GuardRow]:
    """The guards among what an entry says that its kernel was traced from."""
    for row in rows:
        if row[0] == MARK:
            yield GuardRow.from_row(row)


def failed_guard(rows: list[list[str]], module: torch.nn.Module) -> str | None:
    """The first guard that this process does not fulfil, for people; None when all hold."""
    for guard in guards_in(rows):
        if not guard.holds(module):
            return guard.text
    return None


# ---- the environment -----------------------------------------------------------------------------


class EnvironmentReads:
    """A block in which it is recorded which environment variables Python code asks for."""

    def __init__(self) -> None:
        self.names: dict[bytes, None] = {}
        self.all = False  # it went through all of them
        self.recording = True  # may be switched off meanwhile

    def __enter__(self) -> EnvironmentReads:
        self._data = os.environ._data  # type: ignore[attr-defined]
        self._put(_Recording(self._data, self))
        return self

    def __exit__(self, *_: object) -> None:
        left = dict(os.environ._data.items())  # type: ignore[attr-defined]
        self._data.clear()
        self._data.update(left)
        self._put(self._data)

    def note(self, key: bytes) -> None:
        """That a variable was asked for."""
        if self.recording:
            self.names[key] = None

    @staticmethod
    def _put(data: dict[bytes, bytes]) -> None:
        for environment in (os.environ, os.environb):  # which share it
            vars(environment)["_data"] = data

    def guards(self) -> list[GuardRow]:
        """One for each variable that was asked for: its value, or that there is none."""
        rows = []
        for key in self.names:
            path: Path = (("import", "os"), ("variable", os.fsdecode(key)))
            value = resolve(path, _NOBODY)
            rows.append(GuardRow(path, "value", None, describe(value, "value", None, _NOBODY)))
        return rows


_NOBODY = torch.nn.Module()


class _Recording(dict[bytes, bytes]):
    def __init__(self, data: Mapping[bytes, bytes], reads: EnvironmentReads) -> None:
        super().__init__(data)
        self._reads = reads

    def __getitem__(self, key: bytes) -> bytes:
        self._reads.note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, bytes):
            self._reads.note(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[bytes]:
        self._reads.all = self._reads.all or self._reads.recording
        return super().__iter__()
