"""Guards of the classes of a call's objects, and of those that its forward makes objects of.

TorchDynamo follows objects that are built inside of the trace (`opened.py`), and has no guard on
what their classes say: that is written down here.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from eagercache.callables.answer_structure import Structure, classes_in
from eagercache.callables.code_values import (
    MISSING,
    is_covered,
    is_immutable,
    own_members,
    plain_value,
)
from eagercache.callables.guard_rows import (
    NO_GUARD,
    GuardRow,
    Path,
    attribute,
    describe,
    path_text,
    resolve,
)
from eagercache.callables.made_classes import (
    find_class,
    getter_position,
    is_named_tuple,
    slots_of,
)
from eagercache.callables.objects import CallObjects, parts_of
from eagercache.calls.opaque import Placeholder
from eagercache.worker.inductor.commands import CompileRefused

_NOBODY = torch.nn.Module()
_FACTORY: Any = dataclasses._HAS_DEFAULT_FACTORY  # type: ignore[attr-defined]


def class_rows(objects: CallObjects, structure: Structure) -> list[GuardRow]:
    """What the classes of the call's objects, and of those that it makes, are.

    A program may change them. Raises CompileRefused.
    """
    made = [find_class(module, path) for module, path in classes_in(structure)]
    members = {id(member): member for member in _members_in(objects.found)}
    kinds = [*map(type, objects.found), *map(type, members.values()), *filter(None, made)]
    return [row for kind in dict.fromkeys(kinds) for row in rows_of_class(kind)]


def rows_of_class(kind: type) -> list[GuardRow]:
    """What a class is, as far as what is made of it or read of it depends on that.

    Raises CompileRefused.
    """
    names = kind.__qualname__.split(".")
    path: Path = (("import", kind.__module__), *(("attr", name) for name in names))
    if find_class(kind.__module__, kind.__qualname__) is not kind:
        raise CompileRefused(f"the class {kind.__qualname__} cannot be found by its name")
    rows = [_row(path, kind)]
    rows += [_row((*path, ("attr", name)), value) for name, value in _named_parts(kind)]
    if is_named_tuple(kind):
        new: Path = (*path, ("attr", "__new__"), ("attr", "__defaults__"))
        rows.append(_row(new, attribute(attribute(kind, "__new__"), "__defaults__")))
    fields = vars(kind).get("__dataclass_fields__")
    if fields is not None and kind.__module__.partition(".")[0] != "transformers":
        place: Path = (*path, ("attr", "__dataclass_fields__"))  # a trace has no guard on these
        rows += [_row(place, fields), GuardRow(place, "keys", None, _keys(fields))]
    if is_named_tuple(kind) or issubclass(kind, enum.Enum):
        _refuse_parts(kind)  # what is read of these has no guard of TorchDynamo's
    if issubclass(kind, enum.Enum):
        rows += _member_rows(path, kind)
    return rows


def _row(path: Path, value: Any) -> GuardRow:
    return GuardRow(path, "value", None, describe(value, "value", None, _NOBODY))


def _keys(value: Any) -> Any:
    return describe(value, "keys", None, _NOBODY)


def _named_parts(kind: type) -> list[tuple[str, Any]]:
    """What says which item or slot an attribute is, and what stands in it where none is given."""
    names = slots_of(kind)
    if is_named_tuple(kind):
        names = (*kind._fields, "_fields", "_field_defaults", "__new__")  # type: ignore[attr-defined]
    values = [(name, attribute(kind, name)) for name in names]
    return [(name, value) for name, value in values if value is not MISSING]


def _refuse_parts(kind: type) -> None:
    """Raises CompileRefused for a class with a value in it that can be another one inside."""
    for base in kind.__mro__:
        for name, value, functions in own_members(base) if not is_covered(base.__module__) else ():
            known = functions or name.startswith("_") or name in slots_of(kind)
            if not known and getter_position(value) is None and not _is_plain(value):
                raise CompileRefused(f"{kind.__name__}.{name} is more than a plain value")


def _member_rows(path: Path, kind: type[enum.Enum]) -> list[GuardRow]:
    """The members of an enum: their names, and what they hold. Raises CompileRefused."""
    members = kind._member_map_
    for member in members.values():
        if not all(map(_is_plain, vars(member).values())):
            raise CompileRefused(f"{kind.__name__}.{member.name} is more than a plain value")
    table: Path = (*path, ("attr", "_member_map_"))
    keys = GuardRow(table, "keys", None, _keys(members))
    return [keys, *(_row((*table, ("item", name)), value) for name, value in members.items())]


def _is_plain(value: Any) -> bool:
    return plain_value(value) is not None or (type(value) is tuple and all(map(_is_plain, value)))


def _members_in(values: Iterable[Any]) -> Iterator[enum.Enum]:
    """The members of enums that objects hold."""
    for value in values:
        if isinstance(value, enum.Enum):
            yield value
        yield from _members_in(parts_of(value))


def rows_of_function(function: types.FunctionType) -> Iterator[GuardRow]:
    """What a function holds that a trace found on no path: its defaults and its closure's values.

    TorchDynamo has no guard on them where it does not know where the function is: a method of an
    object that the forward makes. Raises CompileRefused.
    """
    if any(map(_is_held, _parts_held(function).values())):
        path = _path_of(function)
        if path is None:
            name = f"{function.__module__}.{function.__qualname__}"
            raise CompileRefused(f"it runs {name}, whose closure cannot be found by name")
        yield from _rows_held(function, path, frozenset())


def _parts_held(function: types.FunctionType) -> dict[Path, Any]:
    """Defaults and contents of cells, each with the steps to it."""
    found: dict[Path, Any] = {}
    for index, value in enumerate(function.__defaults__ or ()):
        found[("attr", "__defaults__"), ("item", index)] = value
    for name, value in (function.__kwdefaults__ or {}).items():
        found[("attr", "__kwdefaults__"), ("item", name)] = value
    for index, cell in enumerate(function.__closure__ or ()):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if function.__code__.co_freevars[index] != "__class__":
            steps: Path = (("attr", "__closure__"), ("item", index), ("attr", "cell_contents"))
            found[steps] = value
    return found


def _is_held(value: Any) -> bool:
    """Whether a value may be another one elsewhere: a function of a covered package may not."""
    of_dataclasses = type(value) is type(_FACTORY)  # stands for the default that a factory makes
    of_package = isinstance(value, types.FunctionType) and is_covered(str(value.__module__))
    return not (of_dataclasses or of_package)


def _rows_held(
    function: types.FunctionType, path: Path, above: frozenset[int]
) -> Iterator[GuardRow]:
    for steps, value in _parts_held(function).items():
        if not _is_held(value):
            continue
        if isinstance(value, types.FunctionType):
            if id(value) not in above:
                yield from _rows_held(value, (*path, *steps), above | {id(value)})
        elif plain_value(value) is None and not is_immutable(value):
            name = f"{function.__module__}.{function.__qualname__}"
            raise CompileRefused(f"{name} holds a {type(value).__name__}, which nothing guards")
        yield _row((*path, *steps), value)


def _path_of(function: types.FunctionType) -> Path | None:
    """Where a function is in its Python module, or in a class there."""
    found = sys.modules.get(str(function.__module__))
    namespace = {} if found is None else vars(found)
    root: Path = (("import", str(function.__module__)),)
    for name, value in list(namespace.items()):
        if value is function:
            return (*root, ("attr", name))
        for attribute_name, held in vars(value).items() if isinstance(value, type) else ():
            if held is function or getattr(held, "__func__", None) is function:
                return (*root, ("attr", name), ("attr", attribute_name))
    return None


def rows_of_foreign_modules(paths: list[Path], module: torch.nn.Module) -> Iterator[GuardRow]:
    """All that the modules are that paths lead through or to, beside ``module`` and its parts.

    Raises CompileRefused, also for a path through what this process was not told of.
    """
    own = set(map(id, module.modules()))
    for path in {one[:length]: None for one in paths for length in range(1, len(one) + 1)}:
        value = resolve(path, module)
        if type(value) is Placeholder:
            raise CompileRefused(value.complaint)
        if isinstance(value, torch.nn.Module) and id(value) not in own:
            said = describe(value, "module", None, module)
            if said.startswith(NO_GUARD):
                raise CompileRefused(f"the forward reads the module {path_text(path)}: {said}")
            yield GuardRow(path, "module", None, said)
