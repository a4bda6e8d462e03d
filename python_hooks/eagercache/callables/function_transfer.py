"""A Python function on its way to a compile worker.

It travels by value, with the functions that it can reach in the program's own modules, so that it
may be a lambda, a notebook's or a script's, and the worker runs no module of the program. The bytes
go to a process of the same user through a pipe, and are stored where the program ends before the
answer comes (service/pending.py).
"""

from __future__ import annotations

import base64
import functools
import importlib
import io
import pickle
import sys
import threading
import types
import uuid
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch._ops import _OpNamespace, _Ops

from eagercache.callables.code_values import is_covered, is_found_by_name
from eagercache.callables.module_identity import Unfit
from eagercache.calls.texts import named_line

MAX_BYTES = 4 << 20

_make_class = cloudpickle.cloudpickle._make_skeleton_class
_make_enum = cloudpickle.cloudpickle._make_skeleton_enum
_Cached: Any = type(functools.lru_cache(len))  # of functions that keep what they return
_lock = threading.Lock()  # by-value registrations are cloudpickle's, for the process


class Packer(cloudpickle.Pickler):
    """cloudpickle's, for what is met in programs of PyTorch, too.

    ``torch.ops`` and its namespaces are modules that no import finds: a script with
    ``aten = torch.ops.aten`` has them among its globals. A cached property has a lock on Python
    3.11 and before. A cached function of a script goes without what it keeps. A module of a class
    of its own (``torch.backends.mkldnn``) is imported by its name.

    Attributes:
        request: what several pickles have in common that are read for one request. A class that
            travels by value is one class in all of them, and another one for another request.
        classes_of_main: the classes of ``__main__`` that were met and are what their names stand
            for, by these.
        functions_of_main: the same of its functions.
    """

    def __init__(self, file: io.BytesIO, request: str = "") -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.request = request or uuid.uuid4().hex
        self.classes_of_main: dict[str, type] = {}
        self.functions_of_main: dict[str, types.FunctionType] = {}

    def reducer_override(self, value: Any) -> Any:
        """What is not pickled as it says itself."""
        if isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__":
            found: dict[str, Any] = self.functions_of_main
            if isinstance(value, type):
                found = self.classes_of_main
            if is_found_by_name(value):
                found[value.__qualname__] = value
        if type(value) is functools.cached_property:
            return _cached_property, (value.func, value.attrname)
        if type(value) is _Cached and value.__module__ == "__main__":
            return _cached_function, (value.__wrapped__, value.cache_parameters())
        if isinstance(value, type) and _is_enum_of_torch(value):
            return _enum_of_torch, (value.__qualname__,)
        if isinstance(value, type):
            return self._class(value, super().reducer_override(value))
        kind = type(value)
        if _is_enum_of_torch(kind):
            return _enum_of_torch, (kind.__qualname__, value.name)
        if isinstance(value, _Ops):
            return getattr, (torch, "ops")
        if isinstance(value, _OpNamespace):
            return getattr, (torch.ops, value.name)
        if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
            name = value.__name__
            if sys.modules.get(name) is value:
                return importlib.import_module, (name,)
        return super().reducer_override(value)

    def _class(self, kind: type, reduced: Any) -> Any:
        """What cloudpickle makes of a class.

        It leaves out that objects of the class have no dictionary, and that the class stands in
        another one or in a function, which is part of its name. And who reads the class a second
        time is given the one of the first time, whose bases and members stay, and to which only is
        added: what the program has deleted since would still be there.
        """
        if not isinstance(reduced, tuple) or reduced[0] not in (_make_class, _make_enum):
            return reduced
        if (
            reduced[0] is _make_class
            and type(vars(kind).get("__slots__")) is tuple
            and NamedTuple not in getattr(kind, "__orig_bases__", ())  # which sees to that
        ):
            reduced[1][3]["__slots__"] = vars(kind)["__slots__"]
        if reduced[0] is _make_class and kind.__qualname__ != kind.__name__:
            reduced[1][3]["__qualname__"] = kind.__qualname__
        *arguments, tracked, extra = reduced[1]
        return reduced[0], (*arguments, f"{self.request}-{tracked}", extra), *reduced[2:]


def _is_enum_of_torch(kind: type) -> bool:
    """Whether it is one of C++, such as SDPBackend, which names a module that it is not in."""
    name = kind.__qualname__
    return hasattr(kind, "__members__") and getattr(torch._C, name, None) is kind


def _enum_of_torch(kind: str, name: str = "") -> Any:
    """Such an enum, or a member of it."""
    found = getattr(torch._C, kind)
    return getattr(found, name) if name else found


def _cached_property(function: Any, name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


def _cached_function(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def pack(function: types.FunctionType, modules: tuple[str, ...] = ()) -> str:
    """Text that `unpack` reads in another process. Raises Unfit."""
    with _lock:
        added = [module for name in modules if (module := _unregistered(name)) is not None]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            file = io.BytesIO()
            Packer(file).dump(function)
            data = file.getvalue()
        except Exception as error:
            raise Unfit(f"it cannot be pickled: {named_line(error)}") from error
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)
    if len(data) > MAX_BYTES:
        raise Unfit("its code refers to too much data")
    return base64.b64encode(data).decode()


def _unregistered(name: str) -> types.ModuleType | None:
    module = sys.modules.get(name)
    known = cloudpickle.list_registry_pickle_by_value()
    if module is None or name == "__main__" or is_covered(name) or name in known:
        return None
    return module


def unpack(text: str) -> types.FunctionType:
    """The function that `pack` packed. Imports what it takes from installed packages."""
    function = pickle.load(io.BytesIO(base64.b64decode(text)))
    assert isinstance(function, types.FunctionType)
    return function
