"""What becomes of requests that are open when the program ends: they stay in the store.

A later process goes on with them: one that is started here, where that is wanted, or `eagercache
warm`. The program itself waits for nothing.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from eagercache.base import environment, log
from eagercache.base.load import core
from eagercache.base.store_directory import PENDING_FOLDER
from eagercache.runtime.session import session


def leave() -> None:
    """At exit, once the services are closed. Never raises."""
    try:
        _leave()
    except Exception as error:
        log.LOGGER.warning("what was being compiled could not be left for later: %s", error)


def _leave() -> None:
    if multiprocessing.parent_process() is not None:
        return  # such processes never write to the store
    chosen, place = session.configuration, _place()
    if core is None or chosen is None or chosen.on_miss == "native" or core.frozen():
        return
    if place is None or not os.access(place[0], os.W_OK):
        return
    root, text = place
    mine = [
        request
        for service in session.services()
        for request in service.left_open
        if (request.settings.store_root, request.settings.environment) == place
    ]
    anything = bool(mine) or (Path(root) / PENDING_FOLDER).is_dir()
    if not anything or environment.parse(text).get("compiler.version") == "none":
        return
    # Imported here: most programs have nothing to leave.
    from eagercache.service import lingering
    from eagercache.service.pending import PendingFolder
    from eagercache.service.settings import ServiceSettings

    folder = PendingFolder(root)
    written = folder.write(mine, text, _gpus())
    if mine:
        log.event(logging.INFO, "left_open", requests=len(mine), written=written)
    seconds = lingering.SECONDS if session.linger is None else session.linger
    if may_linger(session.linger, os.environ) and folder.count(text)[0] > 0:
        lingering.start(ServiceSettings(store_root=root, environment=text), seconds)


def _gpus() -> dict[int | None, str]:
    """The UUIDs of the GPUs that were compiled for, by this process's count."""
    found: dict[int | None, str] = {}
    for index in session.cuda_services:
        with contextlib.suppress(Exception):  # a broken context says so with errors of many kinds
            found[index] = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return found


def _place() -> tuple[str, str] | None:
    """Root and environment of the store that was compiled for, also once `enable` was undone."""
    if session.service is not None:
        settings = session.service.settings
        return settings.store_root, settings.environment
    if session.store is None or session.store_identity is None:
        return None
    return session.store.root, session.store_identity[1]


def may_linger(wish: float | None, environ: Mapping[str, str]) -> bool:
    """Whether a process may be started that outlives this one; ``wish`` is EAGERCACHE_LINGER."""
    if wish == 0 or multiprocessing.parent_process() is not None or os.getpid() == 1:
        return False  # of a container nothing outlives the first process
    if wish is not None:
        return True
    chosen = session.configuration
    in_job = chosen is not None and chosen.replicas
    tested = "pytest" in sys.modules or "PYTEST_CURRENT_TEST" in environ
    return not (in_job or tested or environ.get("CI"))
