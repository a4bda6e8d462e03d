"""Signed lists of what is newest in a remote, so that its server cannot go back to older entries.

Each signer has one for each environment: `v1/ENVIRONMENT/i/SIGNER` is a signed entry of a key that
no call has. It holds a sequence number, which only grows, and the digest of the list, which lies
beside it: a line for each key with the time at which its newest entry was signed. A reader refuses
an entry that is older than its line, and a list that is older than one that it has seen before, or
gone. What is not listed yet is taken.

The list lies at one of two names, by turns: who reads while another is written finds its own.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagercache.base.load import core
from eagercache.remote.place import PlaceError, TooLarge
from eagercache.remote.sequences import Sequences
from eagercache.remote.tier import Tier

_MOST_LIST_BYTES = 32 << 20
_FRESH_SECONDS = 600.0  # a list that was read is believed for so long before it is read again
_LINE = re.compile(r"([0-9a-f]{64}) ([0-9]{1,18})")
_HEAD_BYTES = 32 + 64  # public key and signature, behind the first line


class WentBack(Exception):
    """A remote has something that is older than what its signer has shown before."""


class Torn(PlaceError):
    """A remote's list is not the one that its record has the digest of.

    Attributes:
        sequence: the record's number.
    """

    def __init__(self, sequence: int) -> None:
        super().__init__("its signer's list is not the one that was signed")
        self.sequence = sequence


@dataclass(frozen=True)
class _Index:
    sequence: int
    signed: Mapping[str, int]  # seconds since 1970 by key


@dataclass
class Indices:
    """The lists of an environment in remotes. Thread-safe.

    Attributes:
        identity, text: the environment's folder in a remote, and its key.
        revoked: the list of what is not to be believed any more; "": none.
        sequences: what this machine has seen.
    """

    identity: str
    text: str
    revoked: str
    sequences: Sequences
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _read: dict[tuple[str, str], tuple[float, _Index | WentBack | None]] = field(
        default_factory=dict, repr=False
    )

    def check(self, tier: Tier, key: str, signer: str, content: bytes) -> None:
        """Raises WentBack for an entry that must not be used, PlaceError where nobody knows."""
        index = self._fresh(tier, signer)
        newest = index.signed.get(key) if index is not None else None
        if newest is not None and signed_at(content) < newest:
            raise WentBack("its signer lists a newer one")

    def add(self, tier: Tier, signer: str, signed: Mapping[str, int], key: str) -> None:
        """Lists entries, which ``key`` has signed. Raises PlaceError, and StoreError of the core.

        A remote that went back, or whose list is torn, gets these alone, under a higher number than
        ever.
        """
        before, last = None, 0
        try:
            before = self._get(tier, signer)
        except WentBack:
            pass
        except Torn as error:  # two that wrote at once: nobody can read it before it is mended
            last = error.sequence
        if before is not None and all(before.signed.get(k) == at for k, at in signed.items()):
            return
        name = self._name(tier, signer)
        last = before.sequence if before else last
        known = max(last, self.sequences.highest(name))
        # The time, so that who starts from nothing is not behind of what others remember.
        sequence = max(known + 1, int(time.time() * 1000))
        # Not over the list that the record is of: who writes may end before the record is there.
        sequence += (sequence - last) % 2 == 0
        index = _Index(sequence, {**(before.signed if before else {}), **signed})
        lines = "".join(f"{k} {at}\n" for k, at in sorted(index.signed.items())).encode()
        tier.put(self._list_name(signer, sequence), lines)
        tier.put(self._record_name(signer), self._record(sequence, lines, key))
        self.sequences.remember(name, sequence)
        with self._lock:
            self._read[tier.shown, signer] = time.monotonic(), index

    def _fresh(self, tier: Tier, signer: str) -> _Index | None:
        with self._lock:  # others wait for the answer that they need, too
            at, found = self._read.get((tier.shown, signer), (float("-inf"), None))
            if time.monotonic() - at > _FRESH_SECONDS:
                try:
                    found = self._get(tier, signer)
                except WentBack as error:
                    found = error
                self._read[tier.shown, signer] = time.monotonic(), found
        if isinstance(found, WentBack):
            raise WentBack(*found.args)
        return found

    def _get(self, tier: Tier, signer: str) -> _Index | None:
        """The signer's list; None where there never was one. Raises WentBack and PlaceError."""
        name = self._name(tier, signer)
        torn = 0
        for _ in range(2):  # another one may have been written twice meanwhile
            found = self._sequence_and_digest(tier, signer)
            highest = self.sequences.highest(name)
            if found is None and highest == 0:
                return None
            if found is None or found[0] < highest:
                raise WentBack("its signer's list is older than one that was seen before, or gone")
            sequence, digest = torn, _ = found
            try:
                lines = tier.get(self._list_name(signer, sequence), _MOST_LIST_BYTES)
            except TooLarge:
                continue
            if lines is None or hashlib.sha256(lines).hexdigest() != digest:
                continue
            self.sequences.remember(name, sequence)
            rows = (_LINE.fullmatch(line) for line in lines.decode("ascii").split("\n"))
            return _Index(sequence, {row[1]: int(row[2]) for row in rows if row})
        raise Torn(torn)

    def _sequence_and_digest(self, tier: Tier, signer: str) -> tuple[int, str] | None:
        """What the signer says of its list. One that is not the signer's counts as gone."""
        assert core is not None
        try:
            content = tier.get(self._record_name(signer), core.MAX_SIGNED_ENTRY_BYTES)
            if content is None:
                return None
            record = core.read_entry(content, [signer], self.revoked)
            facts = record.entry["facts"]
            if record.entry["key"] != self._key():
                return None
            return int(facts["sequence"]), str(facts["list"])
        except (TooLarge, core.StoreError, KeyError, ValueError):
            return None

    def _record(self, sequence: int, lines: bytes, key: str) -> bytes:
        assert core is not None
        facts = {"sequence": str(sequence), "list": hashlib.sha256(lines).hexdigest()}
        row = {"key": self._key(), "kind": "native", "facts": facts}
        with tempfile.TemporaryDirectory(prefix="eagercache-list-") as folder:
            store = core.Store(folder, self.text)
            store.publish(row)
            content, _ = core.sign_entry(store, self._key(), self.text, key)
        return bytes(content)

    def _key(self) -> str:
        """The key that a list has, which no call's is."""
        return hashlib.sha256(f"eagercache-index-v1 {self.identity}".encode()).hexdigest()

    def _record_name(self, signer: str) -> str:
        return f"v1/{self.identity}/i/{signer}"

    def _list_name(self, signer: str, sequence: int) -> str:
        return f"{self._record_name(signer)}.{sequence % 2}"

    def _name(self, tier: Tier, signer: str) -> str:
        return f"{tier.shown} {self.identity} {signer}"


def indices_of(store: Any, identity: str, text: str, plan: Any) -> Indices:
    """The lists that a store's machine remembers."""
    return Indices(identity, text, plan.revoked, Sequences(Path(store.root)))


def signed_at(content: bytes) -> int:
    """When a checked entry (kernel_cache/store/signed_entry.h) was signed, since 1970."""
    start = content.index(b"\n") + 1 + _HEAD_BYTES
    return int.from_bytes(content[start : start + 8], "little")
