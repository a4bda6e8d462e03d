"""Where the service meets remotes: a key is looked up there before a worker is asked for it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from eagercache.base.load import core
from eagercache.service.request import Request, Response
from eagercache.service.settings import ServiceSettings

if TYPE_CHECKING:
    from eagercache.remote.desk import RemoteDesk


class RemoteDesks:
    """The desks of a service: one for the settings of now, closed when other ones come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._desk: RemoteDesk | None = None
        self._of: tuple[Any, ...] = ()
        self._closed = False
        self._before: Counter[str] = Counter()  # of desks that were closed
        self._refused: Counter[str] = Counter()

    def desk_for(self, settings: ServiceSettings) -> RemoteDesk | None:
        """The desk for these settings; None where they name no remote. Asks nobody anything."""
        wanted = (
            settings.remote,
            settings.store_root,
            settings.environment,
            settings.max_bytes,
            settings.allow_untrusted,
            settings.revoked,
        )
        with self._lock:
            if self._closed:
                return None
            if self._of == wanted:
                return self._desk
            closing, self._of = self._desk, wanted
            desk = self._desk = _open(settings)
            self._add_locked(closing)
        if closing is not None:
            closing.close()
        return desk

    def counts(self) -> dict[str, Any]:
        """What was asked of all remotes: the sums of `RemoteDesk.counts`."""
        with self._lock:
            total, refused = Counter(self._before), Counter(self._refused)
            now = self._desk.counts() if self._desk is not None else {}
        refused.update(now.pop("refused", {}))
        total.update(now)
        return {**total, "refused": refused}

    def close(self) -> None:
        """Answers what waits; from now on there is no desk."""
        with self._lock:
            self._closed = True
            desk = self._desk
        if desk is not None:
            desk.close()

    def _add_locked(self, desk: RemoteDesk | None) -> None:
        if desk is not None:
            counts = desk.counts()
            self._refused.update(counts.pop("refused"))
            counts.pop("unsent")
            self._before.update(counts)


def _open(settings: ServiceSettings) -> RemoteDesk | None:
    if settings.remote is None:
        return None
    from eagercache.remote.desk import RemoteDesk

    def open_store() -> Any:
        assert core is not None
        return core.Store(
            settings.store_root,
            settings.environment,
            allow_untrusted=settings.allow_untrusted,
            max_bytes=settings.max_bytes,
            revoked=settings.revoked,
        )

    return RemoteDesk(settings.remote, open_store, settings.environment)


def may_be_remote(request: Request) -> bool:
    """Whether another machine can have answered; a measurement that is made again is this one's."""
    return not request.again and bool(request.description.get("digest"))


def found_response(request: Request, verdict: str) -> Response:
    """The answer to a request whose entry the store has now."""
    return {
        "id": request.description.get("id"),
        "digest": request.description.get("digest"),
        "verdict": verdict,
        "reason": "",
        "found": True,
        "seconds": {},
    }
