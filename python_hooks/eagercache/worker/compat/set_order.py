"""Sets whose order a forward sees while TorchDynamo traces it.

The order of a set is of its process: it comes of the hashes of its members, which Python draws anew
for words in each process, and of what was added when. A trace has the worker's, and a set that is
made while tracing has the order in which it was filled. So a kernel may stand on what is in a set,
but not on what comes first there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def noticed() -> Iterator[list[str]]:
    """A block whose traces write down where they read a set's order: a line of code for each."""
    kind, ordered = _kinds()
    read: list[str] = []

    def items_of(variable: Any) -> Any:
        items = variable.__dict__["items"]
        if len(items) > 1 and not isinstance(variable, ordered):
            place = _place_of_a_reading(sys._getframe(1))
            if place is not None:
                read.append(place)
        return items

    def keep(variable: Any, items: Any) -> None:
        variable.__dict__["items"] = items

    kind.items = property(items_of, keep)
    try:
        yield read
    finally:
        del kind.items


def _kinds() -> tuple[Any, tuple[type, ...]]:
    """Dynamo's class of sets, and those of them that have an order of their own."""
    from torch._dynamo import variables

    sets = variables.SetVariable
    base = next((kind for kind in sets.__mro__ if kind.__name__ == "BaseSetVariable"), sets)
    return base, (variables.OrderedSetVariable, variables.DictKeySetVariable)


def _place_of_a_reading(frame: FrameType | None) -> str | None:
    """The line of the program that reads an order; None where nothing does."""
    translated: Any = None
    while frame is not None:
        name = frame.f_code.co_name
        translated = translated or frame.f_locals.get("tx")
        if name in _HANDED_ON or name.startswith("<"):
            frame = frame.f_back
            continue
        if name in _UNORDERED or _makes_no_difference(frame, name):
            return None
        break
    code = getattr(translated, "f_code", None)
    if code is None:
        return "a line that is not known"
    if code.co_name.startswith("set_") and "polyfills" in code.co_filename:
        return None  # a set's method, as Dynamo has it in Python: it makes another set
    return f"line {getattr(translated, 'lineno', 0)} of {code.co_name}"


def _makes_no_difference(frame: FrameType, name: str) -> bool:
    if name == "call_sorted":  # without a key members of a set have one order, or none at all
        return not frame.f_locals.get("kwargs")
    if Path(frame.f_code.co_filename).name not in _SETS or name in _IN_TURN:
        return False
    # Older versions have all methods in one function.
    return not (name == "call_method" and frame.f_locals.get("name") in ("__iter__", "pop"))
