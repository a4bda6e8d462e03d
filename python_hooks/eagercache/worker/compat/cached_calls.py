"""Calls of functions that keep what they return (`functools.lru_cache`), in traces.

TorchDynamo traces what such a function wraps. Eager may get what was kept: made when a global was
another one, a list that somebody has changed since, or what it returned for an argument that is
equal and of another type (1, 1.0 and True). So a kernel stands on such a call only where no time at
which it was made could make a difference: plain values go in and out, only equal ones of one type
share what was kept, and the code names nothing but Python's own functions of them.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import math
import operator
import types
from collections.abc import Iterator
from typing import Any

from eagercache.callables.code_values import MISSING, chains, is_covered, plain_value
from eagercache.worker.compat.noted_calls import after

# Of Python's own: what they return depends on nothing but their arguments.
_PURE = frozenset(
    (
        *(abs, all, any, bool, bytes, chr, complex, dict, divmod, enumerate, filter, float),
        *(frozenset, int, isinstance, len, list, map, max, min, ord, pow, range, reversed),
        *(round, slice, sorted, str, sum, tuple, zip),
    )
)
_PURE_MODULES = (math, operator)
_ELSEWHERE = ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME", "LOAD_BUILD_CLASS")
# What these say of the installed packages stays what it is for the process's life.
_OF_THE_INSTALLATION = frozenset({"transformers.utils.import_utils"})


def notice(undo: contextlib.ExitStack, reasons: list[str]) -> None:
    """Until ``undo`` is closed, traces add why no kernel can stand on a call of such a function."""
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable

    def calls(answer: Any, variable: Any, _: Any, args: Any, kwargs: Any) -> None:
        wrapper = variable.wrapper_obj
        if not hasattr(wrapper, "cache_info") or _is_trusted(wrapper):
            return
        given = (*variable.self_args(), *args, *kwargs.values())
        alone = len(given) == 1 and not kwargs
        if not (is_pure(wrapper) and _is_plain(answer) and all(_is_own(x, alone) for x in given)):
            name = getattr(wrapper, "__qualname__", "a function")
            reasons.append(f"the forward calls {name}, which keeps what it returned before")

    after(undo, WrapperUserFunctionVariable, "call_function", calls)


def _is_trusted(wrapper: Any) -> bool:
    name = str(getattr(wrapper, "__module__", ""))
    return is_covered(name) or name in _OF_THE_INSTALLATION


def is_pure(wrapper: Any) -> bool:
    """Whether what the function returns for plain values is the same at all times."""
    function = getattr(wrapper, "__wrapped__", None)
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(map(_is_constant, defaults)):
        return False
    return all(_reads_nothing(code, function.__globals__) for code in _codes(function.__code__))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _reads_nothing(code: types.CodeType, namespace: dict[str, Any]) -> bool:
    if any(instruction.opname in _ELSEWHERE for instruction in dis.get_instructions(code)):
        return False
    for name, *_ in chains(code):
        value = namespace.get(name, MISSING)
        if value is MISSING:
            found = getattr(builtins, name, None)
            error = isinstance(found, type) and issubclass(found, BaseException)
            if not error and not any(found is pure for pure in _PURE):
                return False
        elif not any(value is module for module in _PURE_MODULES):
            return False
    return True


def _is_plain(variable: Any) -> bool:
    return variable.is_python_constant() and _is_constant(variable.as_python_constant())


def _is_own(variable: Any, alone: bool) -> bool:
    """Whether no argument of another type has the same place in the cache.

    ``alone``: it is the only one. Then a number that is exactly an `int` is a key by itself, and
    any other one is in a sequence (functools.py, _make_key).
    """
    if not variable.is_python_constant():
        return False
    value = variable.as_python_constant()
    return type(value) in (str, bytes, type(None)) or (alone and type(value) is int)


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return plain_value(value) is not None and not isinstance(value, (type, types.ModuleType))
