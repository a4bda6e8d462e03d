"""One entry on its way between a store and a remote: nothing is believed before it is checked.

What comes is checked in this order: its size, its signer, its signature, its form, its key, its
environment, its age beside what its signer lists; then each object's size and digest. Then the
store publishes it as its own. Key, environment and age are checked here, all else in C++
(kernel_cache/store/signed_entry.h).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from eagercache.base import environment
from eagercache.base.load import core
from eagercache.base.machine_kind import VALUES, VALUES_AND_TIMES, is_of_this_kind
from eagercache.remote import catalogue
from eagercache.remote.indices import Indices, Torn, WentBack, indices_of, signed_at
from eagercache.remote.place import TooLarge
from eagercache.remote.plan import RemotePlan
from eagercache.remote.tier import Tier

# Of all objects of an entry together; they are held in memory until they are checked.
MOST_OBJECT_BYTES = 512 << 20


class Refused(Exception):
    """What a remote has under a key must not be used, or cannot be used here.

    Attributes:
        kind: "signature", "damaged", "version", "code" (no shared object, or for another
            processor), "rollback" (older than what its signer has shown), or "environment: FIELD".
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Exchange:
    """A store that takes entries from remotes and gives them some. Thread-safe.

    Attributes:
        store: of the extension's, opened for the environment of ``text``.
        text: the environment key's whole text.
        plan: whose entries are believed, and with which key is signed.
    """

    store: Any
    text: str
    plan: RemotePlan
    _indices: Indices = field(init=False, repr=False)
    # (signer, when it signed) of what was sent or found there, by remote and key.
    _signed: dict[tuple[str, str], tuple[str, int]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        made = indices_of(self.store, self.identity, self.text, self.plan)
        object.__setattr__(self, "_indices", made)

    @property
    def identity(self) -> str:
        """The environment's folder in a remote."""
        return catalogue.environment_id(self.text)

    def fetch(self, tier: Tier, key: str) -> str | None:
        """Publishes a key's entry in the store, where the remote has it: "kernel" or "native".

        "untried" where another kind of machine made it: the store has it then as nothing that is
        used before a worker of this machine has tried it (worker/jobs/untried.py).

        None where the remote has none. Raises Refused, PlaceError, and StoreError where the store
        cannot take it.
        """
        assert core is not None
        found = self._read(tier, key)
        if found is None:
            return None
        entry, _ = found
        row = entry.entry
        if sum(item["size"] for item in row["objects"]) > MOST_OBJECT_BYTES:
            raise Refused("damaged", f"its objects are larger than {MOST_OBJECT_BYTES} bytes")
        contents = [self._object(tier, item) for item in row["objects"]]
        try:
            untried = self._to_be_tried(row)
            core.import_entry(entry, contents, self.store, untried)
        except core.StoreError as error:
            if error.code == "corrupt":
                raise Refused("damaged", str(error)) from error
            if error.code == "incompatible":
                raise Refused("code", str(error)) from error
            raise
        return "untried" if untried else str(row["kind"])

    def _to_be_tried(self, row: dict[str, Any]) -> str:
        """What of an entry is only another kind of machine's word; "": nothing.

        Native is right everywhere: whether it is faster is a hint, which is taken unless the plan
        wants it measured.
        """
        if is_of_this_kind(row["facts"]):
            return ""
        if self.plan.retime:
            return VALUES_AND_TIMES
        return VALUES if row["kind"] == "kernel" else ""

    def _read(self, tier: Tier, key: str) -> tuple[Any, bytes] | None:
        """A key's checked entry and its bytes, or None. Raises Refused and PlaceError."""
        assert core is not None
        try:
            name = catalogue.entry_name(self.identity, key)
            content = tier.get(name, core.MAX_SIGNED_ENTRY_BYTES)
        except TooLarge as error:
            raise Refused("damaged", str(error)) from error
        if content is None:
            return None
        try:
            entry = core.read_entry(content, self.plan.trusted, self.plan.revoked)
        except core.StoreError as error:
            kinds = {"refused": "signature", "incompatible": "version"}
            raise Refused(kinds.get(error.code, "damaged"), str(error)) from error
        if entry.entry["key"] != key:
            raise Refused("damaged", f"it is the entry of {entry.entry['key']}")
        differing = environment.mismatches(entry.environment, self.text, environment.SHARED_FIELDS)
        if differing:
            raise Refused(f"environment: {differing[0][0]}", describe(differing))
        try:
            self._indices.check(tier, key, entry.signer, content)
        except WentBack as error:
            raise Refused("rollback", str(error)) from error
        return entry, content

    @staticmethod
    def _object(tier: Tier, item: dict[str, Any]) -> bytes:
        name = catalogue.object_name(item)
        try:
            content = tier.get(name, item["size"])
        except TooLarge as error:
            raise Refused("damaged", f"{name}: {error}") from error
        if content is None:
            raise Refused("damaged", f"{name} is not there")
        return content

    def send(self, tier: Tier, key: str, *, replace: bool = False, expires: int = 0) -> bool:
        """Signs a key's entry and puts it into the remote, objects first; False where it is there.

        ``expires``: in seconds since 1970; 0: never.

        ``replace``: one that is there is replaced, with its objects. One that this machine would
        refuse is replaced at any rate. Raises PlaceError, and StoreError where the store cannot
        give it.
        """
        assert core is not None and self.plan.key is not None
        if not replace:
            try:
                if (found := self._read(tier, key)) is not None:
                    self._note_signed(tier, key, *found)
                    return False
            except (Refused, Torn):
                pass  # what is sent and listed now mends it
        entry, contents = core.sign_entry(self.store, key, self.text, self.plan.key, expires)
        own = core.read_entry(entry, self.plan.trusted, self.plan.revoked)
        for item, content in zip(own.entry["objects"], contents, strict=True):
            name = catalogue.object_name(item)
            if replace or tier.size(name) != len(content):
                tier.put(name, content)
        tier.put(catalogue.entry_name(self.identity, key), entry)
        self._note_signed(tier, key, own, entry)
        return True

    def _note_signed(self, tier: Tier, key: str, entry: Any, content: bytes) -> None:
        self._signed[tier.shown, key] = entry.signer, signed_at(content)

    def list_sent(self, tier: Tier, keys: Collection[str]) -> None:
        """Adds keys that were sent, or found there, to the remote's lists.

        Raises PlaceError, and StoreError where the list cannot be signed.
        """
        assert core is not None and self.plan.key is not None
        catalogue.add_keys(tier, self.text, keys)
        signer = core.public_key_of_signer(self.plan.key)
        rows = ((key, self._signed.pop((tier.shown, key), ("", 0))) for key in keys)
        ours = {key: at for key, (by, at) in rows if by == signer}
        if ours:
            self._indices.add(tier, signer, ours, self.plan.key)


def describe(differing: tuple[tuple[str, str, str], ...]) -> str:
    """Fields that differ, in one line."""
    return "; ".join(
        f"{field} differs ({shortened(theirs)} there, {shortened(ours)} here)"
        for field, theirs, ours in differing
    )


def shortened(value: str) -> str:
    """A field's value for people; what came from elsewhere has no control characters."""
    printable = "".join(c if c.isprintable() else "?" for c in value)
    return printable if len(printable) <= 60 else f"{printable[:57]}..."
