"""Where the values are kept that a module's forward reads beside its tensors and arguments.

`module_identity` and `code_values` write down what they are, once. By the rows made here
(nn_modules/places/values.h) the core sees before each call that they still are: what is inside of
attributes of modules, of their classes' values, of defaults and closures; global variables,
attributes of the program's objects, environment variables.

Not held, so that nothing lives longer because of us, and therefore not watched: objects and
containers that hold a module or a tensor somewhere inside, but for the watched module's own
tensors, which its guard holds anyway. Up to a size those are its own, too, that lists, tuples and
dicts among its attributes hold (callables/module_tensors.py): they live on until the next call.
Where a guard of a kernel is behind another one, or in a place that cannot be watched, `Unwatchable`
is raised, and the module's forward answers.
"""

from __future__ import annotations

import torch

from eagercache.callables.code_values import chains, environment_names, is_covered, own_members
from eagercache.callables.guard_rows import guards_in
from eagercache.callables.module_identity import SHARDING_MARKS, Identity, identify
from eagercache.callables.module_tensors import OWN_ATTRIBUTES
from eagercache.callables.used_functions import indexed
from eagercache.modules.guarded_places import GuardedRows
from eagercache.modules.watched_rows import Row, Rows, Unwatchable


def described(module: torch.nn.Module) -> tuple[list[Row], Identity]:
    """What is watched of ``module``, and what it is. Raises Unfit and Unwatchable."""
    arrays: set[int] = set()
    # First: what changes in between is noticed at the next call.
    values = attribute_values(module, arrays)
    identity = identify(module)
    if not arrays.issuperset(map(id, identity.arrays)):
        raise Unwatchable("arrays in places that cannot be watched")
    return values, identity


def attribute_values(module: torch.nn.Module, arrays: set[int] | None = None) -> list[Row]:
    """What is inside of the attributes and classes of ``module`` and of everything below it.

    Another value of an attribute or in a class is noticed otherwise (nn_modules/guard.h).
    ``arrays`` gets the ids of the arrays of numpy that are watched.
    """
    rows = Rows(module)
    kinds: dict[type, None] = {}
    for part in module.modules():
        kinds.update(dict.fromkeys(type(part).__mro__))
        rows.metaclasses(type(part))
        for name, value in list(vars(part).items()):
            if name not in OWN_ATTRIBUTES and name not in SHARDING_MARKS:
                rows.attribute(vars(part), name, value)
    for kind in kinds:
        if is_covered(kind.__module__):
            continue
        for _, value, functions in own_members(kind):
            for part in functions or [value]:
                rows.inside(part)
    if arrays is not None:
        arrays.update(rows.arrays)
    return rows.made


def function_values(functions: list[list[str]], module: torch.nn.Module) -> list[Row]:
    """What the functions of a kernel's entry (``UsedFunction.to_row``) read, and its guards.

    Raises Unwatchable.
    """
    rows = GuardedRows(module)
    for guard in guards_in(functions):
        rows.guard(guard, module)
    for (_, path, *_), index in indexed(functions, module):
        found = index.code(path) if index is not None else None
        if index is None or found is None:
            continue
        code, function = found
        for chain in chains(code):
            rows.chain(chain, index.namespace)
        rows.environment(environment_names(code, index.namespace))
        if function is not None:
            rows.inside(function)
    return rows.made
