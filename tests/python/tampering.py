"""Tampered entries, objects and lists of a remote, each offered to a store that trusts one key."""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from eagercache.ahead.cluster_task import Parcel
from eagercache.remote import catalogue
from eagercache.remote.entries import Refused
from eagercache.remote.place import PlaceError
from eagercache.remote.sequences import NAME
from eagercache.remote.tier import Tier
from remote_world import TEXT, World, key_of

_URL = "memory://tampered"
_NUMBERS = (1, 2, 3, 5)
_IDENTITY = catalogue.environment_id(TEXT)


@dataclass
class Outcome:
    """What became of offers: ``accepted`` and ``broken`` have to be empty."""

    refused: Counter[str] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # errors that nobody expects


@dataclass
class _Remote:
    """A whole remote, and signed things that are no part of it now."""

    whole: dict[str, bytes]
    alien: dict[str, list[bytes]]  # by kind of name: of others, and of earlier
    memory: str  # what a reader remembers of it


def _kind(name: str) -> str:
    if "/o/" in name:
        return "object"
    if "/e/" in name:
        return "entry"
    if "/i/" in name:
        return "list" if "." in name.rpartition("/")[2] else "record"
    return "hint"


def _parcel(world: World, folder: str, text: str = TEXT, **keys: str) -> dict[str, bytes]:
    """What a machine puts into an empty remote."""
    exchange = world.exchange(world.filled(folder, *_NUMBERS, text=text), _URL, text, **keys)
    parcel = Parcel()
    tier = _tier(parcel.named)
    for number in _NUMBERS:
        exchange.send(tier, key_of(number))
    exchange.list_sent(tier, [key_of(number) for number in _NUMBERS])
    return parcel.named


def _tier(named: dict[str, bytes]) -> Tier:
    return Tier(_URL, place=Parcel(named), sleep=lambda delay: None)


def make_remote(world: World) -> _Remote:
    """The remote as it is, after each of its entries was signed a second time."""
    earlier = _parcel(world, "writer")
    time.sleep(1.1)  # entries have seconds
    writer = world.exchange(world.store("writer"), _URL)
    whole = dict(earlier)
    keys = [key_of(number) for number in _NUMBERS]
    for key in keys:
        writer.send(_tier(whole), key, replace=True)
    writer.list_sent(_tier(whole), keys)
    others = [
        earlier,
        _parcel(world, "stranger", key="other", trust="other"),
        _parcel(world, "elsewhere", TEXT.replace("2.11.0", "2.15.0")),
    ]
    alien: dict[str, list[bytes]] = {"object": [], "entry": [], "record": [], "list": []}
    for name, content in [pair for one in (*others, whole) for pair in one.items()]:
        if _kind(name) in alien:
            alien[_kind(name)].append(content)
    reader = world.store("seen")
    world.exchange(reader, _URL, signs=False).fetch(_tier(whole), keys[0])
    return _Remote(whole, alien, (world.folder / "seen" / NAME).read_text())


def _tampered(content: bytes, kind: str, alien: list[bytes], chance: random.Random) -> bytes | None:
    """Another content for a name; None: it is gone."""
    how = chance.choice(("bits", "bits", "cut", "grow", "alien", "splice", "gone", "byte"))
    data = bytearray(content)
    if how == "gone":
        return None
    if how == "alien":
        return chance.choice(alien)
    if how == "splice":
        other = chance.choice(alien)
        at = chance.randrange(min(len(data), len(other)) or 1)
        return bytes(data[:at] + other[at:])
    if how == "cut":
        del data[chance.randrange(len(data) or 1) :]
    elif how == "grow":
        data += chance.randbytes(chance.choice((1, 64, 4096)))
    elif data:
        for _ in range(chance.choice((1, 1, 2, 16))):
            # Heads are where lengths, keys and times are.
            at = chance.randrange(min(len(data), chance.choice((120, 400, len(data)))))
            flipped = data[at] ^ (1 << chance.randrange(8))
            data[at] = flipped if how == "bits" else chance.randrange(256)
    return bytes(data)


def offer(world: World, remote: _Remote, count: int, seed: int) -> Outcome:
    """Offers so many tampered remotes. In each one thing is wrong that its reader needs."""
    chance = random.Random(seed)
    outcome = Outcome()
    store = world.store("reader")
    (world.folder / "reader" / NAME).write_text(remote.memory)
    kernels = [number for number in _NUMBERS if number % 2]
    while sum(outcome.refused.values()) + len(outcome.accepted) + len(outcome.broken) < count:
        key = key_of(chance.choice(kernels))
        needed = _needed(remote.whole, key)
        name = chance.choice(needed)
        changed = _tampered(remote.whole[name], _kind(name), remote.alien[_kind(name)], chance)
        if changed == remote.whole[name] or (changed is None and _kind(name) == "entry"):
            continue  # the same, or a remote that lacks it
        named = dict(remote.whole)
        if changed is None:
            del named[name]
        else:
            named[name] = changed
        said = f"{_kind(name)} of {key[:8]}, seed {seed}"
        try:
            verdict = world.exchange(store, _URL, signs=False).fetch(_tier(named), key)
        except (Refused, PlaceError) as error:
            kind = error.kind if isinstance(error, Refused) else "unreadable list"
            outcome.refused[f"{_kind(name)}: {kind}"] += 1
        except Exception:
            outcome.broken.append(f"{said}: {traceback.format_exc()}")
        else:
            outcome.accepted.append(f"{said}: {verdict}")
    if store.entries():
        outcome.accepted.append(f"{len(store.entries())} entries in the store, seed {seed}")
    return outcome


def _needed(whole: dict[str, bytes], key: str) -> list[str]:
    """The names that a reader of a key asks for."""
    entry = whole[catalogue.entry_name(_IDENTITY, key)]
    names = [name for name in whole if _kind(name) == "object" and name[5:69].encode() in entry]
    lists = [name for name in whole if _kind(name) == "list"]
    records = [name for name in whole if _kind(name) == "record"]
    # The list that the record names: the one that was written last.
    lists.sort(key=lambda name: list(whole).index(name))
    return [catalogue.entry_name(_IDENTITY, key), *names, *records, lists[-1]]
