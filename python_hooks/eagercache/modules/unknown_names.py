"""Names of classes that a program chose and that none of its modules has: one warning at its end.

A name chooses modules when they are called, since their class may be made or imported at any time.
So nothing is imported to look for it, and whether it was misspelt is known when the program ends.
"""

from __future__ import annotations

import atexit
import difflib
import multiprocessing
from collections.abc import Iterator

import torch

from eagercache.base.load import core
from eagercache.base.warn import warn_once
from eagercache.modules.selection import Selection, chosen_names, full_name, names_of

_MOST_NEAR = 3


class UnknownNames:
    """What was chosen by name in this process, and which classes were called. Holds the GIL."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._called: dict[str, None] = {}  # full names in the order in which they were met
        self._listens = False

    def choose(self, selection: Selection) -> None:
        """The program chose modules."""
        self._open.update(chosen_names(selection))
        if self._open and not self._listens:
            self._listens = True
            atexit.register(self.warn)

    def meet(self, kind: type, *, can_be_chosen: bool) -> None:
        """A module of this class is called for the first time."""
        if not self._listens:
            return
        self._open.difference_update(names_of(kind))
        if can_be_chosen:
            self._called.setdefault(full_name(kind))

    def warn(self) -> None:
        """At exit: names the classes that there are not, once modules that have others ran.

        A process that called none says nothing: it may have started the one that does.
        """
        if core is None or core.forked() or multiprocessing.parent_process() is not None:
            return
        if not (self._open and self._called):
            return
        defined = list(_subclasses(torch.nn.Module))
        self._open.difference_update(name for kind in defined for name in names_of(kind))
        names = map(full_name, defined)
        others = [name for name in names if not name.startswith("torch.")]
        for name in sorted(self._open):
            warn_once(
                f"modules:{name}",
                f"modules={name!r} chose nothing: no class of a module is defined under that name. "
                + self._remedy(name, others),
            )
        self._open.clear()

    def _remedy(self, name: str, others: list[str]) -> str:
        called = list(self._called)
        near = nearest(name, called) or nearest(name, others)
        if near:
            return f"Did you mean {', '.join(near)}?"
        return f"Classes whose modules the program called: {', '.join(called[:_MOST_NEAR])}."


def nearest(name: str, known: list[str]) -> list[str]:
    """Those of the full names that are most like a name: first those of a class called so."""
    last = _last(name)
    by_last: dict[str, list[str]] = {}
    for one in known:
        by_last.setdefault(_last(one), []).append(one)
    if last in by_last:
        return by_last[last][:_MOST_NEAR]
    near = [one for short in difflib.get_close_matches(last, by_last) for one in by_last[short]]
    return (near or difflib.get_close_matches(name, known))[:_MOST_NEAR]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _subclasses(kind: type) -> Iterator[type]:
    """All classes of this process that are made of ``kind``, with itself."""
    seen = {id(kind)}  # a metaclass may have a hash and an equality of its own
    left = [kind]
    while left:
        current = left.pop()
        yield current
        below: list[type] = type.__subclasses__(current)
        new = [one for one in below if id(one) not in seen]
        seen.update(map(id, new))
        left += new


unknown_names = UnknownNames()
