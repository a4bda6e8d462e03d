"""A Python function on its way to a compile worker.

It travels by value, with the functions that it can reach in the program's own modules, so that it
may be a lambda, a notebook's or a script's, and the worker runs no module of the program. The bytes
go to a process of the same user through a pipe, and are stored where the program ends before the
answer comes (service/pending.py).
"""

from __future__ import annotations

import base64
import io
import pickle
import sys
import threading
import types
from typing import Any

import cloudpickle
import torch
from torch._ops import _OpNamespace, _Ops

from eagercache.callables.code_values import is_covered
from eagercache.callables.module_identity import Unfit

MAX_BYTES = 4 << 20

_lock = threading.Lock()  # by-value registrations are cloudpickle's, for the process


class Packer(cloudpickle.Pickler):
    """cloudpickle's, for what is met in programs of PyTorch, too.

    ``torch.ops`` and its namespaces are modules that no import finds: a script with
    ``aten = torch.ops.aten`` has them among its globals.
    """

    def reducer_override(self, value: Any) -> Any:
        """What is not pickled as it says itself."""
        if isinstance(value, _Ops):
            return getattr, (torch, "ops")
        if isinstance(value, _OpNamespace):
            return getattr, (torch.ops, value.name)
        return super().reducer_override(value)


def pack(function: types.FunctionType, modules: tuple[str, ...] = ()) -> str:
    """Text that `unpack` reads in another process. Raises Unfit."""
    with _lock:
        added = [module for name in modules if (module := _unregistered(name)) is not None]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            file = io.BytesIO()
            Packer(file, protocol=pickle.HIGHEST_PROTOCOL).dump(function)
            data = file.getvalue()
        except Exception as error:
            line = (str(error).splitlines() or [""])[0][:200]
            raise Unfit(f"it cannot be pickled: {type(error).__name__}: {line}") from error
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
