"""What one store sends another takes in; whatever was tampered with is refused, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from eagercache import _C
from eagercache.remote import catalogue, entries
from eagercache.remote.entries import Refused
from eagercache.remote.place import PlaceError
from remote_server import RemoteServer
from remote_world import TEXT, World, key_of, object_of, tier_of

pytestmark = pytest.mark.once

KEY = key_of(1)
IDENTITY = catalogue.environment_id(TEXT)
ENTRY = f"/cache/v1/{IDENTITY}/e/{KEY}"


def object_path(server: RemoteServer) -> str:
    (path,) = (path for path in server.content if path.startswith("/cache/v1/o/"))
    return path


def test_entries_reach_a_store_that_never_shared_a_disk(world: World, server: RemoteServer) -> None:
    sender = world.exchange(world.filled("a", 1, 2), server.url)
    tier = tier_of(server.url)
    assert sender.send(tier, KEY) and sender.send(tier, key_of(2))
    assert not sender.send(tier, KEY)
    # Whoever reads an entry finds its objects.
    puts = [line for line in server.requests if line.startswith("PUT")]
    assert puts[0] == f"PUT {object_path(server)}" and puts[1] == f"PUT {ENTRY}"

    store = world.store("b")
    reader = world.exchange(store, server.url, signs=False)
    assert reader.fetch(tier, KEY) == "kernel"
    assert reader.fetch(tier, key_of(2)) == "native"
    assert reader.fetch(tier, key_of(3)) is None
    found = store.find(KEY)
    assert found["facts"]["number"] == "1"
    assert found["facts"]["signer"] == reader.plan.trusted[0]
    assert store.verify() == [(key, store.environment_id, "") for key, *_ in store.verify()]
    assert len(store.entries()) == 2


def test_machines_that_differ_in_their_compilers_alone_share_entries(
    world: World, server: RemoteServer
) -> None:
    tier = tier_of(server.url)
    world.exchange(world.filled("a", 1), server.url).send(tier, KEY)
    other = TEXT.replace("compiler.version: 12", "compiler.version: none")
    reader = world.exchange(world.store("b", other), server.url, other)
    assert reader.fetch(tier, KEY) == "kernel"


def _alter(server: RemoteServer, world: World) -> None:
    content = bytearray(server.content[ENTRY])
    content[-10] ^= 1
    server.content[ENTRY] = bytes(content)


def _cut_entry(server: RemoteServer, world: World) -> None:
    server.content[ENTRY] = server.content[ENTRY][:-1]


def _empty(server: RemoteServer, world: World) -> None:
    server.content[ENTRY] = b""


def _flood(server: RemoteServer, world: World) -> None:
    server.content[ENTRY] = b"x" * (_C.MAX_SIGNED_ENTRY_BYTES + 1)


def _newer(server: RemoteServer, world: World) -> None:
    server.content[ENTRY] = server.content[ENTRY].replace(b"entry 1", b"entry 2", 1)


def _another_key(server: RemoteServer, world: World) -> None:
    server.content[ENTRY] = server.content[ENTRY.replace(KEY, key_of(2))]


def _another_signer(server: RemoteServer, world: World) -> None:
    other = world.exchange(world.filled("a", 1), server.url, key="other", trust="other")
    other.send(tier_of(server.url), KEY, replace=True)


def _another_environment(server: RemoteServer, world: World) -> None:
    text = TEXT.replace("2.11.0", "2.15.0")
    other = world.exchange(world.filled("c", 1, text=text), server.url, text)
    other.send(tier_of(server.url), KEY)
    server.content[ENTRY] = server.content[ENTRY.replace(IDENTITY, other.identity)]


def _alter_object(server: RemoteServer, world: World) -> None:
    path = object_path(server)
    server.content[path] = server.content[path].replace(b"object 1", b"object 7", 1)


def _cut_object(server: RemoteServer, world: World) -> None:
    server.content[object_path(server)] = object_of(1)[:-1]


def _lengthen_object(server: RemoteServer, world: World) -> None:
    server.content[object_path(server)] += b"x"


def _lose_object(server: RemoteServer, world: World) -> None:
    del server.content[object_path(server)]


@pytest.mark.parametrize(
    ("tamper", "kind", "text"),
    [
        (_alter, "signature", "altered or cut off"),
        (_cut_entry, "signature", "altered or cut off"),
        (_empty, "damaged", "does not begin like one"),
        (_flood, "damaged", "at most"),
        (_newer, "version", "another version"),
        (_another_key, "damaged", f"it is the entry of {key_of(2)}"),
        (_another_signer, "signature", "not among those that are trusted"),
        (
            _another_environment,
            "environment: torch.version",
            "torch.version differs (2.15.0 there, 2.11.0 here)",
        ),
        (_alter_object, "damaged", "has other contents"),
        (_cut_object, "damaged", "has other contents"),
        (_lengthen_object, "damaged", "at most"),
        (_lose_object, "damaged", "is not there"),
    ],
)
def test_what_was_tampered_with_is_refused_and_replaced_by_the_next_who_sends(
    world: World,
    server: RemoteServer,
    tamper: Callable[[RemoteServer, World], None],
    kind: str,
    text: str,
) -> None:
    tier = tier_of(server.url)
    sender = world.exchange(world.filled("a", 1, 2), server.url)
    assert sender.send(tier, KEY) and sender.send(tier, key_of(2))
    tamper(server, world)
    store = world.store("b")
    reader = world.exchange(store, server.url)
    with pytest.raises(Refused) as caught:
        reader.fetch(tier, KEY)
    assert caught.value.kind == kind and text in str(caught.value)
    assert store.entries() == [] and not list((world.folder / "b").rglob("*.so"))

    assert sender.send(tier, KEY, replace=True)
    assert reader.fetch(tier, KEY) == "kernel"


def test_an_entry_that_would_be_refused_is_replaced_without_being_told_to(
    world: World, server: RemoteServer
) -> None:
    tier = tier_of(server.url)
    sender = world.exchange(world.filled("a", 1), server.url)
    sender.send(tier, KEY)
    _alter(server, world)
    assert sender.send(tier, KEY)
    assert world.exchange(world.store("b"), server.url).fetch(tier, KEY) == "kernel"


def test_objects_that_are_too_large_together_are_not_read(
    world: World, server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_of(server.url)
    world.exchange(world.filled("a", 1), server.url).send(tier, KEY)
    monkeypatch.setattr(entries, "MOST_OBJECT_BYTES", len(object_of(1)) - 1)
    server.requests.clear()
    with pytest.raises(Refused, match="larger than"):
        world.exchange(world.store("b"), server.url).fetch(tier, KEY)
    assert not [line for line in server.requests if "/o/" in line]


def test_failures_stay_where_they_happened(world: World, server: RemoteServer) -> None:
    store = world.store("a")
    store.publish({"key": KEY, "kind": "failed", "failure": "deterministic"})
    with pytest.raises(_C.StoreError, match="is a failure"):
        world.exchange(store, server.url).send(tier_of(server.url), KEY)
    assert server.content == {}


def test_lists_are_merged_and_what_is_no_key_is_passed_over(
    world: World, server: RemoteServer
) -> None:
    tier = tier_of(server.url)
    catalogue.add_keys(tier, TEXT, [key_of(2)])
    path = f"/cache/v1/{IDENTITY}/keys"
    server.content[path] += b"../../etc/passwd\n" + b"\xff\n" + b"A" * 64 + b"\n"
    catalogue.add_keys(tier, TEXT, [key_of(1), key_of(2)])
    assert catalogue.keys(tier, IDENTITY) == sorted([key_of(1), key_of(2)])
    assert catalogue.environments(tier) == [IDENTITY]
    assert catalogue.text_of(tier, IDENTITY) == "torch.version: 2.11.0\ncpu.isa: avx2\n"
    server.content[f"/cache/v1/{IDENTITY}/environment"] = b"torch.version: 1\n"
    assert catalogue.text_of(tier, IDENTITY) is None

    server.requests.clear()
    server.content[f"/cache/v1/{IDENTITY}/environment"] = b"torch.version: 2.11.0\ncpu.isa: avx2\n"
    catalogue.add_keys(tier, TEXT, [key_of(1)])
    assert not [line for line in server.requests if line.startswith("PUT")]


def test_a_list_that_is_too_long_is_trouble_and_not_read(
    world: World, server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_MOST_LIST_BYTES", 100)
    server.content[f"/cache/v1/{IDENTITY}/keys"] = b"x" * 101
    with pytest.raises(PlaceError, match="at most 100"):
        catalogue.keys(tier_of(server.url), IDENTITY)
