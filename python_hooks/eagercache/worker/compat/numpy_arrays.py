"""Arrays of numpy that a module has, in traces: constants, which numpy itself computes with.

TorchDynamo makes tensors of arrays, and computes with these in its own copy of numpy, by its own
rules for dtypes. Here what is made of a module's arrays alone numpy makes, as eager does, and a
tensor that is made of one (`torch.from_numpy(self.table)`) is a constant of the graph. The values
are part of what the module is, and are compared before each call. Whatever else is done with such
an array is not traced.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch

from eagercache.worker.compat.tensor_constants import as_tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions that make something else of what they are given, and write into nothing.
_OPERATORS = _names(
    """
    add sub mul truediv floordiv mod pow matmul neg pos invert abs and_ or_ xor lshift rshift eq ne
    lt le gt ge getitem is_ is_not not_ contains
    """
)
_BUILTINS = (int, float, bool, complex, len, abs, round, sum, min, max, tuple, list)
_ITERATING = (iter, enumerate, zip, reversed)
_METHODS = _names(
    """
    all any argmax argmin argsort astype clip copy cumprod cumsum diagonal dot flatten item max mean
    min nonzero prod ravel repeat reshape round squeeze std sum swapaxes take tolist trace transpose
    var __len__ __getitem__
    """
)
_ATTRIBUTES = _names("T dtype itemsize nbytes ndim shape size")
_FUNCTIONS = _names(
    """
    all amax amin any argmax argmin argsort array array_equal asarray atleast_1d atleast_2d
    broadcast_to concatenate copy cumsum diag diff dot dstack expand_dims flip full_like hstack
    linspace max mean meshgrid min ndim ones_like outer prod ravel repeat reshape roll round shape
    size sort squeeze stack std sum swapaxes take tile transpose tril triu unique var vstack where
    zeros_like
    """
)
_WRITE = _names("__setitem__ fill itemset partition put resize setfield setflags sort byteswap")
# These make a tensor of an array.
_TO_TENSOR = (torch.from_numpy, torch.tensor, torch.as_tensor)


def notice(undo: contextlib.ExitStack, arrays: Collection[int]) -> None:
    """Until ``undo`` is closed, the arrays with these ids are constants in traces."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not arrays:
        return
    from torch._dynamo.variables import BuiltinVariable, NumpyVariable
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.tensor import NumpyNdarrayVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    made = _class()
    for owner, name, rule in (
        (VariableBuilder, "__call__", functools.partial(_building, made, arrays)),
        (BuiltinVariable, "call_function", functools.partial(_calling, made, _is_builtin)),
        (
            NumpyVariable,
            "call_function",
            functools.partial(_calling, made, functools.partial(_is_of_numpy, numpy)),
        ),
        (TorchInGraphFunctionVariable, "call_function", functools.partial(_converting, made)),
        (NumpyNdarrayVariable, "call_method", _writing),
        (NumpyNdarrayVariable, "mp_ass_subscript_impl", _writing),
    ):
        original = vars(owner).get(name)
        if original is not None:
            setattr(owner, name, rule(original))
            undo.callback(setattr, owner, name, original)


