"""What Python code reads beside its arguments: constants of its classes, functions and namespaces.

A kernel holds them as they were when it was compiled. They are written down here in a form that is
the same in every process, so that a program in which one was edited never meets the kernels of the
one before. What cannot be written down (an open file, a tensor) goes by its type alone.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import dis
import enum
import fractions
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from eagercache.calls.array_contents import contents_row
from eagercache.calls.code_digest import code_digest

# Packages whose code the environment key covers, or that a forward cannot compute with.
_COVERED_PACKAGES = frozenset({"torch", "eagercache", "builtins"}) | sys.stdlib_module_names

_MAX_DEPTH = 8
# The standard library's objects that programs keep their options in.
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_MAX_ITEMS = 4096
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# What a decorator's function holds of the one that it decorates.
_WRAPPED = (types.FunctionType, functools.partial, staticmethod, classmethod)
_OF_THE_ENVIRONMENT = (("os", "environ"), ("os", "getenv"))
# In the place of a value that is not there.
MISSING: Any = object()


def is_covered(module_name: str) -> bool:
    """Whether the environment key speaks for a Python module's code."""
    return module_name.partition(".")[0] in _COVERED_PACKAGES


def is_found_by_name(kind: type | types.FunctionType) -> bool:
    """Whether a class or function is what its Python module has under its name."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found is kind


def type_name(value: Any) -> str:
    """The type of ``value``, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def plain_value(value: Any) -> Any:
    """The canonical form of a value without parts; None when it is not one."""
    kind = type(value)
    if value is None or kind is bool:
        return [repr(value)]
    if kind is int:
        return ["int", str(value)]
    if kind is float:
        return ["float", struct.pack("<d", value).hex()]
    if kind is complex:
        return ["complex", struct.pack("<dd", value.real, value.imag).hex()]
    if kind is str:
        return ["str", value]
    if kind is bytes:
        return ["bytes", value.hex()]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return ["torch", str(value)]
    if isinstance(value, torch.Size):
        return ["torch.Size", *map(int, value)]
    if isinstance(value, enum.Enum):
        return ["enum", type_name(value), value.name]
    if is_covered(kind.__module__) and isinstance(getattr(kind, "__members__", None), dict):
        return ["enum", type_name(value), str(value.name)]  # one of C++, such as an SDPBackend
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.number, numpy.bool_)):
        return ["numpy", str(value.dtype), value.tobytes().hex()]
    if kind.__module__ == "typing" or isinstance(value, (types.GenericAlias, types.UnionType)):
        return ["annotation", repr(value)]
    if isinstance(value, type):
        return ["type", value.__module__, value.__qualname__]
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, (types.BuiltinFunctionType, logging.Logger)):
        return [
            "named",
            type_name(value),
            str(value.__module__ or ""),
            value.name if isinstance(value, logging.Logger) else value.__qualname__,
        ]
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return ["operator", type_name(value), str(value)]
    if isinstance(value, slice):
        return ["slice", repr(value)]
    if value is Ellipsis or value is NotImplemented:
        return [repr(value)]
    return None


# Types of the standard library whose objects never change, though they have no canonical form here.
_IMMUTABLE = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(fractions.Fraction, pathlib.PurePath, re.Pattern, range, torch.finfo, torch.iinfo),
)


def is_immutable(value: Any) -> bool:
    """Whether what C keeps in ``value`` never changes."""
    return plain_value(value) is not None or type(value) in _IMMUTABLE


def is_python_class(kind: type) -> bool:
    """Whether a class statement made ``kind``, or code like it; other classes are C's."""
    return bool(kind.__flags__ & _HEAP_TYPE)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


# ---- values that code reads ----------------------------------------------------------------------


def values_digest(
    code: types.CodeType,
    namespace: Mapping[str, Any],
    function: types.FunctionType | None = None,
) -> str:
    """16 digits over the global values that ``code`` reads, defaults and closure of ``function``.

    Of modules, classes and objects those attributes count that it names behind them; torch's and
    the standard library's do not.
    """
    writer = _Loose()
    rows: list[Any] = [
        [".".join(chain), writer.write(value)]
        for chain in chains(code)
        if (value := _value_of(chain, namespace)) is not MISSING
    ]
    rows += [
        ["environment", name, os.environ.get(name)] for name in environment_names(code, namespace)
    ]
    if function is not None:
        rows.append(writer.function(function))
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def value_digest(value: Any) -> str:
    """16 digits over a value, in the form in which code's values are written down here."""
    return hashlib.sha256(json.dumps(_Loose().write(value)).encode()).hexdigest()[:16]


