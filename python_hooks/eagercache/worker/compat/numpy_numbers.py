"""Numbers of numpy that a forward computes with, in traces.

Beside a tensor eager takes such a number for Python's of its value. Elsewhere numpy computes with
it, in its own precision. TorchDynamo makes a tensor of it, or forgets its type. Here it is a
constant that keeps its type: what is computed of constants alone Python and numpy compute, as
eager does. Where neither holds, no kernel can stand on the trace.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from eagercache.worker.compat.noted_calls import after, before

# A complex64 and a bool of numpy are not Python's beside a tensor.
_NAMES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("float16", "float32", "float64"),
)
# These make a tensor of numpy's dtype, not of Python's.
_BY_DTYPE = frozenset(("tensor", "as_tensor", "asarray", "new_tensor", "from_numpy"))


def notice(undo: contextlib.ExitStack, reasons: list[str]) -> None:
    """Until ``undo`` is closed, such numbers are constants in traces."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    from torch._dynamo.utils import common_constant_types
    from torch._dynamo.variables import constant

    numbers = frozenset(getattr(numpy, name) for name in _NAMES)
    kinds = {*numbers, numpy.bool_} - common_constant_types
    common_constant_types.update(kinds)
    undo.callback(common_constant_types.difference_update, kinds)
    # Eager warns of such things at each call, and a kernel would not.
    undo.enter_context(numpy.errstate(all="raise"))
    rules = _Rules(numpy, numbers, reasons)
    after(undo, constant.ConstantVariable, "__init__", rules.keep)
    for name in ("as_proxy", "call_method"):
        original = vars(constant.ConstantVariable)[name]
        setattr(constant.ConstantVariable, name, getattr(rules, name)(original))
        undo.callback(setattr, constant.ConstantVariable, name, original)
    rules.watch(undo)


class _Rules:
    """What becomes of numbers of numpy. ``reasons``: why no kernel can stand on a trace."""

    def __init__(self, numpy: Any, numbers: frozenset[type], reasons: list[str]) -> None:
        self._numpy = numpy
        self._numbers = numbers
        self._kinds = {*numbers, numpy.bool_}
        self._reasons = reasons

    def keep(self, _: None, variable: Any, value: Any, **__: Any) -> None:
        """A constant is made: it keeps its type, which Dynamo drops."""
        if type(value) in self._kinds:
            variable.value = value

    def as_proxy(self, original: Any) -> Any:
        """A constant becomes an argument of the graph."""

        @functools.wraps(original)
        def as_proxy(variable: Any) -> Any:
            value = original(variable)
            if type(value) is self._numpy.bool_:
                self._refuse("computes with a bool of numpy")
            return value.item() if type(value) in self._kinds else value

        return as_proxy

    def call_method(self, original: Any) -> Any:
        """A method of a constant is called."""

        @functools.wraps(original)
        def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if type(variable.value) in self._kinds and name == "item" and not (args or kwargs):
                return type(variable)(variable.value.item())
            return original(variable, tx, name, args, kwargs)

        return call_method

    def watch(self, undo: contextlib.ExitStack) -> None:
        """What is computed with such numbers, until ``undo`` is closed."""
        from torch._dynamo.variables import BuiltinVariable, TensorVariable, misc
        from torch._dynamo.variables.tensor import NumpyNdarrayVariable
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        before(undo, TorchInGraphFunctionVariable, "call_function", self._torch)
        before(undo, TensorVariable, "call_method", self._method)
        before(undo, BuiltinVariable, "call_function", self._builtin)
        before(undo, NumpyNdarrayVariable, "call_method", self._beside)
        original = misc.NumpyVariable.call_function

        @functools.wraps(original)
        def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            made = self._computed(variable.value, args, kwargs)
            if made is not None:
                return made
            self._numpys(args, kwargs)
            return original(variable, tx, args, kwargs)

        misc.NumpyVariable.call_function = call_function
        undo.callback(setattr, misc.NumpyVariable, "call_function", original)

    def _computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What a function of numpy makes of numbers alone; None where it is given something else.

        It is a number of numpy then, which Dynamo would make a tensor of.
        """
        from torch._dynamo.variables import ConstantVariable

        if not isinstance(function, self._numpy.ufunc) or kwargs:
            return None
        parts = [part.realize() for part in args]
        if not parts or not all(isinstance(part, ConstantVariable) for part in parts):
            return None
        values = [part.value for part in parts]
        if not all(type(value) in (*self._kinds, int, float) for value in values):
            return None
        result = function(*values)
        return ConstantVariable.create(result) if type(result) in self._kinds else None

    def _torch(self, variable: Any, _: Any, args: Any, kwargs: Any) -> None:
        name = getattr(variable.value, "__name__", "")
        if name in _BY_DTYPE and self._has_number((*args, *kwargs.values())):
            self._refuse(f"gives {name} a number of numpy")

    def _method(self, _: Any, __: Any, name: str, args: Any, kwargs: Any) -> None:
        if name in _BY_DTYPE and self._has_number((*args, *kwargs.values())):
            self._refuse(f"gives {name} a number of numpy")

    def _numpys(self, args: Any, kwargs: Any) -> None:
        if self._has_number((*args, *kwargs.values())):
            self._refuse("computes in numpy with one of its numbers")

    def _beside(self, _: Any, __: Any, ___: str, args: Any, kwargs: Any) -> None:
        self._numpys(args, kwargs)

    def _builtin(self, _: Any, __: Any, args: Any, ___: Any) -> None:
        """An operator: beside arrays of numpy and open sizes the dtype of a number counts."""
        from torch._dynamo.variables import SymNodeVariable
        from torch._dynamo.variables.tensor import NumpyNdarrayVariable

        parts = [part.realize() for part in args]
        if any(isinstance(part, (SymNodeVariable, NumpyNdarrayVariable)) for part in parts):
            self._numpys(parts, {})

    def _has_number(self, variables: Iterable[Any]) -> bool:
        return any(type(value) in self._kinds for value in _values(variables))

    def _refuse(self, what: str) -> None:
        self._reasons.append(f"the forward {what}, whose dtype a trace does not keep")


def _values(variables: Iterable[Any]) -> Iterator[Any]:
    """The constants among variables of Dynamo's, and in lists and tuples of them."""
    from torch._dynamo.variables import BaseListVariable, ConstantVariable

    for variable in variables:
        part = variable.realize()
        if isinstance(part, ConstantVariable):
            yield part.value
        elif isinstance(part, BaseListVariable):
            yield from _values(part.items)
