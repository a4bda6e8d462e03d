"""What a forward sees of its process alone while TorchDynamo traces it: sets' orders, addresses.

The order of a set is of its process: it comes of the hashes of its members, which Python draws anew
for words in each process, and of what was added when. A trace has the worker's, and a set that is
made while tracing has the order in which it was filled. So a kernel may stand on what is in a set,
but not on what comes first there: a forward that goes through a small set, as through the kinds of
layers that a configuration names, is traced in each order. Nor may it stand on a hash or an address
(`id`, "<object at 0x7f...>"). Nor on whether gradients are recorded, where the call needs none: a
kernel answers it in both modes, and what asks for that is traced in both.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from eagercache.worker.compat import (
    averaging_norms,
    cached_calls,
    known_tensors,
    numpy_arrays,
    numpy_numbers,
    texts_of_sets,
    tracing_state,
)
from eagercache.worker.compat.noted_calls import before

# The files of Dynamo's own sets. What reads members there adds, removes, finds or compares them,
_SETS = ("sets.py", "dicts.py")
# but for these, which give them away one after the other.
_IN_TURN = ("tp_iter_impl", "pop", "tp_repr_impl", "debug_repr")
# What only hands members on: who asks it is looked at.
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
    "get_real_python_backed_value",
    "_get_function_impl",  # a nested function with what it closes over
    "get_function",
    "__getattr__",
)
# Who asks and sees no order, in Dynamo's other files: whether there is a sequence or a constant at
# all, or one object, or a rule for a function, and what makes another set.
_UNORDERED = (
    "has_unpack_var_sequence",
    "has_force_unpack_var_sequence",
    "is_python_constant",
    "vt_identity_compare",
    "check_verbose",
    "call_set",
    "call_frozenset",
)
# These take all members at once, so that another order can be handed to them.
_ALL_AT_ONCE = ("unpack_var_sequence", "tp_iter_impl")
# So many have few enough orders to try each of them.
_MOST_MEMBERS = 3
SET_ORDER = "goes through a set, whose order each process makes anew"
_ANEW = "which each process has anew"
# Python's own functions that only tell objects apart by their ids.
_TELLING_APART = frozenset(
    function.__code__ for function in (inspect.unwrap, copy.deepcopy, vars(copy)["_keep_alive"])
)
# How Python writes an object whose class does not say how.
_ADDRESS = " at 0x"


@dataclass
class ProcessValues:
    """What a trace read of its process.

    Attributes:
        order: which of its orders a small set had where code went through it.
        reasons: why no kernel can stand on the trace, with lines of the program.
        place: the line that went through a small set, "" where none did. What is traced may be the
            same in each order.
        members: those of that set, as Dynamo has them.
        mode: the line that asked whether gradients are recorded, where none are; "" without one.
    """

    order: int = 0
    reasons: list[str] = field(default_factory=list)
    place: str = ""
    members: frozenset[Any] = frozenset()
    mode: str = ""

    @property
    def orders(self) -> int:
        """How many orders the set has: one of them is the program's."""
        return math.factorial(len(self.members))

    def goes_through(self, place: str, items: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The items in the order of this trace. Orders of two sets with each other are too many."""
        members = frozenset(items)
        if (
            len(items) > _MOST_MEMBERS
            or self.place not in ("", place)
            or self.members not in (frozenset(), members)
        ):
            self.reasons.append(f"{place} {SET_ORDER}")
        else:
            self.place, self.members = place, members
            orders = list(itertools.permutations(items))
            return {key: items[key] for key in orders[self.order % len(orders)]}
        return items

    def calls(self, variable: Any, tx: Any, *_: Any) -> None:
        """A builtin is called."""
        if variable.fn in (id, hash) and not _is_dynamos(tx) and not _tells_apart(tx):
            self.reasons.append(f"{_line(tx)} asks for {variable.fn.__name__}(), {_ANEW}")

    def calls_torch(self, variable: Any, tx: Any, *_: Any) -> None:
        """A function of torch is called. A call that needs no gradients may be of either mode."""
        caller = str(tx.f_globals.get("__name__", ""))
        # Of what PyTorch's own code leaves out of a trace this alone makes another answer: rows
        # that a padding mask hides at their ends are zeros.
        if (
            variable.value is torch.compiler.is_compiling
            and caller == "torch.nn.modules.transformer"
        ):
            self.reasons.append(f"{_line(tx)} takes another way with this mask while it is traced")
        if variable.value is not torch.is_grad_enabled or torch.is_grad_enabled():
            return
        # PyTorch's own code also asks whether a tensor needs gradients: the mode decides nothing.
        if not caller.startswith("torch."):
            self.mode = self.mode or _line(tx)

    def loads(self, tx: Any, name: Any) -> None:
        """An attribute is looked up."""
        if name == "__hash__" and not _is_dynamos(tx):
            self.reasons.append(f"{_line(tx)} asks for a hash, {_ANEW}")

    def reads_a_text(self) -> None:
        """Somebody asks for a text that a set was written into."""
        tx = _translator(sys._getframe(1))
        self.reasons.append(f"{_line(tx)} reads the text of a set, {_ANEW}")

    def makes(self, _: Any, value: Any = None, *__: Any, **___: Any) -> None:
        """A constant is made."""
        if isinstance(value, str) and _ADDRESS in value:
            tx = _translator(sys._getframe(1))
            self.reasons.append(f"{_line(tx)} writes an address into a text, {_ANEW}")


@contextlib.contextmanager
def noticed(order: int = 0, arrays: Collection[int] = ()) -> Iterator[ProcessValues]:
    """A block whose traces write down what they read of the process.

    ``arrays``: ids of the arrays of numpy that are the module's.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    found = ProcessValues(order)
    kind, ordered = _kinds()
    with contextlib.ExitStack() as undo:
        before(undo, BuiltinVariable, "call_function", found.calls)
        before(undo, TorchInGraphFunctionVariable, "call_function", found.calls_torch)
        before(undo, InstructionTranslatorBase, "_load_attr", found.loads)
        before(undo, ConstantVariable, "__init__", found.makes)
        kind.items = property(_items(found, ordered), _keep_items)
        undo.callback(delattr, kind, "items")
        cached_calls.notice(undo, found.reasons)
        numpy_numbers.notice(undo, found.reasons)
        numpy_arrays.notice(undo, arrays)
        averaging_norms.notice(undo)
        known_tensors.notice(undo)
        has_own_order = functools.partial(_has_own_order, kind, ordered)
        texts_of_sets.notice(undo, has_own_order, found.reads_a_text)
        tracing_state.eagers_own(undo)
        yield found


def _items(found: ProcessValues, ordered: tuple[type, ...]) -> Callable[[Any], Any]:
    def items_of(variable: Any) -> Any:
        items = variable.__dict__["items"]
        if len(items) < 2 or isinstance(variable, ordered):
            return items
        frame = sys._getframe(1)
        place = _place_of_a_reading(frame)
        if place is None:
            return items
        if frame.f_code.co_name in _ALL_AT_ONCE:
            return found.goes_through(place, items)
        found.reasons.append(f"{place} {SET_ORDER}")
        return items

    return items_of


def _has_own_order(kind: type, ordered: tuple[type, ...], variable: Any) -> bool:
    """Whether a variable of Dynamo's is a set whose order is the process's."""
    if not isinstance(variable, kind) or isinstance(variable, ordered):
        return False
    return len(variable.__dict__["items"]) > 1


def _keep_items(variable: Any, items: Any) -> None:
    variable.__dict__["items"] = items


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
    """Whether the code only tells objects apart by their ids.

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
