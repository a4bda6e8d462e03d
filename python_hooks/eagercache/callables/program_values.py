"""Values of a program that are another module's or class's when it runs than when it is imported.

A compile worker imports the modules that a forward's code is in; what the program set in them since
(a table that instances enter themselves into, an attribute that a class caches, an option) is not
there. `collect` writes down such values of the program, and `ProgramValues.applied` puts those that
differ into the worker's modules and classes for as long as a request takes.

It decides nothing: the identity of the module, the used functions and the guards are compared as
before, and find a value that was not sent. Values of ``__main__`` travel with its functions.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.callables.code_values import (
    MISSING,
    chains,
    functions_in,
    is_covered,
    is_of_program,
    own_members,
    plain_value,
    type_name,
    value_digest,
)
from eagercache.callables.function_identity import nested_codes

_MAX_BYTES = 1 << 20  # of all values together
_MAX_VALUES = 512
_MAX_FUNCTIONS = 1024
_BUILTIN = {type_name(kind()): kind for kind in (list, dict, set)}


@dataclass(frozen=True)
class ProgramValue:
    """One value, by the names of its Python module, its class ("": none) and its own.

    Attributes:
        kind: the name of its type.
        digest: of the value (`value_digest`).
        is_whole: whether another value takes its place, rather than another inside.
        pickled: its `_content`.
    """

    module: str
    owner: str
    name: str
    kind: str
    digest: str
    is_whole: bool
    pickled: bytes


class ProgramValues:
    """What `collect` found."""

    def __init__(self, values: Iterable[ProgramValue] = ()) -> None:
        self._values = tuple(values)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the values are the program's. Not for several threads."""
        with contextlib.ExitStack() as undo:
            for value in self._values:
                _apply(value, undo)
            yield


def collect(module: torch.nn.Module) -> ProgramValues:
    """What the code of the classes below ``module`` reads of modules, and what those classes hold.

    Runs no code of the program but what pickling its values runs.
    """
    found = _Collected()
    for part in module.modules():
        found.class_of(type(part))
    found.follow()
    return ProgramValues(found.values)


class _Collected:
    def __init__(self) -> None:
        self.values: list[ProgramValue] = []
        self._left = _MAX_BYTES
        self._seen: dict[tuple[str, str, str], None] = {}
        self._classes: set[type] = set()
        self._functions: set[types.CodeType] = set()
        self._waiting: list[types.FunctionType] = []

    def class_of(self, kind: type) -> None:
        """The values and functions of a class and its bases."""
        for base in kind.__mro__:
            if base in self._classes or is_covered(base.__module__):
                continue
            self._classes.add(base)
            for name, value, functions in own_members(base):
                if functions:
                    self.functions(functions)
                elif "<locals>" not in base.__qualname__:
                    self.add(base.__module__, base.__qualname__, name, value)

    def functions(self, functions: Iterable[types.FunctionType]) -> None:
        """Functions whose globals count."""
        for function in functions:
            code = function.__code__
            if code in self._functions or is_covered(str(function.__module__)):
                continue
            if len(self._functions) < _MAX_FUNCTIONS:
                self._functions.add(code)
                self._waiting.append(function)

    def follow(self) -> None:
        """Adds what the functions read, and the functions and classes that they name."""
        while self._waiting:
            function = self._waiting.pop(0)
            for code in nested_codes(function.__code__):
                for name, *names in chains(code):
                    self._global(function.__globals__, name, names)

    def _global(self, namespace: dict[str, Any], name: str, names: list[str]) -> None:
        value = namespace.get(name, MISSING)
        while isinstance(value, types.ModuleType) and names:
            namespace, name, *names = vars(value), *names
            value = namespace.get(name, MISSING)
        if isinstance(value, type):
            self.class_of(value)
        elif isinstance(value, types.FunctionType):
            self.functions(functions_in(value))
        elif value is not MISSING:
            self.add(str(namespace.get("__name__", "")), "", name, value)

    def add(self, module: str, owner: str, name: str, value: Any) -> None:
        """A value of the program, where it can be sent."""
        place = (module, owner, name)
        if place in self._seen or module == "__main__" or is_covered(module):
            return
        if not _is_sent(value) or len(self.values) >= _MAX_VALUES:
            return
        self._seen[place] = None
        pickled = _pickled(_content(value))
        if pickled is not None and len(pickled) <= self._left:
            self._left -= len(pickled)
            kind, digest, whole = type_name(value), value_digest(value), _is_whole(value)
            self.values.append(ProgramValue(*place, kind, digest, whole, pickled))


def _is_sent(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType, torch.nn.Module, torch.Tensor)):
        return False
    return _is_whole(value) or _has_inside(value)


def _is_whole(value: Any) -> bool:
    """Whether another value takes its place, rather than another inside."""
    return plain_value(value) is not None or isinstance(value, (tuple, frozenset))


def _has_inside(value: Any) -> bool:
    return isinstance(value, (list, dict, set)) or is_of_program(value)


def _content(value: Any) -> Any:
    """A plain value, or the inside of a container or object, which itself stays who it is."""
    if _is_whole(value):
        return value
    if isinstance(value, dict):
        return list(dict.items(value))
    return list(value) if isinstance(value, (list, set)) else list(vars(value).items())


class _Pickler(pickle.Pickler):
    """By name only, and without tensors."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            raise pickle.PicklingError("a tensor")


def _pickled(value: Any) -> bytes | None:
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # a lock, a lambda, code of the program that raised: it is not sent
        return None
    return file.getvalue()


def _apply(value: ProgramValue, undo: contextlib.ExitStack) -> None:
    owner: Any = sys.modules.get(value.module)
    try:
        for part in filter(None, value.owner.split(".")):
            owner = vars(owner)[part]
        held = vars(owner)
    except (KeyError, TypeError):
        return
    current = held.get(value.name, MISSING)
    if current is not MISSING and value_digest(current) == value.digest:
        return
    try:
        content = pickle.loads(value.pickled)
    except Exception:  # of a class that the worker does not find
        return
    if current is not MISSING and not _is_whole(current):
        if type_name(current) == value.kind:
            undo.callback(_refill, current, _content(current))
            _refill(current, content)
        return
    if not value.is_whole:
        build = _BUILTIN.get(value.kind)
        if build is None:
            return
        content = build(content)
    undo.callback(_put, owner, value.name, current)
    _put(owner, value.name, content)


def _refill(place: Any, content: Any) -> None:
    """Replaces the inside; what a subclass does on the way is left out."""
    if isinstance(place, list):
        list.__setitem__(place, slice(None), content)
    elif isinstance(place, set):
        set.clear(place)
        set.update(place, content)
    else:
        held = place if isinstance(place, dict) else vars(place)
        dict.clear(held)
        dict.update(held, content)


def _put(owner: Any, name: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, TypeError):  # a metaclass may refuse
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
