"""What becomes of requests that are open when the program ends: they stay in the store.

A later process goes on with them: one that is started here, where that is wanted, or `eagercache
warm`. The program itself waits for nothing.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping

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
    store, chosen, identity = session.store, session.configuration, session.store_identity
    if core is None or store is None or chosen is None or identity is None:
        return
    if store.read_only or chosen.on_miss == "native" or core.frozen():
        return
    # The services of GPUs are not among them: whether a GPU is free only a program on it can tell.
    service = session.service
    open_requests = service.left_open if service is not None else []
    text = identity[1]
    anything = bool(open_requests) or os.path.lexists(os.path.join(store.root, PENDING_FOLDER))  # noqa: PTH118
    if not anything or environment.parse(text).get("compiler.version") == "none":
        return
    # Imported here: most programs have nothing to leave.
    from eagercache.service import lingering
    from eagercache.service.pending import PendingFolder
    from eagercache.service.settings import ServiceSettings

    folder = PendingFolder(store.root)
    mine = [
        request
        for request in open_requests
        if (request.settings.store_root, request.settings.environment) == (store.root, text)
    ]
    written = folder.write(mine, text)
    if mine:
        log.event(logging.INFO, "left_open", requests=len(mine), written=written)
    seconds = lingering.SECONDS if session.linger is None else session.linger
    if not may_linger(session.linger, os.environ) or folder.count(text)[0] == 0:
        return
    lingering.start(ServiceSettings(store_root=store.root, environment=text), seconds)


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