def class_code(kind: type) -> str:
    """16 digits over the code of a class's own methods, their defaults and closures, its values."""
    digest = hashlib.sha256()
    writer = _Loose()
    for name, value, functions in own_members(kind):
        rows = [writer.function(function) for function in functions] or [[writer.write(value)]]
        for row in rows:
            digest.update(json.dumps([name, *row]).encode())
    return digest.hexdigest()[:16]


def put_into(kind: type, made: Callable[[Any], Any]) -> list[list[Any]]:
    """Functions in a class of a package that are not where the package's text has them.

    A program may have put others there, which is no matter under names that the package does not
    have. ``made``: hands back what stood in the place of one of ours. Few functions of a package
    are elsewhere (`__str__ = __repr__`), and count as well.
    """
    top = sys.modules.get(kind.__module__.partition(".")[0])
    folder = f"{pathlib.Path(getattr(top, '__file__', None) or '').parent}{os.sep}"
    writer = _Loose()
    rows = []
    for name, value in _own_names(kind):
        for function in functions_in(made(value)):
            names = (str(function.__module__), function.__qualname__)
            inside = function.__code__.co_filename.startswith(folder)
            if names == (kind.__module__, f"{kind.__qualname__}.{name}") and inside:
                continue
            if inside or any(name in _names_in_text(base.__module__) for base in kind.__mro__):
                rows.append([name, *names, *writer.function(function)])
    return rows


@functools.cache
def _names_in_text(module_name: str) -> frozenset[str]:
    """The names that classes in a Python module's text have; more than those do no harm."""
    path = getattr(sys.modules.get(module_name), "__file__", None)
    try:
        text = pathlib.Path(path or "").read_text(errors="replace")
    except OSError:
        return frozenset()
    return frozenset(re.findall(r"^[ \t]+(?:async )?(?:def )?(\w+)[ \t]*[(:=]", text, re.MULTILINE))


def own_members(kind: type) -> Iterator[tuple[str, Any, list[types.FunctionType]]]:
    """Names in a class, what they stand for, and the functions in that.

    Without what Python itself puts there under names like ``__doc__``.
    """
    for name, value in _own_names(kind):
        functions = list(functions_in(value))
        if functions or not (name.startswith("__") and name.endswith("__")):
            yield name, value, functions


def _own_names(kind: type) -> Iterator[tuple[str, Any]]:
    """In order; without the function that makes annotations, which holds the whole class."""
    return ((n, v) for n, v in sorted(vars(kind).items()) if n != "__annotate_func__")  # PEP 649


