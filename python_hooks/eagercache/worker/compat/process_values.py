"""What a forward sees of its process alone while TorchDynamo traces it: sets' orders, addresses.

The order of a set is of its process: it comes of the hashes of its members, which Python draws anew
for words in each process, and of what was added when. A trace has the worker's, and a set that is
made while tracing has the order in which it was filled. So a kernel may stand on what is in a set,
but not on what comes first there, nor on a hash or an address (`id`, "<object at 0x7f...>").
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# The files of Dynamo's own sets. What reads members there adds, removes, finds or compares them,
_SETS = ("sets.py", "dicts.py")
# but for these, which give them away one after the other; who asks them is looked at.
_IN_TURN = ("tp_iter_impl", "pop", "tp_repr_impl", "debug_repr")
_HANDED_ON = (
    "set_items",
    "as_python_constant",
    "as_proxy",
    "unpack_var_sequence",
    "force_unpack_var_sequence",
    "unpack_iterable",
    "force_apply_to_var_sequence",
    "guarded_method",
    "realize_and_forward",
    "__getattr__",
)
# Who asks and sees no order, in Dynamo's other files: whether there is a sequence or a constant at
# all, what makes another set, what hands one to a set's own method.
_UNORDERED = (
    "has_unpack_var_sequence",
    "has_force_unpack_var_sequence",
    "is_python_constant",
    "call_set",
    "call_frozenset",
    "_call_frozenset",
)


_ANEW = "which each process has anew"
_TELLING_APART = frozenset(
    function.__code__ for function in (inspect.unwrap, copy.deepcopy, vars(copy)["_keep_alive"])
)
# How Python writes an object whose class does not say how.
_ADDRESS = " at 0x"


@contextlib.contextmanager
def noticed() -> Iterator[list[str]]:
    """A block whose traces write down what they read of the process: a reason for each."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable

    read: list[str] = []
    kind, ordered = _kinds()
    kind.items = property(_items(read, ordered), _keep_items)
    wrapped = (
        (BuiltinVariable, "call_function", _called(read)),
        (InstructionTranslatorBase, "_load_attr", _loaded(read)),
        (ConstantVariable, "__init__", _made(read)),
    )
    originals = [getattr(owner, name) for owner, name, _ in wrapped]
    for (owner, name, wrap), original in zip(wrapped, originals, strict=True):
        setattr(owner, name, functools.wraps(original)(wrap(original)))
    try:
        yield read
    finally:
        del kind.items
        for (owner, name, _), original in zip(wrapped, originals, strict=True):
            setattr(owner, name, original)


def _items(read: list[str], ordered: tuple[type, ...]) -> Callable[[Any], Any]:
    def items_of(variable: Any) -> Any:
        items = variable.__dict__["items"]
        if len(items) > 1 and not isinstance(variable, ordered):
            place = _place_of_a_reading(sys._getframe(1))
            if place is not None:
                read.append(f"{place} goes through a set, whose order each process makes anew")
        return items

    return items_of


def _keep_items(variable: Any, items: Any) -> None:
    variable.__dict__["items"] = items


def _called(read: list[str]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def call(variable: Any, tx: Any, *args: Any) -> Any:
            if variable.fn in (id, hash) and not _is_dynamos(tx) and not _tells_apart(tx):
                read.append(f"{_line(tx)} asks for {variable.fn.__name__}(), {_ANEW}")
            return original(variable, tx, *args)

        return call

    return wrap


def _loaded(read: list[str]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def load(tx: Any, name: Any) -> Any:
            if name == "__hash__" and not _is_dynamos(tx):
                read.append(f"{_line(tx)} asks for a hash, {_ANEW}")
            return original(tx, name)

        return load

    return wrap


def _made(read: list[str]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def make(variable: Any, value: Any = None, *args: Any, **kwargs: Any) -> None:
            if isinstance(value, str) and _ADDRESS in value:
                tx = _translator(sys._getframe(1))
                read.append(f"{_line(tx)} writes an address into a text, {_ANEW}")
            original(variable, value, *args, **kwargs)

        return make

    return wrap


def _kinds() -> tuple[Any, tuple[type, ...]]:
    """Dynamo's class of sets, and those of them that have an order of their own."""
    from torch._dynamo import variables

    sets = variables.SetVariable
    base = next((kind for kind in sets.__mro__ if kind.__name__ == "BaseSetVariable"), sets)
    return base, (variables.OrderedSetVariable, variables.DictKeySetVariable)


def _place_of_a_reading(frame: FrameType | None) -> str | None:
    """The line of the program that reads an order; None where nothing does."""
    asked = frame
    while frame is not None:
        name = frame.f_code.co_name
        if name in _HANDED_ON or name.startswith("<"):
            frame = frame.f_back
        elif name in _UNORDERED or _makes_no_difference(frame, name):
            return None
        else:
            break
    tx = _translator(asked)
    # A set's own method, as Dynamo has it in Python, makes another set.
    return None if _is_dynamos(tx) and tx.f_code.co_name.startswith("set_") else _line(tx)


def _translator(frame: FrameType | None) -> Any:
    """What Dynamo traces the code with that is being traced; None outside of that."""
    while frame is not None:
        for name in ("tx", "self"):
            found = frame.f_locals.get(name)
            if hasattr(found, "f_code") and hasattr(found, "lineno"):
                return found
        frame = frame.f_back
    return None


def _is_dynamos(tx: Any) -> bool:
    """Whether the code that is traced is Dynamo's own, in the place of Python's."""
    return tx is not None and f"_dynamo{os.sep}polyfills" in tx.f_code.co_filename


def _tells_apart(tx: Any) -> bool:
    """Whether the code only tells objects apart by their addresses: Python's own ways to do that.

    `Module.__setattr__` asks for a signature where a buffer is assigned, which unwraps functions.
    """
    return tx is not None and tx.f_code in _TELLING_APART


def _line(tx: Any) -> str:
    return "a line" if tx is None else f"line {tx.lineno} of {tx.f_code.co_name}"


def _makes_no_difference(frame: FrameType, name: str) -> bool:
    if name == "call_sorted":  # without a key members of a set have one order, or none at all
        return not frame.f_locals.get("kwargs")
    if Path(frame.f_code.co_filename).name not in _SETS or name in _IN_TURN:
        return False
    # Older versions have all methods in one function.
    return not (name == "call_method" and frame.f_locals.get("name") in ("__iter__", "pop"))
