"""Moving all entries of an environment at once: what `eagercache pull`, `push` and `sync` do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from eagercache.base import environment
from eagercache.base.load import core
from eagercache.base.machine_kind import UNTRIED
from eagercache.remote import catalogue
from eagercache.remote.entries import Exchange, Refused, shortened
from eagercache.remote.place import PlaceError
from eagercache.remote.tier import Tier

PARALLEL = 8
MISSING_REMEDY = "look at the URL, or fill it with `eagercache push`"
_TROUBLE: tuple[type[Exception], ...] = (
    (PlaceError,) if core is None else (PlaceError, core.StoreError)
)

# Called with entries that are done and all there are.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Unusable:
    """Entries of a remote that are of other machines than this one.

    Attributes:
        remote: the remote's URL.
        entries: how many there are.
        fields: why: (field, their value, ours).
    """

    remote: str
    entries: int
    fields: tuple[tuple[str, str, str], ...]


@dataclass
class Transfer:
    """What came of a transfer.

    Attributes:
        fetched: entries that the store got.
        untried: of what it has of the remotes, the entries of another kind of machine, which are
            tried before they are used.
        present: entries of the remotes that it had.
        sent: entries that a remote got.
        refused: entries that must not be used or cannot be, by kind (see `Refused`).
        missing: entries that a remote lists and does not have.
        unusable: entries for other machines.
        errors: what did not work, each once, with the remote's URL.
        bytes_read, bytes_sent: of entries, objects and lists.
    """

    fetched: int = 0
    untried: int = 0
    present: int = 0
    sent: int = 0
    missing: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unusable: list[Unusable] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_sent: int = 0

    @property
    def used(self) -> int:
        """Entries of the remotes that this machine has now."""
        return self.fetched + self.present

    def note_error(self, tier: Tier, error: Exception) -> None:
        """Remembers what did not work, once for all entries."""
        text = f"{tier.shown}: {error}"
        if text not in self.errors:
            self.errors.append(text)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "used": self.used,
            "fetched": self.fetched,
            "untried": self.untried,
            "present": self.present,
            "sent": self.sent,
            "missing": self.missing,
            "refused": dict(self.refused),
            "unusable": [
                {
                    "remote": one.remote,
                    "entries": one.entries,
                    "fields": [
                        {"field": name, "remote": theirs, "here": ours}
                        for name, theirs, ours in one.fields
                    ],
                }
                for one in self.unusable
            ],
            "errors": self.errors,
            "bytes_read": self.bytes_read,
            "bytes_sent": self.bytes_sent,
        }


def pull(
    tiers: Sequence[Tier],
    exchange: Exchange,
    progress: OnProgress = lambda done, of: None,
    *,
    may_be_missing: bool = False,
) -> Transfer:
    """Takes into the store what remotes list for this environment. Never raises for a remote.

    A place that is not there is an error, unless it ``may_be_missing``: then it is as an empty one.
    """
    transfer = Transfer()
    entries = _verdicts(exchange.store)
    had = frozenset(entry["key"] for entry in entries)
    untried = frozenset(entry["key"] for entry in entries if UNTRIED in entry["facts"])
    counted: set[str] = set()
    for tier in tiers:
        try:
            if not may_be_missing:
                _require(tier)
            keys = [key for key in catalogue.keys(tier, exchange.identity) if key not in counted]
            transfer.untried += len(untried.intersection(keys))
            counted.update(_take(tier, exchange, keys, had, transfer, progress))
            transfer.unusable.extend(unusable(tier, exchange.text))
        except PlaceError as error:
            transfer.note_error(tier, error)
        transfer.bytes_read += tier.bytes_read
    return transfer


def _require(tier: Tier) -> None:
    what = tier.missing()
    if what is not None:
        raise PlaceError(f"{what}; {MISSING_REMEDY}")


def _take(
    tier: Tier,
    exchange: Exchange,
    keys: Sequence[str],
    had: frozenset[str],
    transfer: Transfer,
    progress: OnProgress,
) -> Iterator[str]:
    """Takes entries in; the keys that the store has then."""
    wanted = [key for key in keys if key not in had]
    transfer.present += len(keys) - len(wanted)
    yield from (key for key in keys if key in had)

    def fetch(key: str) -> str | None:
        return exchange.fetch(tier, key)

    for key, verdict, error in _all(fetch, wanted, progress):
        if isinstance(error, Refused):
            transfer.refused[error.kind] += 1
        elif error is not None:
            transfer.note_error(tier, error)
        elif verdict is None:
            transfer.missing += 1
        else:
            transfer.fetched += 1
            transfer.untried += verdict == "untried"
            yield key


def push(
    tiers: Sequence[Tier],
    exchange: Exchange,
    progress: OnProgress = lambda done, of: None,
    *,
    expires: int = 0,
) -> Transfer:
    """Puts the store's entries into remotes without them. Never raises for a remote.

    ``expires``: what is sent holds until then, in seconds since 1970; 0: for ever.
    """
    transfer = Transfer()
    keys = sorted(entry["key"] for entry in _verdicts(exchange.store))
    for tier in tiers:
        before = tier.bytes_read

        def send(key: str, tier: Tier = tier) -> bool:
            return exchange.send(tier, key, expires=expires)

        there = []
        for key, sent, error in _all(send, keys, progress):
            if error is not None:
                transfer.note_error(tier, error)
                continue
            there.append(key)
            transfer.sent += bool(sent)
        try:
            if there:
                exchange.list_sent(tier, there)
        except _TROUBLE as error:
            transfer.note_error(tier, error)
        transfer.bytes_read += tier.bytes_read - before
        transfer.bytes_sent += tier.bytes_sent
    return transfer


def unusable(tier: Tier, text: str) -> list[Unusable]:
    """What a remote lists for machines with which this one shares nothing. Raises PlaceError."""
    own = catalogue.environment_id(text)
    rows = []
    for identity in catalogue.environments(tier):
        if identity == own:
            continue
        theirs = catalogue.text_of(tier, identity)
        count = len(catalogue.keys(tier, identity))
        if theirs is None or not count:
            continue
        differing = environment.mismatches(theirs, text, environment.SHARED_FIELDS)
        fields = ((name, shortened(there), shortened(here)) for name, there, here in differing)
        rows.append(Unusable(tier.shown, count, tuple(fields)))
    return rows


def _verdicts(store: Any) -> list[dict[str, Any]]:
    """The store's kernels and decisions for native; failures stay where they happened."""
    return [entry for entry in store.entries() if entry["kind"] != "failed"]


def _all(
    work: Callable[[str], Any], keys: Sequence[str], progress: OnProgress
) -> Iterable[tuple[str, Any, Exception | None]]:
    """(key, result, error) of every key, some at a time, in the order of keys."""
    assert core is not None
    expected = (Refused, PlaceError, core.StoreError)

    def one(key: str) -> tuple[str, Any, Exception | None]:
        try:
            return key, work(key), None
        except expected as error:
            return key, None, error

    pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="eagercache-remote")
    try:
        for done, row in enumerate(pool.map(one, keys), start=1):
            progress(done, len(keys))
            yield row
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for what is under way alone
