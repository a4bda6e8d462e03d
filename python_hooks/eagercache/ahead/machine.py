"""The store and the compile service of a machine that warms up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from eagercache.ahead.errors import WarmError
from eagercache.base import config, environment, facts
from eagercache.base.load import core
from eagercache.runtime import stores
from eagercache.service.service import CompileService
from eagercache.service.settings import ServiceSettings, for_gpu


def open_store(
    settings: config.Settings, cache_dir: str | os.PathLike[str] | None
) -> tuple[Any, str]:
    """The store to publish in, and the environment key's text. Raises WarmError."""
    assert core is not None
    paths = stores.store_paths(settings, cache_dir)
    remembered = facts.Facts(paths[0])
    text = environment.environment_text(cxx=settings.cxx, facts=remembered)
    store, path, problems = stores.first_usable_store(settings, paths, text, read_only=False)
    if store is not None:
        if path == paths[0]:
            remembered.save()
        return store, text
    raise WarmError(
        f"no store can be used ({'; '.join(problems)}); name one of your own with --dir"
    )


def compile_service(
    settings: config.Settings,
    root: str,
    text: str,
    *,
    choose: str,
    numerics: str,
    search: str,
    workers: int,
    slots: int = 0,
    keys: Sequence[str],
) -> CompileService:
    """A service whose workers publish in the store at ``root``; keys are of the dispatcher."""
    for_cpu = ServiceSettings(
        store_root=root,
        environment=text,
        choose=choose,
        numerics=numerics,
        search=search,
        workers=workers,
        slots=max(slots or workers, settings.slots),
        cxx=settings.cxx,
        awaited=True,
        max_bytes=settings.max_bytes,
        allow_untrusted=settings.allow_untrusted,
        revoked=settings.revoked_text,
    )
    return CompileService(for_gpu(for_cpu, 0) if "CUDA" in keys else for_cpu)
