"""Looks at modules that are new, or are not what they were."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Set

import torch

from eagercache.base.load import core
from eagercache.callables.module_identity import Identity, Unfit, Unsettled
from eagercache.calls.opaque import leave_out
from eagercache.modules import look_budget
from eagercache.modules.changing import changed_attributes, modeless
from eagercache.modules.known import KnownModules, ModuleInfo
from eagercache.modules.shapes import SizeBook
from eagercache.modules.watch import described
from eagercache.modules.watched_rows import Unwatchable
from eagercache.runtime.session import session

log = logging.getLogger("eagercache")

# A module whose attributes keep changing is looked at this often before it is left alone.
MAX_LOOKS = 16
# At one that is changed before or in its calls, and has no kernel: a look may take milliseconds.
MAX_LOOKS_WITHOUT_HITS = 256
# So often what a look finds may be another thing at the next call, or change during the look; then
# it is looked at in its calls.
MAX_LOOKS_BESIDE = 2
# Where each call waits for a kernel, each such look may make one that no later call has.
MAX_WAITS_WITHOUT_HITS = 4
# Of a record of the core: none ever has it.
_NO_VERSION = (1 << 64) - 1


class ModuleLooks:
    """Looks at modules, and gives up those that never are twice the same."""

    def __init__(self, known: KnownModules, sizes: SizeBook, asked: Callable[[], Set[int]]) -> None:
        """``asked``: the ids of the modules for which a kernel is being made."""
        self._known = known
        self._sizes = sizes
        self._asked = asked
        self._budget = look_budget.LookBudget()

    def has_to_wait(self, module: torch.nn.Module) -> bool:
        """Whether looks have taken too much of the program's time; its forward answers meanwhile.

        Its next call asks again. Not where the program waits for kernels.
        """
        info = self._known.find(module)
        if info is None or _waits() or self._budget.allows():
            return False
        look_later(module)
        return True

    def has_to_be_in_the_call(self, module: torch.nn.Module) -> bool:
        """Whether it changes between its calls: what it is in one is seen there alone."""
        assert core is not None
        info = self._known.find(module)
        if info is None or core.module_version(module) is None:
            return False
        in_vain, _ = core.module_looks_in_vain(module)
        info.in_calls = info.in_calls or in_vain >= MAX_LOOKS_BESIDE
        return info.in_calls or info.disturbed >= MAX_LOOKS_BESIDE

    def look(self, reference: weakref.ref[torch.nn.Module]) -> None:
        """Describes a module, and has the core watch it for as long as it is that."""
        assert core is not None
        module = reference()
        info = self._known.find(module) if module is not None else None
        if module is None or info is None:
            return
        version = core.module_version(module)
        if version is None:
            return
        began = time.monotonic()
        try:
            self._look(module, info, version)
        finally:
            self._spend(module, info, time.monotonic() - began)

    def _spend(self, module: torch.nn.Module, info: ModuleInfo, seconds: float) -> None:
        if info.free_looks >= look_budget.FREE_LOOKS:
            self._budget.spend(seconds)
            return
        info.free_looks += 1
        weakref.finalize(module, self._budget.spend, seconds).atexit = False

    def _look(self, module: torch.nn.Module, info: ModuleInfo, version: int) -> None:
        try:
            same = self._describe(module, info, version)
        except Unsettled as error:
            info.looks += 1
            if self._are_too_many(info):
                self._known.refuse(module, info, str(error))
                return
            same = look_later(module)
        except Unwatchable as error:
            self._known.refuse(module, info, f"it holds {error}")
            return
        except (Unfit, ValueError) as error:
            self._known.refuse(module, info, str(error))
            return
        except RuntimeError as error:
            # Changed while it was read, by the program's own threads.
            log.debug("%s: looking again: %s", info.name, error)
            same = look_later(module)
        if same:
            info.disturbed = 0
            self._count(module, info)
        elif same is False:
            log.debug("%s changed while it was looked at", info.name)
            info.disturbed += 1

    def _describe(self, module: torch.nn.Module, info: ModuleInfo, version: int) -> bool | None:
        """Whether the core watches it as it is; None where it does not, and that is no accident."""
        assert core is not None
        found = described(module)
        if core.module_version(module) != version:
            return look_later(module)  # partly what it was: no look at what it is
        info.identity = found.identity.digest
        # One that was seen before, as of a mode that is switched on and off, finds its kernels.
        if info.identity not in info.seen:
            info.looks += 1
            self._compare(info, found.identity)
        info.seen.add(info.identity)
        if self._are_too_many(info):
            if self._leave_out(module, info):
                look_later(module)
            else:
                self._known.refuse(module, info, "its attributes change from call to call")
            return None
        anew = core.module_values_changed(module, info.identity)
        if anew:
            if not self._known.forget_kernels(module, info):
                return None
            self._sizes.clear()
        before, info.modeless = info.modeless, modeless(found.identity)
        return bool(
            core.module_set_guard(
                module,
                found.identity.guard_entries(found.attributes),
                found.identity.digest,
                version,
                found.values,
                anew,
                info.modeless == before,
                not found.identity.leads_back,
            )
        )

    def _count(self, module: torch.nn.Module, info: ModuleInfo) -> None:
        """Gives up a module that is looked at again and again."""
        assert core is not None
        uncounted, without_hits = core.module_looks_in_vain(module)
        if uncounted > MAX_LOOKS:
            self._known.refuse(module, info, "each of its calls assigns to it")
            return
        # Those do not count that came before a kernel which was waited for.
        waits = id(module) in self._asked()
        info.looks_waiting = without_hits if waits else min(info.looks_waiting, without_hits)
        if without_hits - info.looks_waiting > MAX_LOOKS_WITHOUT_HITS:
            if self._leave_out(module, info):
                look_later(module)
                return
            self._known.refuse(module, info, "it changes again and again, and has no kernel")
        elif without_hits >= MAX_WAITS_WITHOUT_HITS and _waits() and self._leave_out(module, info):
            look_later(module)

    @staticmethod
    def _are_too_many(info: ModuleInfo) -> bool:
        return info.looks > MAX_LOOKS * (1 + sum(info.kernels.values()))

    @staticmethod
    def _compare(info: ModuleInfo, identity: Identity) -> None:
        """Notes in which attributes a module is another one than it was at the look before."""
        if info.text:
            info.changing |= changed_attributes(info.text, identity.text)
        info.text = identity.text if info.looks >= MAX_WAITS_WITHOUT_HITS // 2 else ""

    @staticmethod
    def _leave_out(module: torch.nn.Module, info: ModuleInfo) -> bool:
        """Has it be described without what changes, which its forward may not read."""
        if not leave_out(module, info.changing):
            return False
        info.looks, info.looks_waiting, info.text = 0, 0, ""
        info.changing = frozenset()
        info.kernels = dict.fromkeys(info.kernels, 0)  # of what it never is again
        return True


def _waits() -> bool:
    configuration = session.configuration
    return configuration is not None and configuration.on_miss == "wait"


def look_later(module: torch.nn.Module) -> bool:
    """Has the core ask for a look again, at the next call. False."""
    assert core is not None
    return bool(core.module_set_guard(module, [], "", _NO_VERSION, [], False))
