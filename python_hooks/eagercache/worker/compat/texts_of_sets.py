"""Texts that a forward writes a set into, as in the message of an error that it does not raise.

In which order members stand in such a text is each process's own. So it is none in a trace: it may
be handed on and put into other texts, and where somebody asks what is in it, no kernel can stand
on the trace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

# What Dynamo asks of a text to compare it, to measure it, or to hand it to the program.
_ASKED = (
    *("tp_richcompare_impl", "sq_length_impl", "mp_length_impl", "hash_impl", "get_python_hash"),
    *("is_python_equal", "nb_bool_impl", "call_method", "reconstruct", "call_obj_hasattr"),
    *("sq_contains_impl", "tp_iter_impl", "unpack_var_sequence", "mp_subscript_impl"),
)


def notice(
    undo: contextlib.ExitStack, has_own_order: Callable[[Any], bool], refuse: Callable[[], None]
) -> None:
    """Until ``undo`` is closed, `f"{members}"` has no order in traces.

    ``has_own_order``: of a value of Dynamo's, whether it is a set whose order is the process's.
    ``refuse``: called where somebody asks for such a text.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import StringFormatVariable

    class Members(VariableTracker):
        """A set's members in a text."""

    class Text(StringFormatVariable):
        """A text with `Members` in it."""

    for name in _ASKED:
        if hasattr(Text, name):
            setattr(Text, name, _asked(getattr(Text, name), refuse))

    written = InstructionTranslatorBase._format_value
    made = vars(StringFormatVariable)["create"].__func__

    @functools.wraps(written)
    def _format_value(tx: Any, spec: Any, flags: int) -> Any:
        value = tx.stack[-1].realize()
        plain = spec.is_python_constant() and spec.as_python_constant() == ""
        if not plain or not has_own_order(value):
            return written(tx, spec, flags)
        tx.pop()
        return tx.push(Text("{}", [Members()], {}))

    @functools.wraps(made)
    def create(kind: Any, *given: Any) -> Any:
        text, parts, named = given[-3:]  # newer versions are given who traces, too
        if any(isinstance(part, Members) for part in (*parts, *named.values())):
            return Text(text, list(parts), dict(named))
        return made(kind, *given)

    InstructionTranslatorBase._format_value = _format_value
    StringFormatVariable.create = classmethod(create)
    undo.callback(setattr, InstructionTranslatorBase, "_format_value", written)
    undo.callback(setattr, StringFormatVariable, "create", classmethod(made))


def _asked(original: Any, refuse: Callable[[], None]) -> Any:
    @functools.wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        refuse()
        return original(*args, **kwargs)

    return asked
