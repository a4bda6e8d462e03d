"""The functions that switch acceleration on and off: enable, register, disable, freeze."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from eagercache.base import callbacks, config, environment, facts, log, operators
from eagercache.base.load import core
from eagercache.base.warn import warn_once
from eagercache.frontend.metrics import metrics_file
from eagercache.frontend.module_report import require_module
from eagercache.remote.plan import Remote, RemotePlan
from eagercache.runtime import choices, compile_requests, open_requests, stores
from eagercache.runtime.left_native import left_native, note_calls
from eagercache.runtime.session import Configuration, session

if TYPE_CHECKING:
    from eagercache.callables.custom_operators import CustomOperator

_Module = TypeVar("_Module")


class Enabled:
    """The result of `enable()`. As a context manager it puts the previous state back at the end."""

    def __init__(self, restore: Callable[[], None], active: bool) -> None:
        self._restore = restore
        self.active = active

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def __repr__(self) -> str:
        return f"<eagercache.Enabled active={self.active}>"


def default_operators(device: str = "cpu") -> list[str]:
    """Names of the operators that `enable()` hooks on a device when no list is given."""
    if core is None:
        return []
    (key,) = choices.dispatch_keys([device])
    return [operators.full_name(name) for name in core.default_operators(key)]


def is_enabled() -> bool:
    """Whether hooked operators are answered by kernels in this process right now."""
    return core is not None and bool(core.answering())


def _is_child_process() -> bool:
    """Whether multiprocessing started this process (a DataLoader worker, a pool).

    Such a process never compiles or writes; the main one does.
    """
    return multiprocessing.parent_process() is not None


def _register_pairs(pairs: Iterable[tuple[operators.OperatorName, str]]) -> list[Any]:
    """Hooks each pair; those that cannot be are warned about once. Returns the hooked ones."""
    assert core is not None
    hooked = []
    for name, key in pairs:
        try:
            core.register(name[0], name[1], key)
        except ValueError as error:
            warn_once(f"register:{name}:{key}", f"{error}; it stays native.")
            continue
        hooked.append((name, key))
    return hooked


def _function_hooks(skip: set[operators.OperatorName]) -> list[Any]:
    """What `eagercache.op` made and kernels may answer; where nothing was made, not imported."""
    loaded = sys.modules.get("eagercache.callables.custom_operators")
    if loaded is None:
        return []
    return [(name, key) for name, key in loaded.fit_hooks() if name not in skip]


def _adopt_functions(pairs: Iterable[tuple[operators.OperatorName, str]]) -> None:
    """Finds the functions of the operators that are not PyTorch's own."""
    for name in {name[0] for name, _ in pairs if not name[0].startswith("aten::")}:
        from eagercache.callables import custom_operators

        custom_operators.adopt(name)


def begin_operator(operator: CustomOperator[Any, Any]) -> None:
    """The first call of an operator that `eagercache.op` made: kernels may answer from now on.

    Where nothing was ever enabled, kernels are enabled for such operators alone.
    """
    settings = config.read_settings()
    if choices.is_inert(settings):
        return
    assert core is not None
    with session.lock:
        if session.configuration is None and not is_enabled():
            enable(ops=())
        elif is_enabled() and operator.identify():
            skipped = choices.skipped(settings, ())
            for name, key in operator.hooks():
                core.set_active(name[0], name[1], key, name not in skipped)


def _apply(chosen: Configuration) -> None:
    assert core is not None
    core.set_modules_training(chosen.training)
    held = session.configuration
    if held is None or replace(held, training=chosen.training) != chosen:
        core.set_policy(  # empties the tables of the operators, which training says nothing about
            chosen.on_miss,
            chosen.choose,
            chosen.numerics,
            replicas=chosen.replicas,
            shape_classes=True,
        )
    session.configuration = chosen


def _snapshot() -> Callable[[], None]:
    """A function that puts today's state back."""
    assert core is not None
    answering = core.answering()
    frozen = core.frozen()
    active = list(core.active_operators())
    chosen = session.configuration
    store = session.store
    store_identity = session.store_identity
    loaded = sys.modules.get("eagercache.modules.manager")
    selection = loaded.manager.selection if loaded is not None else None

    def restore() -> None:
        assert core is not None
        with session.lock:
            for name, overload, key in core.active_operators():
                if (name, overload, key) not in active:
                    core.set_active(name, overload, key, False)
            for name, overload, key in active:
                core.set_active(name, overload, key, True)
            session.store, session.store_identity = store, store_identity
            core.set_store(store)
            if chosen is not None:
                _apply(chosen)
            _select_modules(selection)
            core.set_answering(answering)
            if frozen:
                core.freeze()
            else:
                core.thaw()

    return restore


def _nothing() -> None:
    return None


