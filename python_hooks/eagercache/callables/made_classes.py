"""Classes of objects that calls are given and that answers are made of, and what these hold.

Those of an answer, and its constants, are found by their names when a kernel's answer is built.
And what a description of a module has of its class.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import importlib
import sys
import types
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils import parametrize

from eagercache.callables.call_hooks import as_torch_made
from eagercache.callables.code_values import (
    class_code,
    is_covered,
    is_found_by_name,
    is_python_class,
    put_into,
)

# Classes of C that have nothing but their items.
_WITH_ITEMS = frozenset((list, tuple, dict, OrderedDict, set, frozenset))


def cannot_be_made(kind: type) -> str:
    """Why an object of a class is more than its dictionary of attributes; "" where it is not."""
    named = is_named_tuple(kind)
    for base in kind.__mro__:
        if base is object or (named and base is tuple):
            continue
        if not is_python_class(base) or (slots_of(base) and kind.__dictoffset__ != 0):
            return "which keeps what is not in its dictionary"
        if "__del__" in vars(base):
            return "which does something when it ends"
        if "__getattribute__" in vars(base):
            return "which answers for its attributes itself"
    if issubclass(kind, (torch.nn.Module, enum.Enum)) or isinstance(kind, enum.EnumMeta):
        return "which outlives the call"
    return ""


def constant_of(stored: dict[str, Any]) -> Any:
    """The inverse of `answer_structure.stored_constant`. Raises ValueError for something else."""
    if "dtype" in stored:
        dtype = getattr(torch, stored["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{stored['dtype']} is no dtype")
        return dtype
    if "device" in stored:
        return torch.device(stored["device"])
    if "class" not in stored:
        raise ValueError(f"{stored} is no constant")
    module, path = stored["class"]
    found: Any = find_class(module, path)
    if found is None:
        raise ValueError(f"{module}.{path} is no class")
    if "member" not in stored:
        return found
    if not issubclass(found, enum.Enum) or stored["member"] not in found._member_map_:
        raise ValueError(f"{module}.{path} has no {stored['member']}")
    return found._member_map_[stored["member"]]


# The type of what a named tuple's class has under the name of an item.
_tuplegetter: Any = type(vars(namedtuple("_Any", "item"))["item"])

# In a compile worker: the program's classes of its `__main__`, which is another one there.
classes_of_main: dict[str, type] = {}
# The same of functions that were sent and are what their names stand for there.
functions_of_main: dict[str, types.FunctionType] = {}


def find_class(module: str, path: str) -> type | None:
    """The class of that name, whose module is imported if need be; None where there is none."""
    if module == "__main__" and path in classes_of_main:
        return classes_of_main[path]
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def is_model_output(kind: type) -> bool:
    """Whether a class is an output of transformers: a dict of what its constructor is given."""
    return any(
        base.__name__ == "ModelOutput" and base.__module__ == "transformers.utils.generic"
        for base in kind.__mro__
    )


def is_fixed(kind: type) -> bool:
    """Whether objects of a class are what their constructor is given, and are changed by no kernel.

    Frozen dataclasses, named tuples, and the outputs of transformers. As the core has it
    (nn_modules/object_classes.h).
    """
    return is_model_output(kind) or is_frozen(kind) or is_named_tuple(kind)


def is_frozen(kind: type) -> bool:
    """Whether a class is a dataclass that lets nobody set attributes."""
    return dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def is_named_tuple(kind: type) -> bool:
    """Whether all that an object of a class holds are a tuple's items, each of which has a name."""
    if not issubclass(kind, tuple) or kind.__dictoffset__ != 0 or not is_python_class(kind):
        return False
    names = getattr(kind, "_fields", None)
    return type(names) is tuple and all(
        type(name) is str and getter_position(getattr(kind, name, None)) == position
        for position, name in enumerate(names)
    )


def getter_position(value: Any) -> int | None:
    """Which item a named tuple's attribute stands for, by what its class has under the name."""
    if type(value) is not _tuplegetter:
        return None
    position: int = value.__reduce__()[1][0]
    return position


_slots: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class's objects, those of bases first, as they were when it was first met."""
    known = _slots.get(kind)
    if known is None:
        bases = [base for base in reversed(kind.__mro__) if is_python_class(base)]
        known = _slots[kind] = tuple(
            name
            for base in bases
            for name, value in sorted(vars(base).items())
            if isinstance(value, types.MemberDescriptorType) and value.__objclass__ is base
        )
    return known