def filled_cells(function: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    """The cells of a function's closure that hold something, and what.

    Not the one by which annotations read their class (PEP 649).
    """
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        if name == "__classdict__":
            continue
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        yield cell, content


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions that an attribute of a class or module stands for."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if id(current) in seen or len(seen) > 64:
            continue
        seen.add(id(current))
        if isinstance(current, types.FunctionType):
            yield current
            waiting += [
                content for _, content in filled_cells(current) if isinstance(content, _WRAPPED)
            ]
            waiting.append(getattr(current, "__wrapped__", None))
        elif isinstance(current, (staticmethod, classmethod)):
            waiting.append(current.__func__)
        elif isinstance(current, property):
            waiting += [current.fget, current.fset]
        elif isinstance(current, (functools.cached_property, functools.partial)):
            waiting.append(current.func)


@functools.lru_cache(maxsize=65536)
def chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The global names that ``code`` reads, each with the attributes that it asks of it."""
    found: dict[tuple[str, ...], None] = {}
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if chain and instruction.opname in _ATTRIBUTES:
            chain = (*chain, str(instruction.argval))
            continue
        if chain:
            found[chain] = None
        reads = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        chain = (str(instruction.argval),) if reads else ()
    return tuple(found)


def attribute_places(value: Any) -> list[Any]:
    """Where attributes of a namespace, class or object of the program are: dictionaries, classes.

    In the order in which they are looked up; none where they are not the program's.
    """
    if isinstance(value, types.ModuleType):
        return [] if is_covered(value.__name__) else [vars(value)]
    if isinstance(value, type):
        return [base for base in value.__mro__ if not is_covered(base.__module__)]
    if is_of_program(value):
        return [vars(value), *type(value).__mro__]
    return []


def members(place: Any) -> Mapping[str, Any]:
    """The names in one of `attribute_places`."""
    return vars(place) if isinstance(place, type) else place


def _value_of(chain: tuple[str, ...], namespace: Mapping[str, Any]) -> Any:
    """What the names stand for, as far as that is known without running code."""
    value = namespace.get(chain[0], MISSING)
    for name in chain[1:]:
        held = [place for place in attribute_places(value) if name in members(place)]
        if not held:
            break
        found = members(held[0])[name]
        # What a method or property reads of its object is not known: all of it counts.
        if is_of_program(value) and isinstance(held[0], type) and any(functions_in(found)):
            break
        value = found
    return MISSING if isinstance(value, types.ModuleType) else value


def environment_names(code: types.CodeType, namespace: Mapping[str, Any]) -> list[str]:
    """Environment variables that ``code`` may ask for: it names them and `os.environ`."""
    asks = any(
        chain[0] in namespace
        and (
            namespace[chain[0]] is os.environ
            or namespace[chain[0]] is os.getenv
            or chain[:2] in _OF_THE_ENVIRONMENT
        )
        for chain in chains(code)
    )
    return [name for name in code.co_consts if isinstance(name, str)] if asks else []


def is_of_program(value: Any) -> bool:
    """Whether ``value`` is an object with attributes, of a class that the program brought.

    Or of one of `NAMESPACES`.
    """
    if isinstance(value, (torch.Tensor, torch.nn.Module, types.FunctionType)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and is_class_of_program(type(value))


def is_class_of_program(kind: type) -> bool:
    """Whether the program brought a class, or fills objects of it as it likes (`NAMESPACES`)."""
    return kind in NAMESPACES or not is_covered(kind.__module__)


class _Loose:
    """Turns any value into JSON; what has no such form goes by its type."""

    def __init__(self) -> None:
        self._left = _MAX_ITEMS
        self._active: set[int] = set()

    def function(self, value: types.FunctionType) -> list[Any]:
        """A function's code, defaults and closure."""
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self.write(cell.cell_contents))
            except ValueError:
                cells.append(["empty"])
        defaults = [self.write(value.__defaults__), self.write(value.__kwdefaults__)]
        return [code_digest(value.__code__), defaults, cells]

    def write(self, value: Any) -> Any:
        plain = plain_value(value)
        if plain is not None:
            return plain
        name = type_name(value)
        self._left -= 1
        if id(value) in self._active or len(self._active) > _MAX_DEPTH or self._left < 0:
            return [name]
        self._active.add(id(value))
        try:
            return [name, *self._parts(value)]
        finally:
            self._active.discard(id(value))

    def _parts(self, value: Any) -> list[Any]:
        if isinstance(value, (list, tuple)):
            # By the items that it has, whatever code a subclass would run.
            base: Any = list if isinstance(value, list) else tuple
            items = base.__getitem__(value, slice(_MAX_ITEMS))
            return [base.__len__(value), *map(self.write, items)]
        if isinstance(value, (set, frozenset)):
            return sorted(json.dumps(self.write(item)) for item in value)
        if isinstance(value, dict):
            return [[self.write(key), self.write(item)] for key, item in value.items()]
        if isinstance(value, functools.partial):
            return [self.write(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, types.MethodType):
            return [self.write(value.__func__)]
        if isinstance(value, types.FunctionType):
            if is_covered(str(value.__module__)):
                return [str(value.__module__), value.__qualname__]
            return [str(value.__module__), value.__qualname__, *self.function(value)]
        if is_of_program(value):
            return [[key, self.write(item)] for key, item in sorted(vars(value).items())]
        return contents_row(value) or []