def _switch_on(
    pairs: list[Any],
    chosen: Configuration,
    settings: config.Settings,
    cache_dir: str | os.PathLike[str] | None,
    remote: RemotePlan | None,
    *,
    named: bool,
) -> bool:
    """Opens the store, starts the service, sets the policy and lets the hooks answer."""
    assert core is not None
    log.set_level(settings.log)
    core.set_log_level(config.LOG_LEVELS[settings.log])
    core.set_verification_share(settings.verify)
    session.graph_bytes = settings.graph_bytes
    core.set_wait_seconds(settings.wait_seconds)
    child = _is_child_process()
    paths = stores.store_paths(settings, cache_dir)
    remembered = facts.Facts(paths[0])
    environment_text = environment.environment_text(cxx=settings.cxx, facts=remembered)
    store = stores.open_store(settings, paths, environment_text, read_only=child)
    if store is None:
        return False
    if not store.read_only and store.root == str(paths[0]):
        remembered.save()
    if child and chosen.on_miss != "native":
        chosen = replace(chosen, on_miss="native")
    core.thaw()
    changed_store = store is not session.store
    session.store = store
    core.set_store(store)
    if chosen.on_miss != "native":
        stores.say_what_hinders_compiling(store, settings, environment_text)
        compile_requests.start_service(settings, store, environment_text, chosen, remote)
    if changed_store:
        session.configuration = None  # another store may know other kernels: ask it
    _apply(chosen)
    if not named:
        pairs = left_native.choose(pairs, store, chosen)
        _switch_off_others(pairs)
    hooked = _register_pairs(pairs)
    for name, key in hooked:
        core.set_active(name[0], name[1], key, True)
    if not core.set_answering(True):
        warn_once(
            "forked",
            "this process was forked from one that used eagercache; it stays native. Use the "
            "spawn start method to have kernels in it.",
        )
        return False
    log.event(
        logging.INFO,
        "enable",
        operators=len(hooked),
        left_native=len(left_native.pairs),
        store=store.root,
        environment=store.environment_id,
        on_miss=chosen.on_miss,
        choose=chosen.choose,
        numerics=chosen.numerics,
        training=chosen.training,
    )
    return True


def _switch_off_others(hooked: Iterable[Any]) -> None:
    assert core is not None
    wanted = {(name[0], name[1], key) for name, key in hooked}
    for active in core.active_operators():
        if tuple(active) not in wanted:
            core.set_active(*active, False)


def enable(
    ops: str | Iterable[Any] | None = None,
    *,
    skip: str | Iterable[Any] = (),
    devices: Iterable[str] | None = None,
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

    A directory or a list that cannot be used is warned about once and everything stays native. May
    be called again: the newest call's operators, policy and store hold, and `freeze()` ends.
    Thread-safe.
    """
    if cache_dir is not None and not isinstance(cache_dir, (str, os.PathLike)):
        raise ValueError(f"cache_dir={cache_dir!r} is not the path of a directory, or None")
    if revoked is not None and not isinstance(revoked, (str, os.PathLike)):
        raise ValueError(f"revoked={revoked!r} is not the path of a file, or None")
    settings = config.read_settings()
    if choices.is_inert(settings):
        return Enabled(_nothing, active=False)
    if revoked is not None:
        settings = replace(settings, revoked=Path(revoked))
    assert core is not None
    with session.lock:
        chosen = choices.configuration(settings, on_miss, choose, numerics, training)
        keys = choices.dispatch_keys(devices)
        if modules is not None:
            _check_modules(modules)
        plan = choices.remote_plan(settings, remote)
        skipped = choices.skipped(settings, skip)
        pairs = choices.selected(ops, skipped, keys)
        _adopt_functions(pairs)
        pairs += [pair for pair in _function_hooks(skipped) if pair[1] in keys]
        restore = _snapshot()
        session.enables += 1
        _switch_off_others(pairs)
        named = ops not in (None, "default", "all")
        active = _switch_on(pairs, chosen, settings, cache_dir, plan, named=named)
        _select_modules(modules if active else None)
        if active and settings.metrics is not None:
            metrics_file.start(settings.metrics)
        return Enabled(restore, active=active)


def _check_modules(selection: Any) -> None:
    from eagercache.modules import selection as module_selection

    module_selection.check_selection(selection)


def _select_modules(selection: Any) -> None:
    """Changes what modules are watched; where none ever was, nothing is imported for it."""
    if selection is None and "eagercache.modules.manager" not in sys.modules:
        return
    from eagercache.modules.manager import manager

    manager.select(selection)


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
    if choices.is_inert(settings):
        return model
    from eagercache.modules.manager import manager

    with session.lock:
        if not is_enabled():
            enable(**{"ops": (), "training": bool(training), **options})
        elif options:
            raise ValueError(
                f"accelerate({next(iter(options))}=...): eagercache is enabled already; give the "
                "option to enable()"
            )
        elif training is not None and session.configuration is not None:
            _apply(replace(session.configuration, training=training))
        if is_enabled():
            manager.add(model)
    return model


def register(op: Any, dispatch_key: str = "CPU") -> None:
    """Hooks one operator (all eligible overloads when none is named) at a dispatch key.

    The primitive under `enable()`. The operator joins those that are enabled; when nothing is,
    kernels start to answer with the default settings. Registering it again does nothing.

    Raises:
        ValueError: the operator does not exist or cannot be accelerated; the message says why.
    """
    settings = config.read_settings()
    if choices.is_inert(settings):
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
        if is_enabled():
            for name, key in _register_pairs(pairs):
                core.set_active(name[0], name[1], key, True)
            return
        chosen = choices.configuration(settings, "background", "faster", "accurate")
        plan = choices.remote_plan(settings, None)
        _switch_on(pairs, chosen, settings, None, plan, named=True)


def disable() -> None:
    """Routes every call to native, at once, in all threads.

    Overrides stay registered: taking one away under load would crash PyTorch. Kernels under way are
    finished and stored.
    """
    if core is not None:
        core.set_answering(False)
        log.event(logging.INFO, "disable")


def freeze() -> None:
    """From here on no call is answered by a kernel that did not answer such calls before.

    Kernels in use go on answering. Every other call is native's, and nothing is looked up or
    compiled for it. Holds in all threads once it has returned; kernels that are being made are
    finished and stored, for later processes. The next `enable()` ends it.
    """
    if core is not None:
        core.freeze()
        log.event(logging.INFO, "freeze", kernels=core.loaded_kernels())


def is_frozen() -> bool:
    """Whether `freeze()` holds."""
    return core is not None and bool(core.frozen())


def _close() -> None:
    """At exit: no thread of ours enters Python any more, workers are gone within two seconds."""
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


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=session.after_fork)


callbacks.begin_operator = begin_operator
