"""Which attributes of a module are others than they were, by what it was described as."""

from __future__ import annotations

import hashlib
import json

from eagercache.callables.module_identity import Identity
from eagercache.calls.known_hooks import DESCRIBED_HOOKS

# A module that is switched between training and evaluation is two, which both have kernels.
_MODE = "training"
_MODES = [json.dumps([_MODE, [repr(mode)]], separators=(",", ":")) for mode in (True, False)]


def modeless(identity: Identity) -> str:
    """A digest of what a module is, whichever of its modules are training."""
    text = identity.text
    for row in _MODES:
        text = text.replace(row, "")
    return hashlib.sha256(text.encode()).hexdigest()


def changed_attributes(before: str, after: str) -> frozenset[tuple[str, str]]:
    """(path of a module, attribute) of those that differ between two texts of `Identity`.

    Nothing where something else differs, too: a tensor, a class, a hook.
    """
    old, new = json.loads(before), json.loads(after)
    rows = (old.pop("modules"), new.pop("modules"))
    if old != new or len(rows[0]) != len(rows[1]):
        return frozenset()
    found: set[tuple[str, str]] = set()
    for one, other in zip(*rows, strict=True):
        if one == other:
            continue
        if one[1] == "same" or [*one[:2], *one[3:]] != [*other[:2], *other[3:]]:
            return frozenset()
        values = (dict(map(tuple, one[2])), dict(map(tuple, other[2])))
        names = {
            name for name in values[0].keys() | values[1].keys()
            if values[0].get(name) != values[1].get(name)
        }  # fmt: skip
        if names & {_MODE, *DESCRIBED_HOOKS}:
            return frozenset()
        found.update((one[0], name) for name in names)
    return frozenset(found)
