"""Whole modules answered by one kernel each: `enable(modules=...)` and `accelerate`.

The core (nn_modules/call/call.h) asks three things of this file, on the thread of the user's call:
whether to watch a module that it meets, to look at one that is new or has changed, and what becomes
of a form of call that has no verdict. The answers are made on a thread of ours: the module is
described, the store is asked, and a compile worker gets a copy of the module when the store has
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from typing import Any

import torch

from eagercache.base.load import core
from eagercache.base.warn import warn_once
from eagercache.callables.call_hooks import install_hooks
from eagercache.callables.module_gradient import eager_gradients
from eagercache.callables.standins import sketched
from eagercache.callables.surroundings import autocast_here
from eagercache.calls.global_state import GlobalState
from eagercache.modules import replay
from eagercache.modules.forms import Form, Missed
from eagercache.modules.known import KnownModules
from eagercache.modules.looks import ModuleLooks
from eagercache.modules.names import ModuleNames, hooks_of
from eagercache.modules.requests import ModuleRequests
from eagercache.modules.selection import (
    Selection,
    check_selection,
    class_name,
    is_library_leaf,
    is_selected,
)
from eagercache.modules.shapes import SizeBook
from eagercache.modules.stats import ModuleStats
from eagercache.modules.thread import ModuleThread
from eagercache.modules.unknown_names import unknown_names
from eagercache.modules.verdicts import LOST, keep_lost
from eagercache.runtime import differences
from eagercache.runtime.reimplemented import is_reimplemented, watch_libraries
from eagercache.runtime.session import session

log = logging.getLogger("eagercache")

# A form of call is compiled at its second call: the first of a process is often one of its kind.
COMPILE_AT = 2


class ModuleManager:
    """All of this process's accelerated modules. One object; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._selection: Selection = None
        self._accelerated: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._known = KnownModules()
        self._sizes = SizeBook()
        self._thread = ModuleThread()
        self._looks = ModuleLooks(self._known, self._sizes, lambda: self._requests.asked())
        self._requests = ModuleRequests(self._known, self._sizes, self._thread, self._looks.look)

    # ---- what to watch ---------------------------------------------------------------------------

    @property
    def selection(self) -> Selection:
        """What `select` was last given."""
        return self._selection

    def select(self, selection: Selection) -> None:
        """Chooses the modules to watch; None for none but those given to `accelerate`.

        Raises ValueError for something that is no selection. What was known is forgotten: the store
        is asked again.
        """
        check_selection(selection)
        assert core is not None
        with self._lock:
            self._selection = selection
            unknown_names.choose(selection)
            self._known.clear()
            self._sizes.clear()
            if selection is not None or len(self._accelerated) > 0:
                self._install_handlers()
            core.modules_forget_all()
            self._activate()

    def add(self, model: torch.nn.Module) -> None:
        """Watches ``model``, or where that cannot be its largest parts that can."""
        assert core is not None
        with self._lock:
            self._accelerated.update(model.modules())
            self._install_handlers()
            for part in model.modules():
                core.module_forget(part)
            self._activate()

    def _activate(self) -> None:
        """Has modules answered by kernels, unless the program implements operators anew."""
        assert core is not None
        with self._lock:
            chosen = self._selection is not None or len(self._accelerated) > 0
            core.set_modules_active(chosen and not is_reimplemented())

    def _install_handlers(self) -> None:
        assert core is not None
        install_hooks(core)
        watch_libraries(self._activate)
        core.set_module_handlers(
            self._select,
            self._look,
            self._missed,
            self._unfit,
            self._is_wrong,
            self._lost,
            ModuleNames(self._met).name_of,
        )
        core.set_eager_gradients(eager_gradients)
        replay.set_limit(session.graph_bytes)

    @staticmethod
    def _met() -> list[torch.nn.Module]:
        assert core is not None
        return [row["module"] for row in core.module_stats()]

    def _select(self, module: torch.nn.Module) -> str:
        unknown_names.meet(type(module), can_be_chosen=not is_library_leaf(module))
        if isinstance(module, torch.jit.ScriptModule) or is_library_leaf(module):
            return "refuse"
        if type(module).__name__ == "OptimizedModule":
            self._leave_compiled(module)
            return "refuse"
        chosen = module in self._accelerated or is_selected(self._selection, module)
        if chosen:
            self._known.add(module)
        return "watch" if chosen else "refuse"

    def _leave_compiled(self, module: torch.nn.Module) -> None:
        """Refuses what is below torch.compile's own module: it is compiled already."""
        assert core is not None
        for part in module.modules():
            if part is module:
                continue
            core.module_adopt(part)
            if self._known.find(part) is None and not is_library_leaf(part):
                self._known.add(part)
            info = self._known.find(part)
            if info is None:
                core.module_refuse(part)
            else:
                self._known.refuse(part, info, "torch.compile was given it")

    # ---- the core's questions --------------------------------------------------------------------

    def _look(self, module: torch.nn.Module) -> None:
        reference = weakref.ref(module)
        configuration = session.configuration
        if self._looks.has_to_wait(module):
            return
        beside = configuration is None or configuration.on_miss == "background"
        if beside and not self._looks.has_to_be_in_the_call(module):
            self._thread.post(lambda: self._looks.look(reference))
        else:
            self._looks.look(reference)

    def _missed(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: bytes,
        calls: int,
        gradients: bool,
    ) -> None:
        info = self._known.find(module)
        configuration = session.configuration
        if info is None or configuration is None:
            return
        waits = configuration.on_miss == "wait"
        assert core is not None
        identity = core.module_identity(module) or info.identity
        missed = Missed(Form(weakref.ref(module), identity, key, calls, gradients))
        if configuration.on_miss != "native":
            missed.compile = waits or calls >= COMPILE_AT
            with core.native_calls(), torch.no_grad():
                missed.args, missed.kwargs = sketched(args, kwargs)
            missed.state = GlobalState.current()
            missed.autocast = autocast_here("cpu", "cuda")
            if missed.form.gpu is not None:
                missed.written = torch.cuda.Event()
                missed.written.record()
        if configuration.on_miss == "background":
            self._thread.post(lambda: self._requests.ask_store(missed))
            return
        self._requests.ask_store(missed)
        if waits and not session.waited_in_vain:
            self._wait(missed, configuration.wait_seconds)

    def _wait(self, missed: Missed, seconds: float) -> None:
        # A signal ends it with what its handler raises, which the core passes on.
        if not missed.done.wait(seconds):
            session.waited_in_vain = True
            warn_once(
                "wait",
                f"a module's call waited {seconds:.0f} s for its kernel (EAGERCACHE_WAIT_SECONDS); "
                "its forward answers, and no call waits until some kernel is done. "
                "EAGERCACHE_LOG=info says what is compiled.",
            )

    def _unfit(self, module: torch.nn.Module) -> None:
        info = self._known.find(module)
        if info is not None:
            self._known.refuse(module, info, "it is called with an object that no kernel can take")

    def _is_wrong(self, module: torch.nn.Module, digest: str, answer: Any, expected: Any) -> bool:
        """A checked call's two answers (`EAGERCACHE_VERIFY`): puts a wrong kernel's entry aside."""
        from eagercache.callables.answers import difference_from_forward

        difference = difference_from_forward(answer, expected)
        if not difference:
            return False
        reason = f"a checked call differed from its forward ({difference})"
        differences.note(digest, reason, class_name(module))
        log.warning("%s: %s; its kernel was put aside", class_name(module), reason)
        self._sizes.retire(digest, reason)
        info = self._known.find(module)
        if info is not None:
            info.kernels[False] = 0
            self._known.refuse(module, info, reason)
        store = session.store
        if store is not None and digest:
            assert core is not None
            with contextlib.suppress(core.StoreError):
                store.quarantine(digest, reason)
        return True

    def _lost(self, module: torch.nn.Module, digest: str, native_ns: int, kernel_ns: int) -> None:
        """The core dropped a kernel that loses to the forward in the program's own calls."""
        info = self._known.find(module)
        if info is not None:
            self._known.lose(module, info, LOST)
        self._thread.post(lambda: keep_lost(digest, native_ns, kernel_ns))

    # ---- for others ------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """At exit: looks at no more modules, and waits up to ``timeout`` seconds; see `thread`."""
        self._thread.close(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is looked at or compiled; False when ``timeout`` seconds passed."""
        return self._thread.wait(timeout)

    def stats(self) -> list[tuple[torch.nn.Module, ModuleStats]]:
        """The modules that are or were watched, with what became of their calls."""
        return self._known.stats(self._requests.asked())


manager = ModuleManager()


def explain_module(module: torch.nn.Module) -> list[str]:
    """One line for ``module`` and each module below it that was met: what happened, and why."""
    known = {id(part): row for part, row in manager.stats()}
    return [
        known[id(part)].line(path)
        + ("; " + hooks_of(part) if "hooks" in known[id(part)].aside_reasons else "")
        for path, part in module.named_modules()
        if id(part) in known
    ]
