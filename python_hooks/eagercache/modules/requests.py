"""Calls without a verdict on their way through the store and the compile service, and back."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from eagercache.callables.module_identity import Unfit, identify
from eagercache.callables.standins import NotTransferable
from eagercache.modules.forms import (
    Form,
    Missed,
    beside_the_call,
    describe,
    entry_digest,
    reason_to_stay_off,
)
from eagercache.modules.known import KnownModules
from eagercache.modules.shapes import EXACT_AT, Places, SizeBook, SizeClass, SizedForm, sized_form
from eagercache.modules.thread import ModuleThread
from eagercache.modules.verdicts import Verdicts
from eagercache.runtime.session import session

if TYPE_CHECKING:
    from eagercache.service.service import CompileService

log = logging.getLogger("eagercache")

# A kernel that noise hid is measured so often, by all processes together; so many wait in one.
MOST_MEASUREMENTS = 3
MOST_HELD = 16


class ModuleRequests:
    """What was asked of the compile service, and what becomes of it. Thread-safe."""

    def __init__(
        self,
        known: KnownModules,
        sizes: SizeBook,
        thread: ModuleThread,
        look: Callable[[weakref.ref[torch.nn.Module]], None],
    ) -> None:
        """``look`` describes a module anew that is not what it was."""
        self._known = known
        self._sizes = sizes
        self._thread = thread
        self._look = look
        self._verdicts = Verdicts(known, sizes, self._measure_again)
        self._lock = threading.Lock()
        self._in_flight: dict[str, list[Missed]] = {}  # by entry digest
        self._again: dict[str, list[Missed]] = {}  # the same, where a verdict is undecided

    def asked(self) -> set[int]:
        """The ids of the modules that wait for what was asked of the compile service."""
        with self._lock:
            forms = [missed.form for waiting in self._in_flight.values() for missed in waiting]
        return {id(module) for module in (form.module() for form in forms) if module is not None}

    def ask_store(self, missed: Missed) -> None:
        """Installs what the store has for a call, or asks for a kernel."""
        module = missed.form.module()
        store = session.store
        configuration = session.configuration
        if module is None or store is None or configuration is None:
            missed.done.set()
            return
        digest = entry_digest(missed.form.identity, missed.form.key, configuration.choose)
        form = sized_form(missed.form.key)
        if self._verdicts.install_from_store(digest, missed):
            self._sizes.may_compile(missed.form.identity, form, digest)  # counts, if nothing else
            missed.done.set()
            return
        size_class = self._size_class(form, missed)
        said = (
            self._verdicts.install_class(size_class, missed.form) if size_class is not None else ""
        )
        if said == "kernel" or missed.state is None:
            missed.done.set()
            return
        if size_class is not None and not said:
            places = self._sizes.wants(size_class, form.sizes)
            if places:
                self._submit_class(size_class, places, module, missed, form)
                return
            if size_class.asked:
                missed.done.set()
                return
        # Where sizes change from call to call none may ever come twice.
        refused = (
            size_class is not None
            and size_class.closed
            and not self._known.has_kernel(module, missed.form.gradients)
        )
        wanted = missed.form.calls >= EXACT_AT if said else missed.compile or refused
        if wanted and self._sizes.may_compile(missed.form.identity, form, digest):
            self._submit(digest, module, missed)
        else:
            missed.done.set()

    def _size_class(self, form: SizedForm, missed: Missed) -> SizeClass | None:
        configuration = session.configuration
        if form.pattern is None or configuration is None:
            return None
        name = entry_digest(missed.form.identity, form.pattern, configuration.choose)
        return self._sizes.meet(name, form)

    def _submit_class(
        self,
        size_class: SizeClass,
        places: Places,
        module: torch.nn.Module,
        missed: Missed,
        form: SizedForm,
    ) -> None:
        digest = size_class.digest(len(size_class.kernels))
        if not self._sizes.may_compile(missed.form.identity, form, digest):
            self._sizes.asked_for(size_class)
            missed.done.set()
            return
        missed.open, missed.size_class = places, size_class
        missed.met = size_class.told(form.sizes, places)
        self._submit(digest, module, missed)

    def _submit(self, digest: str, module: torch.nn.Module, missed: Missed) -> None:
        service = self._service(missed.form)
        with self._lock:
            waiting = self._in_flight.get(digest)
            if waiting is not None:
                missed.let_go()
                waiting.append(missed)
                return
            self._in_flight[digest] = [missed]
        self._thread.begin()
        if service is None:
            self._compiled(digest, {"reason": "the compile service is closed"})
            return
        try:
            description = self._describe(digest, module, missed)
            if self._is_another(module, missed.form):  # it was switched since the call
                self._drop_all(digest)
                return
            reason = reason_to_stay_off(missed.form, description)
        except NotTransferable as error:
            self._compiled(digest, {"reason": str(error)})
            return
        except BaseException:
            self._compiled(digest, {"reason": "it could not be sent to a compile worker"})
            raise
        if reason:
            service.keep_for_later(description)
            self._compiled(digest, {"reason": reason})
            return
        service.submit(description, lambda response: self._compiled(digest, response))

    def _drop_all(self, digest: str) -> None:
        """Leaves the calls that wait as they were: later ones of their form ask again."""
        with self._lock:
            dropped = self._in_flight.pop(digest, [])
        for missed in dropped:
            if missed.size_class is not None:
                self._sizes.asked_for(missed.size_class, again=True)
            missed.done.set()
        self._thread.finish()

    def _is_another(self, module: torch.nn.Module, form: Form) -> bool:
        """Whether the module is not what it was when the call was made.

        One whose mode is switched on and off may be what it was before. Else it is looked at again:
        a first call may settle what hangs off it, which is not seen, as transformers' write the
        kind of problem into their configuration. That is so once; the worker refuses what goes on.
        """
        info = self._known.find(module)
        if info is None:
            return False
        try:
            own = identify(module, allow_opaque=True).digest
        except (Unfit, ValueError, RuntimeError):
            own = ""
        if own == form.identity or (info.settled and own not in info.seen):
            return False
        if own not in info.seen:
            info.settled = True
            self._look(weakref.ref(module))
        return True

    def _measure_again(self, digest: str, missed: Missed, measured: int) -> None:
        """Has a kernel that noise hid measured anew, once the machine is idle; nobody waits for it.

        ``measured``: so often it was. Operators have the same in runtime_again.cc.
        """
        module = missed.form.module()
        described = missed.description is not None or missed.state is not None
        if not 1 <= measured < MOST_MEASUREMENTS or module is None or not described:
            return
        service = self._service(missed.form)
        with self._lock:
            waiting = self._again.get(digest)
            if waiting is not None:
                missed.let_go()
                waiting.append(missed)
                return
            if service is None or len(self._again) >= MOST_HELD:
                return
            self._again[digest] = [missed]
        try:
            description = missed.description or self._describe(digest, module, missed)
            why_not = reason_to_stay_off(missed.form, description)
        except NotTransferable as error:
            why_not = str(error)
        if why_not:
            self._again.pop(digest, None)
            return
        service.submit(
            {**description, "again": measured},
            lambda _: self._measured(digest, measured),
        )

    def _measured(self, digest: str, measured: int) -> None:
        """The service is done with what `_measure_again` asked: the store has the verdict."""
        with self._lock:
            waiting = self._again.pop(digest, [])
        store = session.store
        try:
            entry = store.find(digest) if store is not None else None
        except Exception as error:
            log.warning("the store cannot be read: %s", error)
            return
        # The same measurement as before: the service could not make another one.
        if entry is not None and entry["facts"].get("measured") != str(measured):
            for missed in waiting:
                self._verdicts.install_from_store(digest, missed)

    @staticmethod
    def _service(form: Form) -> CompileService | None:
        gpu = form.gpu
        return session.compile_service() if gpu is None else session.cuda_compile_service(gpu)

    def _describe(self, digest: str, module: torch.nn.Module, missed: Missed) -> dict[str, Any]:
        """What is sent to the service; the call's tensors are let go of."""
        with beside_the_call(missed):
            missed.description = describe(digest, module, missed)
        missed.let_go()
        return missed.description

    def _compiled(self, digest: str, response: Mapping[str, Any]) -> None:
        """The service's answer, on one of its threads."""
        with self._lock:
            waiting = self._in_flight.pop(digest, [])
        session.waited_in_vain = False
        try:
            for missed in waiting:
                if missed.size_class is not None:
                    self._class_compiled(missed.size_class, missed.form, response)
                elif not self._verdicts.install_from_store(digest, missed, made=True):
                    self._verdicts.install_native(missed.form, str(response.get("reason", "")))
        finally:
            for missed in waiting:
                missed.done.set()
            self._thread.finish()

    def _class_compiled(
        self, size_class: SizeClass, form: Form, response: Mapping[str, Any]
    ) -> None:
        before = len(size_class.kernels)
        self._verdicts.install_class(size_class, form)
        busy = response.get("verdict") == "busy"  # another process is at it
        if len(size_class.kernels) == before and not size_class.closed and not busy:
            size_class.closed = str(response.get("reason", "")) or "no kernel came of it"
        self._sizes.asked_for(size_class, again=busy)
        if size_class.closed:
            log.info("event=module_sizes decision=exact reason=%r", size_class.closed)
