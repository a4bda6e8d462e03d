"""Where the values are kept that a module's forward reads beside its tensors and arguments.

`module_identity` and `code_values` write down what they are, once. By the rows made here
(nn_modules/places/values.h) the core sees before each call that they still are: what is inside of
attributes of modules, of their classes' values, of defaults and closures; global variables,
attributes of the program's objects, environment variables.

Not held, so that nothing lives longer because of us, and therefore not watched: objects and
containers that hold a module or a tensor somewhere inside, but for the watched module's own
tensors and the modules below it, which its guard holds anyway. Up to a size those are its own,
too, that lists, tuples and dicts among its attributes hold (callables/module_tensors.py): they
live on until the next call. Where a guard of a kernel is behind another one, or in a place that
cannot be watched, `Unwatchable` is raised, and the module's forward answers. So it is where what
leads to a module below cannot be watched: which one that is stands in the identity alone.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from eagercache.callables.code_values import chains, environment_names, is_covered, own_members
from eagercache.callables.guard_rows import guards_in
from eagercache.callables.module_identity import SHARDING_MARKS, Identity, identify
from eagercache.callables.module_tensors import OWN_ATTRIBUTES
from eagercache.callables.used_functions import indexed
from eagercache.modules.guarded_places import GuardedRows
from eagercache.modules.watched_rows import Row, Rows, Unwatchable

# The first one finds what is opaque; a further one that the program changed it meanwhile.
_MAX_TURNS = 4


@dataclass(frozen=True)
class Described:
    """What `described` finds.

    Attributes:
        identity: what the module is.
        values: what is watched beside its attributes: what is inside of them, for one.
        attributes: by the path of each module below it, where they may be held.
    """

    identity: Identity
    values: list[Row]
    attributes: dict[str, list[Row]]


def described(module: torch.nn.Module) -> Described:
    """What is watched of ``module``, and what it is. Raises Unfit and Unwatchable."""
    opaque: frozenset[tuple[str, str]] = frozenset()
    for _ in range(_MAX_TURNS):
        rows = Rows(module)
        why_not = None
        # First: what changes in between is noticed at the next call.
        try:
            attributes = _attribute_rows(rows, module, opaque)
        except Unwatchable as error:  # perhaps of what need not be watched
            why_not = error
        identity = identify(module, allow_opaque=True)
        found = frozenset((one.path, one.name) for one in identity.opaque)
        if found != opaque:
            opaque = found
            continue
        if why_not is not None:
            raise why_not
        if not rows.arrays.issuperset(map(id, identity.arrays)):
            raise Unwatchable("arrays in places that cannot be watched")
        if not all(map(rows.compares, identity.holders)):
            raise Unwatchable("submodules in places that cannot be watched")
        return Described(identity, rows.made, attributes)
    raise RuntimeError("its attributes changed while they were read")


def attribute_values(module: torch.nn.Module) -> list[Row]:
    """What is inside of the attributes and classes of ``module`` and of everything below it."""
    rows = Rows(module)
    _attribute_rows(rows, module, frozenset())
    return rows.made


def _attribute_rows(
    rows: Rows, module: torch.nn.Module, opaque: Set[tuple[str, str]]
) -> dict[str, list[Row]]:
    """Adds what is inside of the attributes and classes; by path, what the attributes are.

    Another value in a class is noticed otherwise (nn_modules/guard.h). ``opaque``: (path of a
    module, attribute) of what no forward reads.
    """
    attributes: dict[str, list[Row]] = {}
    kinds: dict[type, None] = {}
    for path, part in module.named_modules():
        kinds.update(dict.fromkeys(type(part).__mro__))
        rows.metaclasses(type(part))
        rows.empty_places(part)
        row = rows.attributes_row(part, {name for at, name in opaque if at == path})
        if row is not None:
            attributes[path] = [row]
        for name, value in list(vars(part).items()):
            if (path, name) in opaque:
                continue
            if name not in OWN_ATTRIBUTES and name not in SHARDING_MARKS:
                rows.attribute(vars(part), name, value)
    for kind in kinds:
        if is_covered(kind.__module__):
            continue
        for _, value, functions in own_members(kind):
            for part in functions or [value]:
                rows.inside(part)
    return attributes


def function_values(
    functions: list[list[str]], module: torch.nn.Module
) -> tuple[list[Row], list[Row]]:
    """What the functions of a kernel's entry (``UsedFunction.to_row``) read, and its guards.

    Also the attributes of modules by which guards go on to that. Raises Unwatchable.
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
    return rows.made, rows.ways
