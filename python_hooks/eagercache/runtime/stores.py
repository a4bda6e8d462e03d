"""Which store an enabling opens."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagercache.base import config, environment, store_directory, toolchain
from eagercache.base.load import core
from eagercache.base.warn import warn_once
from eagercache.runtime.session import session


def store_paths(settings: config.Settings, cache_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Where a store may be, the first choice first."""
    explicit = Path(cache_dir) if cache_dir is not None else settings.directory
    if explicit is not None:
        return [explicit.absolute()]
    return store_directory.candidates(os.environ, os.getuid())


def open_at(
    path: Path, settings: config.Settings, environment_text: str, *, read_only: bool
) -> Any:
    """The store at ``path``. Raises StoreError."""
    assert core is not None
    for named in (path, *settings.tiers):
        if not store_directory.has_utf8_name(named):
            error = core.StoreError(f"{str(named)!r} has a name that is not UTF-8; use another one")
            error.code = "invalid_argument"
            raise error
    return core.Store(
        str(path),
        environment_text,
        read_only=read_only,
        tiers=[str(tier.absolute()) for tier in settings.tiers],
        allow_untrusted=settings.allow_untrusted,
        max_bytes=settings.max_bytes,
        revoked=settings.revoked_text,
    )


def first_usable_store(
    settings: config.Settings, paths: Iterable[Path], environment_text: str, *, read_only: bool
) -> tuple[Any, Path | None, list[str]]:
    """The first of `paths` that opens as a store, its path, and what was wrong with those before.

    None twice where none does.
    """
    assert core is not None
    problems = []
    for path in paths:
        try:
            store = open_at(path, settings, environment_text, read_only=read_only)
        except core.StoreError as error:
            problems.append(f"{path}: {error}")
        else:
            return store, path, problems
    return None, None, problems


def open_store(
    settings: config.Settings, paths: Iterable[Path], environment_text: str, read_only: bool
) -> Any:
    """The session's store where it is one of these; else the first that can be used.

    None after a warning with the remedy.
    """
    assert core is not None
    paths = list(paths)
    revoked = b""
    if settings.revoked is not None:
        try:
            core.check_revocations(settings.revoked_text)
            revoked = settings.revoked.read_bytes()
        except (core.StoreError, OSError, ValueError) as error:
            warn_once(
                f"revoked:{error}",
                f"{error}. Until then no kernel is used, and everything stays native.",
            )
            return None
    known = [(path, environment_text, revoked) for path in paths]
    if session.store is not None and session.store_identity in known:
        return session.store
    store, path, problems = first_usable_store(
        settings, paths, environment_text, read_only=read_only
    )
    if store is not None and path is not None:
        session.store_identity = (path, environment_text, revoked)
        _say_whom_it_trusts(store)
        return store
    warn_once(
        "store:" + ";".join(problems),
        "no kernel store can be used, so everything stays native. "
        + "; ".join(problems)
        + ". Set EAGERCACHE_DIR to a directory that belongs to you and that only you may write.",
    )
    return None


def say_what_hinders_compiling(
    store: Any, settings: config.Settings, environment_text: str
) -> None:
    """Warns once where calls without a kernel will have none: of the store, of the compiler."""
    if store.read_only:
        warn_once(
            f"read-only:{store.root}",
            f"the store {store.root} can only be read: its kernels are used, and none is added. "
            "Set EAGERCACHE_DIR to a directory that you may write, or on_miss='native'.",
        )
    if environment.parse(environment_text).get("compiler.version") == "none":
        try:
            toolchain.find_compiler(settings.cxx)
        except toolchain.ToolchainError as error:
            warn_once("compiler", f"{error}. Until then no kernel for CPU is made.")


def _say_whom_it_trusts(store: Any) -> None:
    for root in store.untrusted_roots:
        warn_once(
            f"untrusted:{root}",
            f"EAGERCACHE_ALLOW_UNTRUSTED is set, and other users may write {root}: whoever does "
            "can run code in this process.",
        )
    for problem in store.tier_problems:
        warn_once(f"tier:{problem}", f"a store of EAGERCACHE_TIERS is not used: {problem}")
