"""Kernels switched on and off in this process: policy, store, hooks, modules, and the way back."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from eagercache.base import config, environment, facts, log, operators
from eagercache.base.load import core
from eagercache.base.warn import warn_once
from eagercache.remote.plan import RemotePlan
from eagercache.runtime import compile_requests, stores
from eagercache.runtime.left_native import left_native
from eagercache.runtime.reimplemented import is_reimplemented, watch_libraries
from eagercache.runtime.session import Configuration, session


def _is_child_process() -> bool:
    """Whether multiprocessing started this process (a DataLoader worker, a pool).

    Such a process never compiles or writes; the main one does.
    """
    return multiprocessing.parent_process() is not None


def register_pairs(pairs: Iterable[tuple[operators.OperatorName, str]]) -> list[Any]:
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


def function_hooks(skip: set[operators.OperatorName]) -> list[Any]:
    """What `eagercache.op` made and kernels may answer; where nothing was made, not imported."""
    loaded = sys.modules.get("eagercache.callables.custom_operators")
    if loaded is None:
        return []
    return [(name, key) for name, key in loaded.fit_hooks() if name not in skip]


def adopt_functions(pairs: Iterable[tuple[operators.OperatorName, str]]) -> None:
    """Finds the functions of the operators that are not PyTorch's own."""
    for name in {name[0] for name, _ in pairs if not name[0].startswith("aten::")}:
        from eagercache.callables import custom_operators

        custom_operators.adopt(name)


def watch_operators() -> None:
    """Has functions answer by themselves while the program implements ATen's operators anew."""
    watch_libraries(_look_at_operators)
    _look_at_operators()


def _look_at_operators() -> None:
    assert core is not None
    core.set_functions_aside(is_reimplemented())


def apply_configuration(chosen: Configuration) -> None:
    """Tells the core a configuration, and keeps it."""
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
            trials=chosen.trials and chosen.choose == "faster",
        )
    session.configuration = chosen


def snapshot() -> Callable[[], None]:
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
                apply_configuration(chosen)
            select_modules(selection)
            core.set_answering(answering)
            if frozen:
                core.freeze()
            else:
                core.thaw()

    return restore


def switch_on(
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
    apply_configuration(chosen)
    if not named:
        pairs = left_native.choose(pairs, store, chosen)
        switch_off_others(pairs)
    hooked = register_pairs(pairs)
    if any(not name[0].startswith("aten::") for name, _ in hooked):
        watch_operators()
    for name, key in hooked:
        core.set_active(name[0], name[1], key, True)
    if not core.set_answering(True):
        warn_once(
            "forked",
            "this process was forked from one that used eagercache; it stays native. Use the "
            "spawn start method to have kernels in it.",
        )
        return False
    _log_enabled(store, chosen, len(hooked))
    return True


def _log_enabled(store: Any, chosen: Configuration, operators: int) -> None:
    log.event(
        logging.INFO,
        "enable",
        operators=operators,
        left_native=len(left_native.pairs),
        store=store.root,
        environment=store.environment_id,
        on_miss=chosen.on_miss,
        choose=chosen.choose,
        numerics=chosen.numerics,
        training=chosen.training,
    )


def switch_off_others(hooked: Iterable[Any]) -> None:
    """Leaves no hooks active but the given ones."""
    assert core is not None
    wanted = {(name[0], name[1], key) for name, key in hooked}
    for active in core.active_operators():
        if tuple(active) not in wanted:
            core.set_active(*active, False)


def check_modules(selection: Any) -> None:
    """Raises ValueError for what names no modules."""
    from eagercache.modules import selection as module_selection

    module_selection.check_selection(selection)


def select_modules(selection: Any) -> None:
    """Changes what modules are watched; where none ever was, nothing is imported for it."""
    if selection is None and "eagercache.modules.manager" not in sys.modules:
        return
    from eagercache.modules.manager import manager

    manager.select(selection)
