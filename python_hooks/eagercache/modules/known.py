"""What this process knows of its modules: which are watched, and why one is left to its forward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Set
from dataclasses import dataclass, field

import torch

from eagercache.base.load import core
from eagercache.modules.selection import class_name
from eagercache.modules.stats import ModuleStats
from eagercache.modules.watch import function_values
from eagercache.modules.watched_rows import Row

log = logging.getLogger("eagercache")

# Values that the kernels of a module stand on may change so often before it is left alone.
MAX_CHANGES = 16


@dataclass
class ModuleInfo:
    """What this side knows of one module. No reference to it or its tensors."""

    name: str
    identity: str = ""
    free_looks: int = 0  # that took nothing of what looks may take
    looks: int = 0  # at what had not been seen before
    looks_waiting: int = 0  # since the last hit, while a kernel was being made
    disturbed: int = 0  # looks in a row during which it changed
    in_calls: bool = False  # between them it is another one
    modeless: str = ""  # what it was at the last look, but for whether its modules are training
    text: str = ""  # what it was at the last look, where it changes often
    changing: frozenset[tuple[str, str]] = frozenset()  # in which attributes, by (path, name)
    settled: bool = False  # it was looked at again because its first call had changed it
    seen: set[str] = field(default_factory=set)  # identities
    changes: int = 0  # of values that its kernels' functions read
    # Those functions, and guards, by the identity of what they were watched for.
    watched: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    compared: set[Hashable] = field(default_factory=set)  # rows that the core has
    kernels: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    reasons: dict[bool, str] = field(default_factory=lambda: {False: "", True: ""})


class KnownModules:
    """The modules that are or were watched. Holds none of them alive."""

    def __init__(self) -> None:
        self._infos: weakref.WeakKeyDictionary[torch.nn.Module, ModuleInfo] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, module: torch.nn.Module) -> None:
        """Knows nothing of it yet."""
        self._infos[module] = ModuleInfo(class_name(module))

    def find(self, module: torch.nn.Module) -> ModuleInfo | None:
        """What is known of it; None where it is not watched."""
        return self._infos.get(module)

    def clear(self) -> None:
        """Forgets all of them."""
        self._infos.clear()

    def has_kernel(self, module: torch.nn.Module, gradients: bool) -> bool:
        """Whether it has a kernel for calls without ``gradients``, or with them."""
        info = self._infos.get(module)
        return info is not None and info.kernels[gradients] > 0

    def refuse(self, module: torch.nn.Module, info: ModuleInfo, reason: str) -> None:
        """Leaves all of its calls to its forward."""
        assert core is not None
        info.reasons = dict.fromkeys(info.reasons, reason)
        core.module_refuse(module)
        log.info("event=module name=%s decision=refused reason=%r", info.name, reason)

    def lose(self, module: torch.nn.Module, info: ModuleInfo, reason: str) -> None:
        """A kernel for calls without gradients goes; where it was the last one, parts are tried."""
        assert core is not None
        info.kernels[False] = max(0, info.kernels[False] - 1)
        info.reasons[False] = reason
        if info.kernels[False] == 0:
            core.module_leave(module, False, True)
        log.info("event=module name=%s decision=lost reason=%r", info.name, reason)

    def forget_kernels(self, module: torch.nn.Module, info: ModuleInfo) -> bool:
        """Its kernels were traced with other values; False when the module is refused for it."""
        info.changes += 1
        if info.changes > MAX_CHANGES:
            self.refuse(module, info, "values that its forward reads change from call to call")
            return False
        info.watched.clear()
        info.compared.clear()
        info.kernels = dict.fromkeys(info.kernels, 0)
        info.reasons = dict.fromkeys(info.reasons, "")
        return True

    def watch(self, module: torch.nn.Module, functions: list[list[str]], identity: str) -> None:
        """Has the core watch what the functions read that a kernel of the module was traced from.

        What they lead to may be other objects where the module has another ``identity``.

        To be called before it is compared with what the kernel holds. Raises Unwatchable.
        """
        assert core is not None
        info = self._infos.get(module)
        if info is None or core.module_version(module) is None:
            return
        known = info.watched.setdefault(identity, set())
        new = [row for row in functions if tuple(row) not in known]
        values, ways = function_values(new, module)
        values = [row for row in values if _name(row) not in info.compared]
        core.module_watch_values(module, values, identity, ways)
        info.compared.update(map(_name, values))
        known.update(map(tuple, new))

    def stats(self, asked: Set[int] = frozenset()) -> list[tuple[torch.nn.Module, ModuleStats]]:
        """The modules that are or were watched, with what became of their calls.

        ``asked``: the ids of those for which a kernel is being made.
        """
        assert core is not None
        rows = []
        for row in core.module_stats():
            info = self._infos.get(row["module"])
            if info is None:
                continue
            rows.append(
                (
                    row["module"],
                    ModuleStats(
                        name=info.name,
                        hits=row["hits"],
                        pending=row["pending"],
                        native=row["native"],
                        aside_reasons=dict(row["aside_reasons"]),
                        state=row["state"],
                        reason=_reason(info, row["state"], gradients=False),
                        training_hits=row["training_hits"],
                        training_reason=_reason(info, row["state"], gradients=True),
                        identity=core.module_identity(row["module"]) or info.identity,
                        replayed=row["replayed"],
                        replay=row["replay"],
                        being_made=id(row["module"]) in asked,
                    ),
                )
            )
        return rows


def _name(row: Row) -> Hashable:
    """By identities, which stay what they are while the core holds the row."""
    sort, place, keys, expected = row
    return sort, id(place), *map(id, keys), *((id(value), by_type) for value, by_type in expected)


def _reason(info: ModuleInfo, state: str, *, gradients: bool) -> str:
    """Why a module has no kernel, or none any more: one that is refused may have had some."""
    has_kernel = info.kernels[gradients] > 0 and state != "refused"
    return "" if has_kernel else info.reasons[gradients]