def _writing(original: Any) -> Any:
    """A method of an array that is traced: it may have the memory of one of the module's."""
    from torch._dynamo import exc

    @functools.wraps(original)
    def call_method(variable: Any, tx: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if name in _WRITE or not isinstance(name, str):  # a key, where newer torch has a slot
            raise exc.UserError(exc.UserErrorType.INVALID_INPUT, "it writes into an array of numpy")
        return original(variable, tx, name, *args, **kwargs)

    return call_method


class _NoConstant(Exception):
    """Something beside constants."""


@functools.cache
def _class() -> type[Any]:
    """What stands for such an array in a trace."""
    from torch._dynamo.variables.base import VariableTracker

    class ConstantArray(VariableTracker):
        """An array that nobody writes into, with all that it holds."""

        def __init__(self, value: Any, **options: Any) -> None:
            super().__init__(**options)
            self.value = value

        def python_type(self) -> type:
            return type(self.value)

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name not in _METHODS or "out" in kwargs:
                return super().call_method(tx, name, args, kwargs)
            return _computed(tx, getattr(self.value, name), args, kwargs)

        def var_getattr(self, tx: Any, name: str) -> Any:
            if name in _ATTRIBUTES:
                return _variable(tx, getattr(self.value, name))
            return super().var_getattr(tx, name)

        def tp_getattro_impl(self, tx: Any, name: str) -> Any:  # as newer torch calls it
            if name in _ATTRIBUTES:
                return _variable(tx, getattr(self.value, name))
            return super().tp_getattro_impl(tx, name)

        def call_obj_hasattr(self, tx: Any, name: str) -> Any:
            return _variable(tx, hasattr(self.value, name))

        def tp_iter_impl(self, tx: Any) -> Any:  # as newer torch calls it
            return _variable(tx, list(self.value)).tp_iter_impl(tx)

        def unpack_var_sequence(self, tx: Any) -> list[Any]:
            return [_variable(tx, part) for part in self.value]

    return ConstantArray


def _building(made: type[Any], arrays: Collection[int], original: Any) -> Any:
    """A value of the program comes into the trace."""

    @functools.wraps(original)
    def build(builder: Any, value: Any) -> Any:
        return (
            made(value, source=builder.source) if id(value) in arrays else original(builder, value)
        )

    return build


def _calling(made: type[Any], computes: Callable[[Any, int], bool], original: Any) -> Any:
    """A builtin or a function of numpy is called."""

    @functools.wraps(original)
    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = getattr(variable, "fn", None) or getattr(variable, "value", None)
        if not _has_array((*args, *kwargs.values()), made):
            return original(variable, tx, args, kwargs)
        if function in _ITERATING:
            args = [_unpacked(tx, part.realize(), made) for part in args]
        elif "out" not in kwargs and computes(function, len(args)):
            return _computed(tx, function, args, kwargs)
        return original(variable, tx, args, kwargs)

    return call_function


def _unpacked(tx: Any, variable: Any, made: type[Any]) -> Any:
    """A list of an array's rows or numbers, which is gone through as the array is."""
    return _variable(tx, list(variable.value)) if isinstance(variable, made) else variable


def _is_builtin(function: Any, _: int) -> bool:
    name = getattr(function, "__name__", "")
    if getattr(operator, name, None) is function:
        return name in _OPERATORS
    return function in _BUILTINS


def _is_of_numpy(numpy: Any, function: Any, count: int) -> bool:
    if isinstance(function, numpy.ufunc):
        return count <= function.nin  # what stands behind is written into
    name = getattr(function, "__name__", "")
    return name in _FUNCTIONS and getattr(numpy, name, None) is function


def _converting(made: type[Any], original: Any) -> Any:
    """A function of torch is called: one that makes a tensor of an array."""

    @functools.wraps(original)
    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        first = args[0].realize() if args else None
        if not isinstance(first, made) or variable.value not in _TO_TENSOR:
            return original(variable, tx, args, kwargs)
        value = first.value
        if len(args) > 1 or not value.flags.c_contiguous or not {"dtype", "device"} >= set(kwargs):
            return original(variable, tx, args, kwargs)
        tensor = as_tensor(tx, torch.from_numpy(value).cpu())
        return tensor.call_method(tx, "to", [], kwargs) if kwargs else tensor

    return call_function


def _has_array(variables: Any, made: type[Any]) -> bool:
    from torch._dynamo.variables import BaseListVariable

    for variable in variables:
        part = variable.realize()
        if isinstance(part, made):
            return True
        if isinstance(part, BaseListVariable) and _has_array(part.items, made):
            return True
    return False


def _computed(tx: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """What ``function`` makes of constants. Raises what leaves the trace where there are others."""
    from torch._dynamo import exc

    try:
        given = [_held(part) for part in args]
        named = {name: _held(part) for name, part in kwargs.items()}
        return _variable(tx, function(*given, **named))
    except Exception as error:
        name = getattr(function, "__name__", "a function")
        raise exc.UserError(
            exc.UserErrorType.INVALID_INPUT, f"{name} of an array of numpy: {error}"
        ) from error


def _held(variable: Any) -> Any:
    """The value that a variable stands for. Raises _NoConstant."""
    from torch._dynamo.variables import BaseListVariable, BuiltinVariable, NumpyVariable

    part = variable.realize()
    if isinstance(part, _class()):
        return part.value
    if isinstance(part, BaseListVariable) and part.python_type() in (list, tuple):
        return part.python_type()(map(_held, part.items))
    if isinstance(part, BaseListVariable) and part.python_type() is slice:
        return slice(*map(_held, part.items))
    if isinstance(part, BuiltinVariable) and part.fn in (int, float, bool, complex):
        return part.fn
    if isinstance(part, NumpyVariable) and isinstance(part.value, type):
        return part.value
    if part.is_python_constant():
        return part.as_python_constant()
    raise _NoConstant("beside what is not known while tracing")


def _variable(tx: Any, value: Any) -> Any:
    """A variable for what numpy made. Raises _NoConstant."""
    from torch._dynamo.variables import ConstantVariable, ListVariable, TupleVariable
    from torch._dynamo.variables.base import ValueMutationNew

    numpy = sys.modules["numpy"]
    if type(value) is numpy.ndarray:
        return _class()(value)
    if type(value) is tuple:
        return TupleVariable([_variable(tx, part) for part in value])
    if type(value) is list:
        parts = [_variable(tx, part) for part in value]
        return ListVariable(parts, mutation_type=ValueMutationNew())
    if type(value) in (bool, int, float, str, type(None)) or isinstance(
        value, (numpy.number, numpy.bool_)
    ):
        return ConstantVariable.create(value)
    if isinstance(value, numpy.dtype):
        from torch._dynamo.variables import misc

        kind = getattr(misc, "NumpyDTypeVariable", None)
        if kind is not None:
            return kind(value)
    raise _NoConstant(f"it makes a {type(value).__name__}")
