"""The functions that switch acceleration on and off: enable, register, disable, freeze."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eagercache.base import callbacks, config, log, operators
from eagercache.base.load import core
from eagercache.base.untried.standing import standing
from eagercache.frontend import interrupts
from eagercache.frontend.deferred import deferred, is_inert
from eagercache.frontend.metrics import metrics_file
from eagercache.frontend.module_report import require_module
from eagercache.remote.plan import Remote
from eagercache.runtime import choices, open_requests
from eagercache.runtime.left_native import note_calls
from eagercache.runtime.session import session

if TYPE_CHECKING:
    from eagercache.callables.function_operator import CustomOperator
from eagercache.frontend.switching import (
    adopt_functions,
    apply_configuration,
    check_modules,
    function_hooks,
    register_pairs,
    select_modules,
    snapshot,
    switch_off_others,
    switch_on,
    watch_operators,
)

_Module = TypeVar("_Module")


class Enabled:
    """The result of `enable()`. As a context manager it puts the previous state back at the end."""

    def __init__(self, restore: Callable[[], None], active: bool) -> None:
        self._restore = restore
        self.active = active

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def __repr__(self) -> str:
        return f"<eagercache.Enabled active={self.active}>"


def default_operators(device: config.Device = "cpu") -> list[str]:
    """Names of the operators that `enable()` hooks on a device when no list is given."""
    if core is None:
        return []
    (key,) = choices.dispatch_keys([device])
    return [operators.full_name(name) for name in core.default_operators(key)]


def is_enabled() -> bool:
    """Whether hooked operators are answered by kernels in this process right now."""
    return core is not None and bool(core.answering())


def begin_operator(operator: CustomOperator[Any, Any]) -> None:
    """The first call of an operator that `eagercache.op` made: kernels may answer from now on.

    Where nothing was ever enabled, kernels are enabled for such operators alone.
    """
    settings = config.read_settings()
    if is_inert(settings, "background"):
        return
    assert core is not None
    with session.lock:
        if deferred.holds():
            deferred.add(lambda: begin_operator(operator))
            return
        if session.configuration is None and not is_enabled():
            enable(ops=())
        elif is_enabled() and operator.identify():
            watch_operators()
            skipped = choices.skipped(settings, ())
            for name, key in operator.hooks():
                core.set_active(name[0], name[1], key, name not in skipped)


def _nothing() -> None:
    return None


def enable(
    ops: str | Iterable[Any] | None = None,
    *,
    skip: str | Iterable[Any] = (),
    devices: config.Device | Iterable[config.Device] | None = None,
    on_miss: config.OnMiss = "background",
    choose: config.Choose = "faster",
    numerics: config.Numerics = "accurate",
    modules: Any = None,
    training: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    remote: str | Iterable[str] | Remote | None = None,
    revoked: str | os.PathLike[str] | None = None,
) -> Enabled:
    """Lets compiled kernels answer eager operator calls in this process.

    Args:
        ops: which operators: None for the default list, "all" for every eligible overload, or names
            ("aten::var.correction", "var", torch.ops.aten.var).
        skip: operators to leave alone.
        devices: of "cpu" and "cuda". By default "cpu", and "cuda" where torch was built with it and
            the machine has a driver.
        on_miss: "background" (native answers while a kernel is compiled elsewhere), "wait" (the
            first call of a key waits for its kernel) or "native" (kernels that the store has are
            used, nothing is compiled).
        choose: "faster" (a kernel only where it is measured to be faster) or "always".
        numerics: "accurate" or "bitwise" (only kernels that equal native bit for bit).
        modules: whole modules to answer by one kernel each: "auto" (the largest ones of a running
            model that can be), a module class, the name of one, a function of a module, or a list
            of these. What a kernel cannot stand for goes through the module's own forward. See
            `explain_module`.
        training: whether kernels of whole modules answer calls that need gradients too, with a
            kernel for their backward. Without, such calls go through the module's own forward.
        cache_dir: the store's directory; EAGERCACHE_DIR or a directory of the user's by default.
        remote: where other machines' kernels are looked for before one is compiled: a URL, several,
            or an `eagercache.Remote`, which names keys, too; () for none. EAGERCACHE_REMOTE by
            default. No call waits for it that would not wait for the compiler. With
            ``on_miss="native"`` nothing is looked for; `eagercache pull` does it before.
        revoked: a file of signing keys and bundles that are not to be used any more, one a line;
            EAGERCACHE_REVOKED by default. Kernels that such a bundle brought are not used, nor are
            those of one that has expired: one warning says so.

    Returns:
        A context manager that puts the previous state back; it may be ignored. Its attribute
        `active` tells whether kernels may answer now.

    Raises:
        ValueError: an unknown or ineligible operator, or a bad value; nothing has changed then.

    In a job of several processes (torch.distributed is initialized, or WORLD_SIZE says so), kernels
    of operators and of modules that do not equal native bit for bit answer only forward and
    backward passes: what every replica computes again from equal data (optimizer steps, gradient
    clipping, all without gradients) stays the same on all of them. Call enable() after
    init_process_group() when nothing sets WORLD_SIZE.

    Beside a torch that nobody has tried it takes effect when the self-check that the import began
    has passed; with ``on_miss="wait"`` it waits for that.

    A directory or a list that cannot be used is warned about once and everything stays native. May
    be called again: the newest call's operators, policy and store hold, and `freeze()` ends.
    Thread-safe.
    """
    if cache_dir is not None and not isinstance(cache_dir, (str, os.PathLike)):
        raise ValueError(f"cache_dir={cache_dir!r} is not the path of a directory, or None")
    if revoked is not None and not isinstance(revoked, (str, os.PathLike)):
        raise ValueError(f"revoked={revoked!r} is not the path of a file, or None")
    # Several names may be read more than once.
    ops, skip, devices, modules, remote = map(choices.kept, (ops, skip, devices, modules, remote))
    settings = config.read_settings()
    if is_inert(settings, on_miss):
        return Enabled(_nothing, active=False)
    if revoked is not None:
        settings = replace(settings, revoked=Path(revoked))
    assert core is not None
    with session.lock:
        chosen = choices.configuration(settings, on_miss, choose, numerics, training)
        keys = choices.dispatch_keys(devices)
        if modules is not None:
            check_modules(modules)
        plan = choices.remote_plan(settings, remote)
        skipped = choices.skipped(settings, skip)
        pairs = choices.selected(ops, skipped, keys)
        if deferred.holds():
            later = functools.partial(
                enable, ops, skip=skip, devices=devices, on_miss=on_miss, choose=choose,
                numerics=numerics, modules=modules, training=training, cache_dir=cache_dir,
                remote=remote, revoked=revoked,
            )  # fmt: skip
            return Enabled(deferred.add(lambda: later()._restore), active=False)
        adopt_functions(pairs)
        pairs += [pair for pair in function_hooks(skipped) if pair[1] in keys]
        restore = snapshot()
        session.enables += 1
        switch_off_others(pairs)
        named = ops not in (None, "default", "all")
        active = switch_on(pairs, chosen, settings, cache_dir, plan, named=named)
        select_modules(modules if active else None)
        if active and settings.metrics is not None:
            metrics_file.start(settings.metrics)
        return Enabled(restore, active=active)


def accelerate(model: _Module, *, training: bool | None = None, **options: Any) -> _Module:
    """Lets kernels answer whole calls of ``model``, or of its largest parts that can be.

    Its forward answers until they are compiled, proved and found faster, and whenever a call needs
    what a kernel cannot stand for. Nothing about the object changes.

    Args:
        model: a module.
        training: whether kernels answer calls that need gradients, too; it holds for all modules of
            the process. None: as `enable` was told, which is False by default.
        **options: those of `enable`, with no operators by default, where nothing is enabled yet.

    Returns:
        The model itself.

    Raises:
        ValueError: a bad value, or ``options`` where something is enabled already.
    """
    require_module("accelerate", model)
    if training is not None:
        choices.check_training(training)
    settings = config.read_settings()
    if is_inert(settings, options.get("on_miss", "background")):
        return model
    from eagercache.modules.manager import manager

    with session.lock:
        if deferred.holds() and not deferred.begun():
            enable(**{"ops": (), "training": bool(training), **options})
            options = {}
        if deferred.holds() and not options:
            deferred.add(lambda: accelerate(model, training=training))
        elif not is_enabled() and not deferred.holds():
            enable(**{"ops": (), "training": bool(training), **options})
        elif options:
            raise ValueError(
                f"accelerate({next(iter(options))}=...): eagercache is enabled already; give the "
                "option to enable()"
            )
        elif training is not None and session.configuration is not None:
            apply_configuration(replace(session.configuration, training=training))
        if is_enabled():
            manager.add(model)
    return model


def register(op: Any, dispatch_key: config.DispatchKey = "CPU") -> None:
    """Hooks one operator (all eligible overloads when none is named) at a dispatch key.

    The primitive under `enable()`. The operator joins those that are enabled; when nothing is,
    kernels start to answer with the default settings. Registering it again does nothing.

    Raises:
        ValueError: the operator does not exist or cannot be accelerated; the message says why.
    """
    settings = config.read_settings()
    if is_inert(settings, "background"):
        return
    assert core is not None
    if dispatch_key not in choices.DISPATCH_KEYS.values():
        allowed = ", ".join(choices.DISPATCH_KEYS.values())
        raise ValueError(f"dispatch_key={dispatch_key!r} is not one of {allowed}")
    with session.lock:
        skipped = choices.skipped(settings, ())
        pairs = [
            (name, dispatch_key)
            for name in operators.require_eligible(op, dispatch_key)
            if name not in skipped
        ]
        if deferred.holds():
            deferred.add(lambda: register(op, dispatch_key))
            return
        if is_enabled():
            for name, key in register_pairs(pairs):
                core.set_active(name[0], name[1], key, True)
            return
        chosen = choices.configuration(settings, "background", "faster", "accurate")
        plan = choices.remote_plan(settings, None)
        switch_on(pairs, chosen, settings, None, plan, named=True)


def disable() -> None:
    """Routes every call to native, at once, in all threads.

    Overrides stay registered: taking one away under load would crash PyTorch. Kernels under way are
    finished and stored.
    """
    if core is not None:
        _drop_deferred()
        core.set_answering(False)
        log.event(logging.INFO, "disable")


def freeze() -> None:
    """From here on no call is answered by a kernel that did not answer such calls before.

    Kernels in use go on answering. Every other call is native's, and nothing is looked up or
    compiled for it. Holds in all threads once it has returned; kernels that are being made are
    finished and stored, for later processes. The next `enable()` ends it.
    """
    if core is not None:
        _drop_deferred()
        core.freeze()
        log.event(logging.INFO, "freeze", kernels=core.loaded_kernels())


def is_frozen() -> bool:
    """Whether `freeze()` holds."""
    return core is not None and bool(core.frozen())


def _drop_deferred() -> None:
    with session.lock:
        if deferred.holds():
            deferred.drop()


def _close() -> None:
    """At exit: no thread of ours enters Python any more, workers are gone within two seconds."""
    if standing.pending():
        wish = config.read_settings().linger
        standing.leave(open_requests.may_linger(wish, os.environ))
    if core is None or core.forked():
        return
    note_calls()
    metrics_file.end()
    core.set_handler(None)
    core.set_modules_active(False)
    core.set_module_handlers(None, None, None, None)
    if (loaded := sys.modules.get("eagercache.modules.manager")) is not None:
        loaded.manager.close(timeout=10.0)  # what it takes to copy the largest modules
    session.close_service(timeout=2.0)
    open_requests.leave()
    core.shut_down()


atexit.register(interrupts.keep)  # after all else, since the last comes first
atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=session.after_fork)


callbacks.begin_operator = begin_operator
