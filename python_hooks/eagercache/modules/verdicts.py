"""From what the store says to a kernel that answers, or to the forward."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from eagercache.base.load import core
from eagercache.callables.module_gradient import keep_as_it_is
from eagercache.callables.used_functions import changed_function
from eagercache.calls.trace_rows import rows_in
from eagercache.modules.forms import Form, Missed, load_kernel
from eagercache.modules.known import KnownModules
from eagercache.modules.selection import class_name
from eagercache.modules.shapes import SizeBook, SizeClass
from eagercache.modules.watched_rows import Unwatchable
from eagercache.runtime.session import session

log = logging.getLogger("eagercache")


# What a native entry keeps of the kernel's that stood in its place.
_KEPT_FACTS = ("op", "call", "dispatch_key", "choose", "torch", "machine", "numerics")
LOST = "in the program's own calls its forward is faster"


def keep_lost(digest: str, native_ns: int, kernel_ns: int) -> None:
    """Has the store keep that a kernel loses here, in its place; see runtime_trials.cc."""
    assert core is not None
    store = session.store
    if store is None or store.read_only or core.frozen():
        return
    with contextlib.suppress(core.StoreError):
        entry = store.find(digest)
        if entry is None or entry["kind"] != "kernel":
            return
        facts = {name: text for name, text in entry["facts"].items() if name in _KEPT_FACTS}
        facts.update(reason=LOST, native_ns=str(native_ns), kernel_ns=str(kernel_ns))
        store.remove(digest)
        store.publish(
            {"key": digest, "kind": "native", "created": int(time.time()), "facts": facts}
        )


class Verdicts:
    """Installs verdicts of the store in the core. Thread-safe."""

    def __init__(
        self, known: KnownModules, sizes: SizeBook, undecided: Callable[[str, Missed, int], None]
    ) -> None:
        """``undecided`` is told the entry, the call, and how often it was measured."""
        self._known = known
        self._sizes = sizes
        self._undecided = undecided

    def install_from_store(self, digest: str, missed: Missed, made: bool = False) -> bool:
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
            if not made and self._is_of_other_values(digest, module, entry):
                return False
            self.install_native(form, facts.get("reason") or "its forward is faster")
            self._undecided(digest, missed, int(facts.get("measured", 0)))
            return True
        if configuration.numerics == "bitwise" and facts.get("numerics") != "bitwise":
            self.install_native(form, "the kernel does not equal the forward bit for bit")
            return True
        try:
            functions = rows_in(facts["functions"])
            self._known.watch(module, functions, form.identity)
        except ValueError as error:
            self.install_native(form, f"the stored kernel cannot be used: {error}")
            return True
        except Unwatchable as error:
            self.install_native(form, f"its forward reads what cannot be watched: {error}")
            return True
        changed = changed_function(functions, module)
        if changed is not None:
            log.info("a stored kernel was made for other code or values (%s)", changed)
            info = self._known.find(module)
            if made or (info is not None and info.changes > 0):
                # A worker has what the program's files say, and not what was assigned since.
                reason = f"its forward reads values that a compile worker does not ({changed})"
                self.install_native(form, reason)
                return True
            if configuration.on_miss != "native":
                with contextlib.suppress(core.StoreError):
                    store.remove(digest)
            return False
        try:
            self._install_kernel(digest, form, module, entry)
        except Exception as error:
            log.warning("a stored kernel of %s cannot be used: %s", class_name(module), error)
            self.install_native(form, f"the stored kernel cannot be used: {error}")
        return True

    def _is_of_other_values(
        self, digest: str, module: torch.nn.Module, entry: Mapping[str, Any]
    ) -> bool:
        """Whether the forward read other values where it was refused; the refusal is gone then.

        A global that makes it print is one.
        """
        assert core is not None
        store, configuration = session.store, session.configuration
        text = entry["facts"].get("functions")
        info = self._known.find(module)
        if not text or store is None or configuration is None:
            return False
        if configuration.on_miss == "native" or (info is not None and info.changes > 0):
            return False  # none is made, or a worker has what the program's files say
        try:
            changed = changed_function(rows_in(text), module)
        except ValueError as error:
            changed = str(error)
        if changed is None:
            return False
        log.info("a module was left to its forward for other code or values (%s)", changed)
        with contextlib.suppress(core.StoreError):
            store.remove(digest)
        return True

    def _install_kernel(
        self, digest: str, form: Form, module: torch.nn.Module, entry: Mapping[str, Any]
    ) -> None:
        assert core is not None
        kernel = load_kernel(digest, form, entry)
        if form.gradients:
            keep_as_it_is(module, form.identity)
        core.module_install(module, form.identity, form.key, kernel)
        info = self._known.find(module)
        if info is not None:
            info.kernels[form.gradients] += 1
            core.module_leave(module, form.gradients, False)  # as an earlier verdict may have
        log.info(
            "event=module name=%s decision=kernel gradients=%d digest=%s",
            class_name(module),
            form.gradients,
            digest,
        )

    def install_native(self, form: Form, reason: str) -> None:
        """The form stays with its forward, and the module too where it has no other kernel."""
        assert core is not None
        module = form.module()
        info = self._known.find(module) if module is not None else None
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

    def install_class(self, size_class: SizeClass, form: Form) -> str:
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
                self._known.watch(module, known.functions, form.identity)
            if form.gradients and size_class.kernels:
                keep_as_it_is(module, form.identity)
            said = self._sizes.install(size_class, module, form.identity, form.key)
        except Exception as error:
            log.warning("a stored kernel of %s cannot be used: %s", class_name(module), error)
            size_class.closed = f"a stored kernel cannot be used: {error}"
            return ""
        info = self._known.find(module)
        if info is not None and said:
            info.kernels[form.gradients] += 1
            core.module_leave(module, form.gradients, False)
        return said
