"""Whole modules answered by one kernel each: `enable(modules=...)` and `accelerate`.

The core (nn_modules/call.h) asks three things of this file, on the thread of the user's call:
whether to watch a module that it meets, to look at one that is new or has changed, and what becomes
of a form of call that has no verdict. The answers are made on a thread of ours: the module is
described, the store is asked, and a compile worker gets a copy of the module when the store has
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from eagercache.base import structured_trace
from eagercache.base.load import core
from eagercache.base.warn import warn_once
from eagercache.callables.call_hooks import install_hooks
from eagercache.callables.module_gradient import eager_gradients
from eagercache.callables.module_identity import Unfit, identify
from eagercache.callables.module_transfer import NotTransferable
from eagercache.callables.surroundings import autocast_here
from eagercache.callables.trace_rows import rows_in
from eagercache.callables.used_functions import changed_function
from eagercache.calls.global_state import GlobalState
from eagercache.modules import replay
from eagercache.modules.forms import (
    Form,
    Missed,
    beside_the_call,
    describe,
    entry_digest,
    load_kernel,
)
from eagercache.modules.names import ModuleNames
from eagercache.modules.selection import (
    Selection,
    check_selection,
    class_name,
    is_library_leaf,
    is_selected,
)
from eagercache.modules.shapes import (
    EXACT_AT,
    Places,
    SizeBook,
    SizeClass,
    SizedForm,
    sized_form,
)
from eagercache.modules.stats import ModuleStats
from eagercache.modules.watch import attribute_values, function_values
from eagercache.modules.watched_rows import Unwatchable
from eagercache.runtime.session import session

if TYPE_CHECKING:
    from eagercache.service.service import CompileService

log = logging.getLogger("eagercache")

# A form of call is compiled at its second call: the first of a process is often one of its kind.
COMPILE_AT = 2
# A module whose attributes keep changing is looked at this often before it is left alone.
MAX_LOOKS = 16

# A kernel that noise hid is measured so often, by all processes together; so many wait in one.
MOST_MEASUREMENTS = 3
MOST_HELD = 16


@dataclass
class _Info:
    """What this side knows of one module. No reference to it or its tensors."""

    name: str
    identity: str = ""
    looks: int = 0  # at what had not been seen before
    settled: bool = False  # it was looked at again because its first call had changed it
    seen: set[str] = field(default_factory=set)  # identities
    changes: int = 0  # of values that its kernels' functions read
    watched: set[tuple[str, ...]] = field(default_factory=set)  # those functions, and guards
    kernels: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    reasons: dict[bool, str] = field(default_factory=lambda: {False: "", True: ""})


class ModuleManager:
    """All of this process's accelerated modules. One object; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._selection: Selection = None
        self._accelerated: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._infos: weakref.WeakKeyDictionary[torch.nn.Module, _Info] = weakref.WeakKeyDictionary()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._unfinished = 0
        self._idle = threading.Condition()
        self._in_flight: dict[str, list[Missed]] = {}  # by entry digest
        self._again: dict[str, list[Missed]] = {}  # the same, where a verdict is undecided
        self._sizes = SizeBook()

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
            self._infos.clear()
            self._sizes.clear()
            active = selection is not None or len(self._accelerated) > 0
            if active:
                self._install_handlers()
            core.modules_forget_all()
            core.set_modules_active(active)

    def add(self, model: torch.nn.Module) -> None:
        """Watches ``model``, or where that cannot be its largest parts that can."""
        assert core is not None
        with self._lock:
            self._accelerated.update(model.modules())
            self._install_handlers()
            for part in model.modules():
                core.module_forget(part)
            core.set_modules_active(True)

    def _install_handlers(self) -> None:
        assert core is not None
        install_hooks(core)
        core.set_module_handlers(
            self._select,
            self._look,
            self._missed,
            self._unfit,
            self._is_wrong,
            ModuleNames(self._met).name_of,
        )
        core.set_eager_gradients(eager_gradients)
        replay.set_limit(session.graph_bytes)

    @staticmethod
    def _met() -> list[torch.nn.Module]:
        assert core is not None
        return [row["module"] for row in core.module_stats()]

    def _select(self, module: torch.nn.Module, nested: bool) -> str:
        if nested:
            return "later"
        if isinstance(module, torch.jit.ScriptModule) or is_library_leaf(module):
            return "refuse"
        if type(module).__name__ == "OptimizedModule":
            # torch.compile's own: what is below it is compiled already.
            for part in module.modules():
                assert core is not None
                if part is not module:
                    core.module_adopt(part)
                    core.module_refuse(part)
            return "refuse"
        chosen = module in self._accelerated or is_selected(self._selection, module)
        if chosen:
            self._infos[module] = _Info(class_name(module))
        return "watch" if chosen else "refuse"

    # ---- the core's questions --------------------------------------------------------------------

    def _look(self, module: torch.nn.Module) -> None:
        reference = weakref.ref(module)
        configuration = session.configuration
        if configuration is not None and configuration.on_miss != "background":
            self._look_now(reference)
        else:
            self._post(lambda: self._look_now(reference))

    def _missed(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: bytes,
        calls: int,
        gradients: bool,
    ) -> None:
        info = self._infos.get(module)
        configuration = session.configuration
        if info is None or configuration is None:
            return
        waits = configuration.on_miss == "wait"
        missed = Missed(Form(weakref.ref(module), info.identity, key, calls, gradients))
        if configuration.on_miss != "native":
            missed.compile = waits or calls >= COMPILE_AT
            missed.args, missed.kwargs = args, kwargs
            missed.state = GlobalState.current()
            missed.autocast = autocast_here("cpu", "cuda")
            if missed.form.gpu is not None:
                missed.written = torch.cuda.Event()
                missed.written.record()
        if configuration.on_miss == "background":
            self._post(lambda: self._ask_store(missed))
            return
        self._ask_store(missed)
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
        info = self._infos.get(module)
        if info is not None:
            self._refuse(module, info, "it is called with an object that no kernel can take")

    def _is_wrong(self, module: torch.nn.Module, digest: str, answer: Any, expected: Any) -> bool:
        """A checked call's two answers (`EAGERCACHE_VERIFY`): puts a wrong kernel's entry aside."""
        from eagercache.callables.answers import difference_from_forward

        difference = difference_from_forward(answer, expected)
        if not difference:
            return False
        reason = f"a checked call differed from its forward ({difference})"
        structured_trace.note(
            "quarantine", {"op": class_name(module), "digest": digest, "reason": reason}
        )
        log.warning("%s: %s; its kernel was put aside", class_name(module), reason)
        self._sizes.retire(digest, reason)
        info = self._infos.get(module)
        if info is not None:
            info.kernels[False] = 0
            self._refuse(module, info, reason)
        store = session.store
        if store is not None and digest:
            assert core is not None
            with contextlib.suppress(core.StoreError):
                store.quarantine(digest, reason)
        return True

    # ---- our thread ------------------------------------------------------------------------------

    def _post(self, job: Callable[[], None]) -> None:
        with self._idle:
            if self._closed:
                return
            self._unfinished += 1
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="eagercache-modules", daemon=True
                )
                self._thread.start()
        self._queue.put(job)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if not self._closed:
                    job()
            except Exception:
                log.exception("looking at a module failed; its forward answers")
            finally:
                del job
                self._finish()

    def _finish(self) -> None:
        with self._idle:
            self._unfinished -= 1
            self._idle.notify_all()

    def close(self, timeout: float) -> None:
        """At exit: looks at no more modules, and waits for our thread to be done with one.

        It runs PyTorch's operators on copies of tensors. One that asks for the interpreter's lock
        while Python ends would end the program with `std::terminate`.
        """
        with self._idle:
            self._closed = True
            thread = self._thread
        self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is looked at or compiled; False when ``timeout`` seconds passed."""
        with self._idle:
            return self._idle.wait_for(lambda: self._unfinished == 0, timeout)

    def _look_now(self, reference: weakref.ref[torch.nn.Module]) -> None:
        assert core is not None
        module = reference()
        info = self._infos.get(module) if module is not None else None
        if module is None or info is None:
            return
        version = core.module_version(module)
        if version is None:
            return
        try:
            # First: what changes in between is noticed at the next call.
            values = attribute_values(module)
            identity = identify(module)
            info.identity = identity.digest
            # One that was seen before, as of a mode that is switched on and off, finds its kernels.
            info.looks += identity.digest not in info.seen
            info.seen.add(identity.digest)
            if info.looks > MAX_LOOKS * (1 + sum(info.kernels.values())):
                self._refuse(module, info, "its attributes change from call to call")
                return
            anew = core.module_values_changed(module)
            if anew and not self._forget_kernels(module, info):
                return
            same = core.module_set_guard(
                module,
                identity.guard_entries(),
                identity.digest,
                version,
                values,
                anew,
            )
        except (Unfit, ValueError) as error:
            self._refuse(module, info, str(error))
            return
        except RuntimeError as error:
            # Changed while it was read, by the program's own threads.
            log.debug("%s: looking again: %s", info.name, error)
            same = False
        if not same:
            log.debug("%s changed while it was looked at", info.name)

    def _forget_kernels(self, module: torch.nn.Module, info: _Info) -> bool:
        """Its kernels were traced with other values; False when the module is refused for it."""
        info.changes += 1
        if info.changes > MAX_LOOKS:
            self._refuse(module, info, "values that its forward reads change from call to call")
            return False
        info.watched.clear()
        info.kernels = dict.fromkeys(info.kernels, 0)
        info.reasons = dict.fromkeys(info.reasons, "")
        self._sizes.clear()
        return True

    def _watch(self, module: torch.nn.Module, functions: list[list[str]]) -> None:
        """Has the core watch what the functions read that a kernel of the module was traced from.

        To be called before it is compared with what the kernel holds. Raises Unwatchable.
        """
        assert core is not None
        info = self._infos.get(module)
        if info is None or core.module_version(module) is None:
            return
        new = [row for row in functions if tuple(row) not in info.watched]
        core.module_watch_values(module, function_values(new, module))
        info.watched.update(map(tuple, new))

    def _refuse(self, module: torch.nn.Module, info: _Info, reason: str) -> None:
        assert core is not None
        info.reasons = dict.fromkeys(info.reasons, reason)
        core.module_refuse(module)
        log.info("event=module name=%s decision=refused reason=%r", info.name, reason)

    def _ask_store(self, missed: Missed) -> None:
        module = missed.form.module()
        store = session.store
        configuration = session.configuration
        if module is None or store is None or configuration is None:
            missed.done.set()
            return
        digest = entry_digest(missed.form.identity, missed.form.key, configuration.choose)
        form = sized_form(missed.form.key)
        if self._install_from_store(digest, missed):
            self._sizes.may_compile(missed.form.identity, form, digest)  # counts, if nothing else
            missed.done.set()
            return
        size_class = self._size_class(form, missed)
        said = self._install_class(size_class, missed.form) if size_class is not None else ""
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
        refused = size_class is not None and size_class.closed and not self._has_kernel(module)
        wanted = missed.form.calls >= EXACT_AT if said else missed.compile or refused
        if wanted and self._sizes.may_compile(missed.form.identity, form, digest):
            self._submit(digest, module, missed)
        else:
            missed.done.set()

    def _has_kernel(self, module: torch.nn.Module) -> bool:
        info = self._infos.get(module)
        return info is not None and info.kernels[False] > 0

    def _size_class(self, form: SizedForm, missed: Missed) -> SizeClass | None:
        configuration = session.configuration
        if form.pattern is None or configuration is None or missed.form.gradients:
            return None
        if missed.autocast:
            return None
        name = entry_digest(missed.form.identity, form.pattern, configuration.choose)
        return self._sizes.meet(name, form)

    def _install_class(self, size_class: SizeClass, form: Form) -> str:
        """What the kernels with symbolic sizes say to a call; see `SizeBook.install`."""
        assert core is not None
        module, store, configuration = form.module(), session.store, session.configuration
        if module is None or store is None or configuration is None or core.frozen():
            return ""
        try:
            self._sizes.load(
                size_class,
                store,
                configuration.numerics,
                module,
                lambda digest, entry: load_kernel(digest, form, entry),
            )
            for known in size_class.kernels:
                self._watch(module, known.functions)
            said = self._sizes.install(size_class, module, form.identity, form.key)
        except Exception as error:
            log.warning("a stored kernel of %s cannot be used: %s", class_name(module), error)
            size_class.closed = f"a stored kernel cannot be used: {error}"
            return ""
        info = self._infos.get(module)
        if info is not None and said:
            info.kernels[False] += 1
            core.module_leave(module, False, False)
        return said

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
        if self._is_another(module, missed.form):
            missed.done.set()
            return
        service = self._service(missed.form)
        with self._lock:
            waiting = self._in_flight.get(digest)
            if waiting is not None:
                waiting.append(missed)
                return
            self._in_flight[digest] = [missed]
        with self._idle:
            self._unfinished += 1
        if service is None:
            self._compiled(digest, {"reason": "the compile service is closed"})
            return
        try:
            description = self._describe(digest, module, missed)
        except NotTransferable as error:
            self._compiled(digest, {"reason": str(error)})
            return
        except BaseException:
            self._compiled(digest, {"reason": "it could not be sent to a compile worker"})
            raise
        service.submit(description, lambda response: self._compiled(digest, response))

    def _is_another(self, module: torch.nn.Module, form: Form) -> bool:
        """Whether the module is not what it was when it was looked at; then it is looked at again.

        A first call may settle what hangs off it, which is not seen: transformers' write the kind
        of problem into their configuration. That is so once; the worker refuses what goes on.
        """
        info = self._infos.get(module)
        if info is None or info.settled:
            return False
        try:
            same = identify(module).digest == form.identity
        except (Unfit, ValueError, RuntimeError):
            same = False
        if not same:
            info.settled = True
            self._look_now(weakref.ref(module))
        return not same

    def _measure_again(self, digest: str, missed: Missed, measured: int) -> None:
        """Has a kernel that noise hid measured anew, once the machine is idle; nobody waits for it.

        ``measured``: so often it was. Operators have the same in runtime_again.cc.
        """
        module = missed.form.module()
        if not 1 <= measured < MOST_MEASUREMENTS or module is None or missed.state is None:
            return
        service = self._service(missed.form)
        with self._lock:
            waiting = self._again.get(digest)
            if waiting is not None:
                waiting.append(missed)
                return
            if service is None or len(self._again) >= MOST_HELD:
                return
            self._again[digest] = [missed]
        try:
            description = missed.description or self._describe(digest, module, missed)
        except NotTransferable:
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
                self._install_from_store(digest, missed)

    @staticmethod
    def _service(form: Form) -> CompileService | None:
        gpu = form.gpu
        return session.compile_service() if gpu is None else session.cuda_compile_service(gpu)

    def _describe(self, digest: str, module: torch.nn.Module, missed: Missed) -> dict[str, Any]:
        """What is sent to the service; the call's tensors are let go of."""
        with beside_the_call(missed):
            missed.description = describe(digest, module, missed)
        missed.args, missed.kwargs, missed.written = (), {}, None
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
                elif not self._install_from_store(digest, missed, made=True):
                    self._install_native(missed.form, str(response.get("reason", "")))
        finally:
            for missed in waiting:
                missed.done.set()
            self._finish()

    def _class_compiled(
        self, size_class: SizeClass, form: Form, response: Mapping[str, Any]
    ) -> None:
        before = len(size_class.kernels)
        self._install_class(size_class, form)
        busy = response.get("verdict") == "busy"  # another process is at it
        if len(size_class.kernels) == before and not size_class.closed and not busy:
            size_class.closed = str(response.get("reason", "")) or "no kernel came of it"
        self._sizes.asked_for(size_class, again=busy)
        if size_class.closed:
            log.info("event=module_sizes decision=exact reason=%r", size_class.closed)

    # ---- verdicts --------------------------------------------------------------------------------

    def _install_from_store(self, digest: str, missed: Missed, made: bool = False) -> bool:
        """Whether the store has a verdict, which is installed then; ``made``: for this call."""
        assert core is not None
        form = missed.form
        module = form.module()
        store = session.store
        configuration = session.configuration
        if module is None or store is None or configuration is None:
            return False
        if core.frozen():
            return True  # the form stays without a verdict, and its forward answers
        try:
            entry = store.find(digest)
        except core.StoreError as error:
            log.warning("the store cannot be read: %s", error)
            return False
        if entry is None:
            return False
        facts = entry["facts"]
        if entry["kind"] != "kernel":
            self._install_native(form, facts.get("reason") or "its forward is faster")
            self._measure_again(digest, missed, int(facts.get("measured", 0)))
            return True
        if configuration.numerics == "bitwise" and facts.get("numerics") != "bitwise":
            self._install_native(form, "the kernel does not equal the forward bit for bit")
            return True
        try:
            functions = rows_in(facts["functions"])
            self._watch(module, functions)
        except ValueError as error:
            self._install_native(form, f"the stored kernel cannot be used: {error}")
            return True
        except Unwatchable as error:
            self._install_native(form, f"its forward reads what cannot be watched: {error}")
            return True
        changed = changed_function(functions, module)
        if changed is not None:
            log.info("a stored kernel was made for other code or values (%s)", changed)
            info = self._infos.get(module)
            if made or (info is not None and info.changes > 0):
                # A worker has what the program's files say, and not what was assigned since.
                reason = f"its forward reads values that a compile worker does not ({changed})"
                self._install_native(form, reason)
                return True
            if configuration.on_miss != "native":
                with contextlib.suppress(core.StoreError):
                    store.remove(digest)
            return False
        try:
            self._install_kernel(digest, form, module, entry)
        except Exception as error:
            log.warning("a stored kernel of %s cannot be used: %s", class_name(module), error)
            self._install_native(form, f"the stored kernel cannot be used: {error}")
        return True

    def _install_kernel(
        self, digest: str, form: Form, module: torch.nn.Module, entry: Mapping[str, Any]
    ) -> None:
        assert core is not None
        kernel = load_kernel(digest, form, entry)
        core.module_install(module, form.identity, form.key, kernel)
        info = self._infos.get(module)
        if info is not None:
            info.kernels[form.gradients] += 1
            core.module_leave(module, form.gradients, False)  # as an earlier verdict may have
        log.info(
            "event=module name=%s decision=kernel gradients=%d digest=%s",
            class_name(module),
            form.gradients,
            digest,
        )

    def _install_native(self, form: Form, reason: str) -> None:
        assert core is not None
        module = form.module()
        info = self._infos.get(module) if module is not None else None
        if module is None or info is None:
            return
        core.module_install(module, form.identity, form.key, None)
        info.reasons[form.gradients] = reason
        if info.kernels[form.gradients] == 0:
            # Its largest parts may do better.
            core.module_leave(module, form.gradients, True)
            log.info(
                "event=module name=%s decision=refused gradients=%d reason=%r",
                info.name,
                form.gradients,
                reason,
            )

    # ---- for people ------------------------------------------------------------------------------

    def stats(self) -> list[tuple[torch.nn.Module, ModuleStats]]:
        """The modules that are or were watched, with what became of their calls."""
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
                        reason="" if info.kernels[False] else info.reasons[False],
                        training_hits=row["training_hits"],
                        training_reason="" if info.kernels[True] else info.reasons[True],
                        identity=info.identity,
                        replayed=row["replayed"],
                        replay=row["replay"],
                    ),
                )
            )
        return rows


manager = ModuleManager()


def explain_module(module: torch.nn.Module) -> list[str]:
    """One line for ``module`` and each module below it that was met: what happened, and why."""
    known = {id(part): row for part, row in manager.stats()}
    return [
        known[id(part)].line(path) for path, part in module.named_modules() if id(part) in known
    ]
