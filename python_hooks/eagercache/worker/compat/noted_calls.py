"""Methods of Dynamo's that tell somebody of their calls for as long as a block lasts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def before(undo: ExitStack, owner: type, name: str, note: Callable[..., None]) -> None:
    """Has ``note`` called before a method, with the same arguments, until ``undo`` is closed."""
    original = vars(owner)[name]
    setattr(owner, name, _told_before(original, note))
    undo.callback(setattr, owner, name, original)


def before_item(
    undo: ExitStack, table: dict[str, Any], name: str, note: Callable[..., None]
) -> None:
    """As `before`, of a function in a table."""
    original = table[name]
    table[name] = _told_before(original, note)
    undo.callback(table.__setitem__, name, original)


def _told_before(original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    return noted


def before_class(undo: ExitStack, note: Callable[[Any], None]) -> None:
    """Has ``note`` called where `__class__` of a tensor is read, with the tensor's variable.

    From 2.15 on that of other variables, too.
    """
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    if "var_getattr" in vars(TensorVariable):

        def asked(variable: Any, _: Any, name: str) -> None:
            if name == "__class__":
                note(variable)

        before(undo, TensorVariable, "var_getattr", asked)
        return
    place: Any = VariableTracker.tp_getset["__class__"]
    original = place.getter
    place.getter = _told_before(original, lambda variable, *_: note(variable))
    undo.callback(setattr, place, "getter", original)


def after(undo: ExitStack, owner: type, name: str, note: Callable[..., None]) -> None:
    """Has ``note`` called after a method, with its result and the same arguments."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    setattr(owner, name, noted)
    undo.callback(setattr, owner, name, original)
