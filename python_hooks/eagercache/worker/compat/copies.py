"""Copies that a forward makes of an object with plain values, as of a configuration.

TorchDynamo refuses `copy.deepcopy` of an object, and what transformers does with the copy of a
configuration. Here the worker makes the copy itself while it traces. What it copies has a guard for
each of its values. The copy is of the trace alone: what is read of it is no value of the program,
but for what its class has.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Sequence
from typing import Any

# How the globals are called in which a trace finds its copies.
_PREFIX = "__eagercache_copy"
# By these names: the copies of the last trace, and the sources of what they are copies of.
_made: dict[str, tuple[Any, Any]] = {}


def is_copy(name: str) -> bool:
    """Whether a global's name, or a text that begins with that of its source, is a copy's."""
    return name.removeprefix("G['").startswith(_PREFIX)


def source_for(name: str, steps: Sequence[tuple[str, Any]]) -> Any:
    """The source of a value that is read of a copy: that of what was copied, for its class' part.

    ``steps``: to the value, the first one last. None for the copy's own values, each of which has
    been compared in what was copied.
    """
    made, source = _made[name]
    if not steps or steps[-1] == ("type", ""):
        return source
    step, key = steps[-1]
    in_class = any(key in vars(base) for base in type(made).__mro__)
    own = step == "attr" and (key == "__dict__" or (key in vars(made) and not in_class))
    return None if own else source


def teach_copies() -> None:
    """From now on Dynamo traces such copies; forgets those of another trace."""
    _made.clear()
    _teach()


@functools.cache
def _teach() -> None:
    """For the life of the process, as `teach_python_calls`.

    ``PreTrainedConfig.get_text_config`` of transformers gives one, too, for a model with an encoder
    and a decoder: it depends on nothing but the configuration.
    """
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable

    refused = BuiltinVariable.call_deepcopy

    @functools.wraps(refused)
    def call_deepcopy(self: Any, tx: Any, value: Any) -> Any:
        made = _copy_of(tx, value)
        return refused(self, tx, value) if made is None else made

    BuiltinVariable.call_deepcopy = call_deepcopy
    for kind in (UserFunctionVariable, UserMethodVariable):
        kind.call_function = _with_copies(kind.call_function)


def _with_copies(called: Any) -> Any:
    @functools.wraps(called)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        made = None
        if self.fn is copy.deepcopy and len(args) == 1:  # newer versions trace what it does
            made = _copy_of(tx, args[0])
        elif self.fn is _text_config():
            made = _text_config_of(tx, *self.self_args(), *args, **kwargs)
        return called(self, tx, args, kwargs) if made is None else made

    return call_function


def _text_config() -> Any:
    """The function, where transformers is there."""
    module = sys.modules.get("transformers.configuration_utils")
    kind = getattr(module, "PreTrainedConfig", getattr(module, "PretrainedConfig", None))
    return getattr(kind, "get_text_config", None)


def _text_config_of(tx: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """What it gives where that is a copy; None where it is what the configuration has."""
    if not all(one.is_python_constant() for one in (*args, *kwargs.values())):
        return None
    given = [one.as_python_constant() for one in args]
    named = {name: one.as_python_constant() for name, one in kwargs.items()}
    config = config.realize()
    value = getattr(config, "value", None)
    if getattr(config, "source", None) is None or not hasattr(value, "__dict__"):
        return None
    known = _text_config()(value, *given, **named)
    if known is value or any(known is held for held in vars(value).values()):
        return None
    own = _as_it_is(tx, config)
    return None if own is None else _copy_in(tx, _text_config()(own, *given, **named), config)


def _copy_of(tx: Any, variable: Any) -> Any:
    """What `copy.deepcopy` gives, where that is known, or None."""
    known = _as_it_is(tx, variable)
    return None if known is None else _copy_in(tx, known, variable)


def _as_it_is(tx: Any, variable: Any) -> Any:
    """A copy of an object, as the forward has changed it up to here; None of others.

    Of an object that copies itself, or that holds more than plain values, nothing is known.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    variable = variable.realize()
    if type(variable) is not UserDefinedObjectVariable or variable.source is None:
        return None
    value = variable.value
    if not _is_copied_by_its_dictionary(type(value)) or _holds_twice(vars(value)):
        return None
    effects = tx.output.side_effects
    changes = effects.store_attr_mutations.get(variable, {})
    try:
        held = VariableTracker.build(tx, vars(value), AttrSource(variable.source, "__dict__"))
        made = object.__new__(type(value))
        # Which has guards made of all that it holds.
        vars(made).update(copy.deepcopy(held.as_python_constant()))
        for name, changed in changes.items():
            vars(made)[name] = copy.deepcopy(changed.as_python_constant())
    except (NotImplementedError, Unsupported, AttributeError):
        return None
    return made


def _holds_twice(held: Any) -> bool:
    """Whether a container stands at two places, as it then does in a copy."""
    met: set[int] = set()
    left = [held]
    while left:
        one = left.pop()
        if isinstance(one, (dict, list, tuple, set)):
            if id(one) in met and not isinstance(one, tuple):
                return True
            met.add(id(one))
            left.extend(one.values() if isinstance(one, dict) else one)
    return False


def _is_copied_by_its_dictionary(kind: type) -> bool:
    if not any("__dict__" in vars(base) for base in kind.__mro__):
        return False
    return all(_COPIES.isdisjoint(vars(base)) for base in kind.__mro__ if base is not object)


# By these a class says itself what `copy.deepcopy` makes.
_COPIES = frozenset(
    f"__{name}__"
    for name in ("deepcopy", "getnewargs", "getnewargs_ex", "getstate", "new", "reduce")
) | {"__reduce_ex__", "__setstate__", "__slots__"}


def _copy_in(tx: Any, value: Any, original: Any) -> Any:
    """A variable of Dynamo's for a copy of another variable's object."""
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables.base import VariableTracker

    name = tx.output.install_global(_PREFIX, value)
    _made[name] = (value, original.source)
    return VariableTracker.build(tx, value, GlobalSource(name))
