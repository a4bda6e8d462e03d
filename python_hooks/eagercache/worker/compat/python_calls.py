"""Calls of Python's library that TorchDynamo refuses, and that are plain where their values are."""

from __future__ import annotations

import copy
import enum
import functools
from typing import Any

# `copy.deepcopy` hands them back.
_NEVER_COPIED = frozenset((type(None), bool, int, float, complex, str, bytes, type(...)))


@functools.cache
def teach_python_calls() -> None:
    """From now on Dynamo traces `copy.deepcopy` of a plain value, and `member in flags`.

    `dataclasses.asdict` calls the first for each field. The values have guards in both. For the
    life of the process, since Dynamo keeps handlers from trace to trace.
    """
    from torch._dynamo.variables import constant
    from torch._dynamo.variables.builtin import BuiltinVariable

    copied = BuiltinVariable.call_deepcopy

    @functools.wraps(copied)
    def call_deepcopy(self: Any, tx: Any, value: Any) -> Any:
        plain = self.fn is copy.deepcopy and value.is_python_constant()
        if plain and type(value.as_python_constant()) in _NEVER_COPIED:
            return value
        return copied(self, tx, value)

    BuiltinVariable.call_deepcopy = call_deepcopy
    members = getattr(constant, "EnumVariable", None)
    if members is not None:  # newer versions trace what the class of an enum says
        members.call_method = _with_flags(members.call_method, constant.ConstantVariable.create)


def _with_flags(original: Any, made: Any) -> Any:
    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        flags = self.as_python_constant()
        if name == "__contains__" and _are_flags(flags) and args[0].is_python_constant():
            other = args[0].as_python_constant()
            if type(other) is type(flags):
                return made(other in flags)
        return original(self, tx, name, args, kwargs)

    return call_method


def _are_flags(value: Any) -> bool:
    """Whether a value is a member of flags whose class asks as Python's own do."""
    return isinstance(value, enum.Flag) and type(value).__contains__ is enum.Flag.__contains__