def fields_of(value: Any) -> dict[str, Any]:
    """What an object holds, by name, in the core's order: its own dictionary where it has one."""
    if isinstance(value, tuple):
        items: Any = tuple.__iter__(value)
        return dict(zip(type(value)._fields, items, strict=True))  # type: ignore[attr-defined]
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        return held
    missing = object()
    slots = {name: getattr(value, name, missing) for name in slots_of(type(value))}
    return {name: part for name, part in slots.items() if part is not missing}


def field_of(value: Any, name: str) -> Any:
    """One of `fields_of`."""
    held = getattr(value, "__dict__", None)
    return held[name] if isinstance(held, dict) else object.__getattribute__(value, name)


def set_field(value: Any, name: str, part: Any) -> None:
    """Puts something into an object, whatever its class says of that."""
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        held[name] = part
    else:
        object.__setattr__(value, name, part)


def make_object(kind: type, held: Mapping[str, Any]) -> Any:
    """An object of a class that holds this, whose constructor does not run."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, held.values())
    output = is_model_output(kind)
    new: Any = OrderedDict.__new__ if output else object.__new__
    made: Any = new(kind)
    for name, value in held.items():
        set_field(made, name, value)
        if output and value is not None:
            OrderedDict.__setitem__(made, name, value)
    return made


def is_rebuilt(kind: type) -> bool:
    """Whether an object of a class holds the same after a pickle; see `module_transfer.pack`."""
    if "<locals>" in kind.__qualname__:
        return False
    if is_model_output(kind) or slots_of(kind):  # those travel as what they hold
        return True
    names = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in names)


def hides_a_value(value: Any) -> bool:
    """Whether an object of a class of the program holds more than items and attributes.

    That is a slot, or what a class of C has inside (a float, a date).
    """
    bases = [base for base in type(value).__mro__ if base is not object]
    own = [base for base in bases if is_python_class(base)]
    if any(
        isinstance(member, types.MemberDescriptorType)
        for base in own
        if not is_covered(base.__module__)
        for member in vars(base).values()
    ):
        return True
    of_c = {base for base in bases if base not in own}
    return not of_c <= _WITH_ITEMS


def reduced_parametrized(value: Any) -> tuple[Any, ...] | None:
    """How pickle has to write a module with computed tensors down; None for all others.

    torch (`torch.nn.utils.parametrize`) gives such a module a class of its own, with a property for
    each of these tensors, and lets nobody pickle it. Here it travels as what it was made of: its
    first class, its parts, and the names of the properties. The module's identity says whether the
    worker's class is the same: it has the code of classes that are not found by their name.
    """
    kind = type(value)
    if (
        not isinstance(value, torch.nn.Module)
        or kind.__module__ != parametrize.__name__
        or is_found_by_name(kind)
        or not parametrize.is_parametrized(value)
    ):
        return None
    (first,) = kind.__bases__
    fill: Callable[[torch.nn.Module, Any], None] = _fill
    return _make, (first,), (vars(value).copy(), list(value.parametrizations)), None, None, fill


def _make(kind: Any) -> torch.nn.Module:
    made: torch.nn.Module = kind.__new__(kind)
    return made


def _fill(module: torch.nn.Module, state: tuple[dict[str, Any], list[str]]) -> None:
    held, names = state
    vars(module).update(held)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    # The first copy of such a module writes this to its class, which a guard would notice.
    copyreg._slotnames(type(module))  # type: ignore[attr-defined]


def class_row(kind: type) -> list[Any]:
    """A module's class by name, its package's version and the code of its methods, with bases."""
    meta: type = type(kind)
    bases = [
        [base.__module__, base.__qualname__, class_code(base)]
        for base in (*kind.__mro__, *meta.__mro__)
        if not (is_covered(base.__module__) and is_found_by_name(base))
    ]
    put = [[base.__qualname__, *row] for base in kind.__mro__ for row in _put_into(base)]
    names = [kind.__module__, kind.__qualname__, kind.__name__]
    return [*names, package_version(kind.__module__), bases, put]


def _put_into(kind: type) -> list[list[Any]]:
    """What a program put into a class of PyTorch's, say."""
    if not is_covered(kind.__module__) or kind.__module__ == "builtins":
        return []
    return put_into(kind, as_torch_made)


def package_version(module_name: str) -> str:
    """``__version__`` of a module's top-level package, or ""."""
    top = sys.modules.get(module_name.partition(".")[0])
    return str(getattr(top, "__version__", ""))
