"""Operators that later processes leave alone, because native won every one of their calls.

A hook costs every call it passes on to native. So a process in which no kernel answered any call of
an operator notes that when it ends, in the store's file NATIVE, and the next ones do not hook it,
unless it is named in ``enable(ops=[...])``. A call that is not hooked is not seen: so one process
in `LOOK_AGAIN` hooks all of them, and takes off the list what has kernels by then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from eagercache.base import log, operators, private_file
from eagercache.base.load import core
from eagercache.runtime.session import Configuration, session

NAME = "NATIVE"
# Fewer calls in one process say little, and cost it little.
LEAST_CALLS = 1000
# Of an operator's calls, those without a verdict yet.
MOST_UNDECIDED = 0.05
LOOK_AGAIN = 16
_VERSION = 1
_MOST_ENVIRONMENTS = 16

Pair = tuple[operators.OperatorName, str]  # an operator and its dispatch key


def _looks_again() -> bool:
    return os.urandom(1)[0] < 256 // LOOK_AGAIN  # random's own state is the program's


class LeftNative:
    """What this process leaves alone. Guarded by `session.lock`."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self._looks_again: bool | None = None  # drawn once in a process
        self._watchers = 0

    def choose(self, pairs: Iterable[Pair], store: Any, chosen: Configuration) -> list[Pair]:
        """Those of ``pairs`` to hook; the others are kept in `pairs`."""
        pairs = list(pairs)
        self.pairs = []
        if self._looks_again is None:
            self._looks_again = _looks_again()
        if self._looks_again or self._watchers or chosen.choose != "faster":
            return pairs
        known = frozenset(_read(Path(store.root)).get(_scope(store, chosen), ()))
        hooked: list[Pair] = []
        for pair in pairs:
            (self.pairs if _text(pair) in known else hooked).append(pair)
        return hooked

    def watch(self) -> None:
        """Every call is to be seen until `unwatch`: hooks what was left alone."""
        with session.lock:
            self._watchers += 1
            pairs, self.pairs = self.pairs, []
            for name, key in pairs:
                assert core is not None
                core.register(*name, key)
                core.set_active(*name, key, True)

    def unwatch(self) -> None:
        """Ends one `watch`; the next `enable` may leave operators alone again."""
        with session.lock:
            self._watchers -= 1

    def holds(self, names: Iterable[operators.OperatorName]) -> bool:
        """Whether one of ``names`` is left alone."""
        left = {name for name, _ in self.pairs}
        return any(name in left for name in names)


left_native = LeftNative()


def note_calls() -> None:
    """Brings the store's list up to date with what this process saw; at its end. Never raises."""
    try:
        _note_calls()
    except Exception as error:
        log.LOGGER.warning("what native won could not be noted: %s", error)


def _note_calls() -> None:
    chosen, store = session.configuration, session.store
    if (
        core is None
        or store is None
        or chosen is None
        or store.read_only
        or chosen.choose != "faster"
        or chosen.on_miss == "native"  # keys that nobody ever looked at count as native there
        or core.frozen()
        or torch.are_deterministic_algorithms_enabled()
    ):
        return
    native, other = _seen()
    folder, scope = Path(store.root), _scope(store, chosen)
    known = _read(folder)
    before = known.pop(scope, [])
    after = sorted((set(before) | native) - other)
    if after == before:
        return
    known[scope] = after
    while len(known) > _MOST_ENVIRONMENTS:
        del known[next(iter(known))]
    private_file.write(folder, NAME, {"version": _VERSION, "native": known})
    log.event(logging.INFO, "left_native", operators=len(after), new=len(native - set(before)))


def _seen() -> tuple[set[str], set[str]]:
    """Operators that native answered throughout, and those of which kernels answered any call."""
    assert core is not None
    decisions: dict[str, set[str]] = {}
    for row in core.verdicts():
        pair = ((row["op"], row["overload"]), row["dispatch_key"])
        decisions.setdefault(_text(pair), set()).add(row["decision"])
    native, other = set(), set()
    for row in core.operator_stats():
        name = f"{row['op']}@{row['dispatch_key']}"
        decided = decisions.get(name, set())
        undecided = row["misses"] + row["pending"]
        passed_on = row["native"] + row["aside"]
        if row["hits"] or decided - {"native"}:
            other.add(name)
        elif (
            decided
            and passed_on >= LEAST_CALLS
            and undecided <= MOST_UNDECIDED * (undecided + passed_on)
        ):
            native.add(name)
    return native, other


def _text(pair: Pair) -> str:
    return f"{operators.full_name(pair[0])}@{pair[1]}"


def _scope(store: Any, chosen: Configuration) -> str:
    """Verdicts of another environment or policy say nothing here."""
    replicas = " replicas" if chosen.replicas else ""
    return f"{store.environment_id} {chosen.numerics}{replicas}"


def _read(folder: Path) -> dict[str, list[str]]:
    content = private_file.read(folder, NAME)
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return {}
    known = content.get("native")
    if not isinstance(known, dict):
        return {}
    return {
        scope: [name for name in names if isinstance(name, str)]
        for scope, names in known.items()
        if isinstance(names, list)
    }
