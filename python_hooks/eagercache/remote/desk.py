"""Remotes beside a running program: keys are looked up, and what was compiled is sent.

All of it happens on a few daemon threads of its own. Nobody waits for them but whoever waits for a
kernel, and the end of the program waits for nobody: what was not sent by then is sent by
`eagercache push`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eagercache.base.load import core
from eagercache.base.log import event
from eagercache.remote import catalogue
from eagercache.remote.entries import Exchange, Refused
from eagercache.remote.listings import Listings
from eagercache.remote.place import PlaceError
from eagercache.remote.plan import RemotePlan
from eagercache.remote.tier import Tier

log = logging.getLogger("eagercache")

_TROUBLE: tuple[type[Exception], ...] = (
    (PlaceError,) if core is None else (PlaceError, core.StoreError)
)

THREADS = 4
# Keys that wait to be sent; those beyond are left to `eagercache push`.
MOST_WAITING = 1000


@dataclass(frozen=True)
class LookedUp:
    """What came of looking a key up.

    Attributes:
        verdict: "kernel" or "native" where the store has it now, else "", as where a worker has to
            try first what the store has.
        refused: whether a remote has something under the key that was refused.
    """

    verdict: str = ""
    refused: bool = False


@dataclass
class Counts:
    """What was asked of remotes. Guarded by the desk's lock.

    ``errors`` counts keys, not attempts: those that no remote had and one did not answer for, and
    those that could not be sent. A remote that has been silent counts without being asked.
    """

    hits: int = 0
    untried: int = 0  # of the hits, those that another kind of machine made
    misses: int = 0
    errors: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by kind, see `Refused`
    sent: int = 0


OnLookedUp = Callable[[LookedUp], None]


class RemoteDesk:
    """Looks keys up and sends entries, for one store and one plan. Thread-safe."""

    def __init__(
        self,
        plan: RemotePlan,
        open_store: Callable[[], Any],
        environment_text: str,
        tiers: list[Tier] | None = None,
    ) -> None:
        self.plan = plan
        self._open_store = open_store
        self._text = environment_text
        self._tiers = [Tier(url) for url in plan.urls] if tiers is None else tiers
        self._listings = Listings(catalogue.environment_id(environment_text))
        # Guards everything below.
        self._changed = threading.Condition()
        self._lookups: deque[tuple[str, OnLookedUp]] = deque()
        self._unsent: deque[tuple[str, bool]] = deque()
        self._sending = 0  # keys that threads are at; they are in `_unsent` no longer
        self._unlisted: set[str] = set()  # keys that were sent and are in no list yet
        self._threads = 0
        self._idle = 0
        self._closed = False
        self._exchange: Exchange | None = None
        self._said: set[tuple[str, str]] = set()
        self._counts = Counts()

    def look_up(self, key: str, done: OnLookedUp) -> None:
        """Asks the remotes in order for a key's entry, and publishes it in the store.

        ``done`` is called once, on a thread of the desk, or at once where it has none.
        """
        with self._changed:
            taken = not self._closed and self._start_thread_locked()
            if taken:
                self._lookups.append((key, done))
                self._changed.notify()
        if not taken:
            done(LookedUp())

    def offer(self, key: str, *, replace: bool) -> None:
        """Sends an entry that this machine has made, where there is a key to sign it with."""
        if self.plan.key is None:
            return
        with self._changed:
            if self._closed or len(self._unsent) >= MOST_WAITING:
                return
            if self._start_thread_locked():
                self._unsent.append((key, replace))
                self._changed.notify()

    def counts(self) -> dict[str, Any]:
        """What was asked so far, and the bytes of it; ``unsent`` has what is on its way, too."""
        with self._changed:
            counts = self._counts
            return {
                "hits": counts.hits,
                "untried": counts.untried,
                "misses": counts.misses,
                "errors": counts.errors,
                "refused": Counter(counts.refused),
                "sent": counts.sent,
                "unsent": len(self._unsent) + self._sending,
                "requests": sum(tier.requests for tier in self._tiers),
                "request_seconds": sum(tier.request_seconds for tier in self._tiers),
                "bytes_read": sum(tier.bytes_read for tier in self._tiers),
                "bytes_sent": sum(tier.bytes_sent for tier in self._tiers),
            }

    def close(self) -> None:
        """Begins nothing more; what waits to be looked up is answered, what is under way later."""
        with self._changed:
            self._closed = True
            waiting = [done for _, done in self._lookups]
            self._lookups.clear()
            self._changed.notify_all()
        for done in waiting:
            done(LookedUp())

    def _start_thread_locked(self) -> bool:
        if self._idle > len(self._lookups) + len(self._unsent) or self._threads == THREADS:
            return True
        name = f"eagercache-remote-{self._threads}"
        try:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        except RuntimeError:
            return self._threads > 0
        self._threads += 1
        return True

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not (self._closed or self._lookups or self._unsent or self._may_list()):
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    return
                lookup = self._lookups.popleft() if self._lookups else None
                unsent = self._unsent.popleft() if lookup is None and self._unsent else None
                self._sending += unsent is not None
                keys = frozenset(self._unlisted) if lookup is None and unsent is None else None
                if keys is not None:
                    self._unlisted.clear()
            try:
                if lookup is not None:
                    self._look_up(*lookup)
                elif unsent is not None:
                    self._send(*unsent)
                elif keys:
                    self._list(keys)
            except Exception:
                log.exception("a remote could not be asked as it should")

    def _may_list(self) -> bool:
        """Whether lists are to be written: something was sent, and nothing is on its way."""
        return bool(self._unlisted) and self._idle == self._threads

    def _look_up(self, key: str, done: OnLookedUp) -> None:
        answer = LookedUp()
        try:
            answer = self._ask_all(key)
        finally:  # somebody may be waiting
            done(answer)

    def _ask_all(self, key: str) -> LookedUp:
        failed = refused = False
        for tier in self._tiers:
            if self._listings.lacks(tier, key, len(self._lookups)):
                continue
            try:
                verdict = self._own_exchange().fetch(tier, key)
            except Refused as error:
                refused = True
                self._note_refused(tier, key, error)
            except _TROUBLE as error:
                failed = True
                self._note_error(tier, key, error)
            else:
                if verdict is not None:
                    with self._changed:
                        self._counts.hits += 1
                        self._counts.untried += verdict == "untried"
                    event(
                        logging.INFO, "remote_hit", remote=tier.shown, digest=key, verdict=verdict
                    )
                    return LookedUp("" if verdict == "untried" else verdict, refused)
        with self._changed:
            if failed:
                self._counts.errors += 1
            elif not refused:
                self._counts.misses += 1
        if not failed and not refused:
            event(logging.DEBUG, "remote_miss", digest=key)
        return LookedUp(refused=refused)

    def _own_exchange(self) -> Exchange:
        """Opened by the first request; two threads may both open it, which does no harm."""
        if self._exchange is None:
            self._exchange = Exchange(self._open_store(), self._text, self.plan)
        return self._exchange

    def _send(self, key: str, replace: bool) -> None:
        try:
            self._send_to_all(key, replace)
        finally:
            with self._changed:
                self._sending -= 1

    def _send_to_all(self, key: str, replace: bool) -> None:
        for tier in self._tiers:
            if not tier.writable:
                continue
            try:
                sent = self._own_exchange().send(tier, key, replace=replace)
            except _TROUBLE as error:
                if tier.writable:
                    with self._changed:
                        self._counts.errors += 1
                    self._note_error(tier, key, error)
                continue
            with self._changed:
                self._counts.sent += sent
                self._unlisted.add(key)
            if sent:
                event(logging.INFO, "remote_sent", remote=tier.shown, digest=key)

    def _list(self, keys: frozenset[str]) -> None:
        for tier in self._tiers:
            if tier.writable:
                try:
                    self._own_exchange().list_sent(tier, keys)
                except _TROUBLE as error:
                    event(logging.INFO, "remote_error", remote=tier.shown, reason=error)

    def _note_refused(self, tier: Tier, key: str, error: Refused) -> None:
        with self._changed:
            self._counts.refused[error.kind] += 1
            first = (tier.shown, error.kind) not in self._said
            self._said.add((tier.shown, error.kind))
        level = logging.WARNING if first else logging.INFO
        event(level, "remote_refused", remote=tier.shown, digest=key, kind=error.kind, reason=error)

    @staticmethod
    def _note_error(tier: Tier, key: str, error: Exception) -> None:
        event(logging.INFO, "remote_error", remote=tier.shown, digest=key, reason=error)
