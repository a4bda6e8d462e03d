"""A remote that goes back to what its signer has replaced is refused, by who saw the newer one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from eagercache.remote import catalogue, indices, transfer
from eagercache.remote.entries import Refused
from eagercache.remote.place import PlaceError
from eagercache.remote.sequences import NAME, Sequences
from remote_server import RemoteServer
from remote_world import TEXT, World, key_of, tier_of

pytestmark = pytest.mark.once

KEY = key_of(1)
IDENTITY = catalogue.environment_id(TEXT)
ENTRY = f"/cache/v1/{IDENTITY}/e/{KEY}"


def push(world: World, server: RemoteServer, name: str, *numbers: int) -> None:
    exchange = world.exchange(world.filled(name, *numbers), server.url)
    assert transfer.push([tier_of(server.url)], exchange).errors == []


def pull(world: World, server: RemoteServer, name: str) -> transfer.Transfer:
    exchange = world.exchange(world.store(name), server.url, signs=False)
    return transfer.pull([tier_of(server.url)], exchange)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has the signer's next entries count as signed a second later than all before."""
    shift = [0]
    real = indices.signed_at

    def more() -> None:
        shift[0] += 1

    monkeypatch.setattr("eagercache.remote.entries.signed_at", lambda c: real(c) + shift[0])
    return more


def test_an_entry_that_its_signer_replaced_is_refused(
    world: World, server: RemoteServer, later: Callable[[], None]
) -> None:
    push(world, server, "a", 1, 2)
    old = server.content[ENTRY]
    later()
    exchange = world.exchange(world.store("a"), server.url)
    tier = tier_of(server.url)
    assert exchange.send(tier, KEY, replace=True)
    exchange.list_sent(tier, [KEY])
    server.content[ENTRY] = old
    pulled = pull(world, server, "b")
    assert pulled.refused == {"rollback": 1} and pulled.fetched == 1 and pulled.errors == []
    with pytest.raises(Refused, match="lists a newer one") as caught:
        world.exchange(world.store("b"), server.url, signs=False).fetch(tier, KEY)
    assert caught.value.kind == "rollback"
    assert {entry["key"] for entry in world.store("b").entries()} == {key_of(2)}


def test_a_list_that_is_older_than_one_seen_before_is_refused_until_the_signer_lists_anew(
    world: World, server: RemoteServer
) -> None:
    push(world, server, "a", 1)
    before = dict(server.content)
    push(world, server, "a", 2)
    assert pull(world, server, "b").fetched == 2
    server.content = before  # all of it, as a whole
    fresh = pull(world, server, "c")
    assert fresh.fetched == 1, "who has seen nothing newer cannot know"
    world.filled("seen", 3)
    (world.folder / "seen" / NAME).write_text((world.folder / "b" / NAME).read_text())
    refused = pull(world, server, "seen")
    assert refused.refused == {"rollback": 1} and refused.fetched == 0
    # Nor does it help to take the list away, or to give another signer's.
    for path in [path for path in server.content if "/i/" in path]:
        del server.content[path]
    assert pull(world, server, "seen").refused == {"rollback": 1}
    push(world, server, "a", 4)
    mended = pull(world, server, "seen")
    assert mended.fetched == 3 and not mended.refused


def test_a_list_of_somebody_else_or_another_environment_counts_as_gone(
    world: World, server: RemoteServer
) -> None:
    push(world, server, "a", 1)
    assert pull(world, server, "b").fetched == 1
    (record,) = (p for p in server.content if "/i/" in p and "." not in p.rpartition("/")[2])
    other = TEXT.replace("2.11.0", "2.15.0")
    exchange = world.exchange(world.filled("o", 5, text=other), server.url, other)
    transfer.push([tier_of(server.url)], exchange)
    theirs = record.replace(IDENTITY, exchange.identity)
    for harm in (server.content[theirs], server.content[ENTRY], b"", b"x" * (1 << 20)):
        server.content[record] = harm
        pulled = pull(world, server, "b2" if harm is None else "b")
        assert pulled.fetched == 0
        store = world.folder / "d"
        store.mkdir(mode=0o700, exist_ok=True)
        (store / NAME).write_text((world.folder / "b" / NAME).read_text())
        assert pull(world, server, "d").refused == {"rollback": 1}


def test_lines_that_were_not_signed_are_an_error_and_nothing_is_taken(
    world: World, server: RemoteServer
) -> None:
    push(world, server, "a", 1)
    (lines,) = (p for p in server.content if p.endswith((".0", ".1")) and "/i/" in p)
    server.content[lines] = b""
    pulled = pull(world, server, "b")
    assert pulled.fetched == 0 and "not the one that was signed" in pulled.errors[0]
    with pytest.raises(PlaceError, match="not the one that was signed"):
        world.exchange(world.store("b"), server.url).fetch(tier_of(server.url), KEY)


def test_a_writer_that_ends_between_its_list_and_its_record_leaves_the_last_ones(
    world: World, server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(world, server, "a", 1)
    for clock in (0, 1, 2, 3):  # whatever the milliseconds are that the number is made of
        now = time.time() + clock / 1000
        monkeypatch.setattr("eagercache.remote.indices.time.time", lambda now=now: now)
        exchange = world.exchange(world.filled(f"w{clock}", 3 + 2 * clock), server.url)
        tier = tier_of(server.url)
        record = next(p for p in server.content if "/i/" in p and not p.endswith((".0", ".1")))
        before = server.content[record]
        assert exchange.send(tier, key_of(3 + 2 * clock))
        exchange.list_sent(tier, [key_of(3 + 2 * clock)])
        server.content[record] = before
        assert pull(world, server, f"b{clock}").errors == []


def test_a_list_that_is_torn_is_mended_by_who_may_write(world: World, server: RemoteServer) -> None:
    push(world, server, "a", 1)
    (lines,) = (p for p in server.content if p.endswith((".0", ".1")) and "/i/" in p)
    server.content[lines] = b""
    push(world, server, "a")
    assert pull(world, server, "b").fetched == 1


def test_nothing_is_written_where_all_is_listed(world: World, server: RemoteServer) -> None:
    push(world, server, "a", 1, 2)
    server.requests.clear()
    push(world, server, "a")
    assert not [line for line in server.requests if line.startswith("PUT")]


def test_the_highest_is_remembered_between_processes_and_in_private_folders_alone(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o700)
    first, second = Sequences(tmp_path), Sequences(tmp_path)
    first.remember("one", 7)
    second.remember("two", 3)
    second.remember("one", 5)
    assert json.loads((tmp_path / NAME).read_text()) == {"one": 7, "two": 3}
    third = Sequences(tmp_path)
    assert (third.highest("one"), third.highest("two"), third.highest("three")) == (7, 3, 0)
    for damage in ("nonsense", "[1]", '{"one": "7", "two": 4}'):
        (tmp_path / NAME).write_text(damage)
        assert Sequences(tmp_path).highest("one") == 0
    tmp_path.chmod(0o777)
    Sequences(tmp_path).remember("four", 4)
    assert Sequences(tmp_path).highest("four") == 0
    missing = Sequences(tmp_path / "missing")
    missing.remember("one", 1)
    assert missing.highest("one") == 1
