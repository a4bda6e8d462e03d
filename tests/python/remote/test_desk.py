"""Beside a program every key that is looked up is answered once, whatever remotes do."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest
import remote_server
from eagercache.remote import catalogue
from eagercache.remote.desk import LookedUp, RemoteDesk
from eagercache.remote.plan import RemotePlan
from remote_server import RemoteServer
from remote_world import TEXT, World, key_of, tier_of

pytestmark = pytest.mark.once

SECONDS = 60.0


class Desk:
    """A desk, and its answers in the order of arrival."""

    def __init__(self, world: World, store: Any, *urls: str, **options: Any) -> None:
        seconds = options.pop("seconds", 20.0)
        plan = world.plan(urls[0], **options)
        plan = RemotePlan(urls, plan.trusted, plan.key)
        tiers = [tier_of(url, seconds) for url in urls]
        self.desk = RemoteDesk(plan, lambda: store, TEXT, tiers)
        self.answers: queue.Queue[tuple[str, LookedUp]] = queue.Queue()

    def look_up(self, *numbers: int) -> dict[str, LookedUp]:
        for number in numbers:
            key = key_of(number)
            self.desk.look_up(key, lambda found, key=key: self.answers.put((key, found)))
        return dict(self.answers.get(timeout=SECONDS) for _ in numbers)

    def until(self, **counts: int) -> dict[str, Any]:
        """The counts, once they are these."""
        for _ in range(int(SECONDS / 0.02)):
            now = self.desk.counts()
            if all(now[name] == value for name, value in counts.items()):
                return now
            time.sleep(0.02)
        raise AssertionError(self.desk.counts())


def fill(world: World, url: str, *numbers: int) -> None:
    exchange = world.exchange(world.filled("filled", *numbers), url)
    for number in numbers:
        exchange.send(tier_of(url), key_of(number))


def test_hits_and_misses_are_told_and_counted(world: World, server: RemoteServer) -> None:
    fill(world, server.url, 1, 2)
    store = world.store("b")
    desk = Desk(world, store, server.url, signs=False)
    found = desk.look_up(1, 2, 3)
    assert {key: answer.verdict for key, answer in found.items()} == {
        key_of(1): "kernel",
        key_of(2): "native",
        key_of(3): "",
    }
    counts = desk.desk.counts()
    assert (counts["hits"], counts["misses"], counts["errors"]) == (2, 1, 0)
    assert counts["bytes_read"] > 0 and counts["bytes_sent"] == 0
    assert {entry["key"] for entry in store.entries()} == {key_of(1), key_of(2)}


def test_the_second_remote_is_asked_for_what_the_first_one_lacks_or_must_not_give(
    world: World, server: RemoteServer
) -> None:
    second = f"file://{world.folder}/second"
    fill(world, second, 1, 2, 3)
    fill(world, server.url, 2)
    for path in server.content:
        if "/e/" in path:
            server.content[path] += b"x"
    found = Desk(world, world.store("b"), server.url, second).look_up(1, 2, 3)
    assert {answer.verdict for answer in found.values()} == {"kernel", "native"}
    assert found[key_of(2)].refused and not found[key_of(1)].refused


@pytest.mark.parametrize(
    "toxic",
    [
        remote_server.hang,
        remote_server.cut,
        remote_server.truncate,
        remote_server.status(500),
        remote_server.status(503, Retry_After="30"),
        remote_server.status(429),
        remote_server.status(403),
        remote_server.status(302, Location="/"),
    ],
)
def test_a_remote_in_trouble_answers_nothing_and_hinders_nobody(
    world: World, server: RemoteServer, toxic: remote_server.Toxic
) -> None:
    fill(world, server.url, 1)
    server.toxic = toxic
    store = world.store("b")
    desk = Desk(world, store, server.url, seconds=0.3)
    found = desk.look_up(*range(1, 20))
    assert all(answer == LookedUp() for answer in found.values()) and len(found) == 19
    counts = desk.desk.counts()
    assert counts["errors"] == 19 and counts["hits"] == counts["misses"] == 0
    assert store.entries() == []
    if toxic is not remote_server.hang:
        assert len(server.requests) <= 19 + len(server.content) + 10


def test_an_answer_that_comes_late_is_used_and_one_that_was_altered_is_not(
    world: World, server: RemoteServer
) -> None:
    fill(world, server.url, 1, 3)
    server.toxic = remote_server.corrupt
    desk = Desk(world, world.store("b"), server.url, signs=False)
    found = desk.look_up(1, 3)
    assert all(answer == LookedUp(refused=True) for answer in found.values())
    assert sum(desk.desk.counts()["refused"].values()) == 2 and not world.store("b").entries()
    server.toxic = remote_server.delayed(0.2)
    desk = Desk(world, world.store("c"), server.url, signs=False)
    assert {answer.verdict for answer in desk.look_up(1, 3).values()} == {"kernel"}
    assert desk.desk.counts()["errors"] == 0


def test_what_a_remote_must_not_give_is_counted_by_kind_and_said_once(
    world: World, server: RemoteServer, caplog: pytest.LogCaptureFixture
) -> None:
    fill(world, server.url, 1, 2, 3)
    for path in server.content:
        if "/e/" in path:
            server.content[path] += b"x"
    desk = Desk(world, world.store("b"), server.url)
    with caplog.at_level("WARNING", "eagercache"):
        found = desk.look_up(1, 2, 3)
    assert all(answer.refused and not answer.verdict for answer in found.values())
    assert desk.desk.counts()["refused"] == {"signature": 3}
    assert [record.getMessage().split()[0] for record in caplog.records] == ["event=remote_refused"]


def test_what_was_made_here_is_sent_and_listed(world: World, server: RemoteServer) -> None:
    desk = Desk(world, world.filled("a", 1, 2), server.url)
    for number in (1, 2):
        desk.desk.offer(key_of(number), replace=False)
    desk.until(sent=2, unsent=0)
    reader = Desk(world, world.store("b"), server.url, signs=False)
    assert reader.look_up(1)[key_of(1)].verdict == "kernel"
    identity = catalogue.environment_id(TEXT)
    for _ in range(int(SECONDS / 0.02)):
        if len(catalogue.keys(tier_of(server.url), identity)) == 2:
            break
        time.sleep(0.02)
    assert catalogue.keys(tier_of(server.url), identity) == sorted([key_of(1), key_of(2)])


def test_without_a_private_key_nothing_is_sent(world: World, server: RemoteServer) -> None:
    desk = Desk(world, world.filled("a", 1), server.url, signs=False)
    desk.desk.offer(key_of(1), replace=True)
    desk.look_up(2)
    assert desk.desk.counts()["unsent"] == 0 and server.content == {}


def test_a_remote_that_takes_nothing_is_asked_once_to(world: World, server: RemoteServer) -> None:
    server.toxic = remote_server.status(405)
    desk = Desk(world, world.filled("a", 1, 3, 5), server.url)
    desk.desk.offer(key_of(1), replace=True)
    desk.until(unsent=0)
    desk.look_up(9)
    for number in (3, 5):
        desk.desk.offer(key_of(number), replace=True)
    desk.until(unsent=0)
    desk.look_up(9)
    puts = [line for line in server.requests if line.startswith("PUT")]
    assert len(puts) == 1 and desk.desk.counts()["sent"] == 0


def test_a_closed_desk_answers_what_waits_and_takes_no_more(
    world: World, server: RemoteServer
) -> None:
    server.toxic = remote_server.hang
    desk = Desk(world, world.store("b"), server.url, seconds=SECONDS)
    answers = desk.answers
    for number in range(30):
        desk.desk.look_up(key_of(number), lambda found: answers.put(("", found)))
    desk.desk.close()
    # Those that a thread is at are answered when the remote lets go of it.
    server.released.set()
    assert [answers.get(timeout=SECONDS)[1] for _ in range(30)] == [LookedUp()] * 30
    desk.desk.look_up(key_of(1), lambda found: answers.put(("", found)))
    assert answers.get(timeout=SECONDS)[1] == LookedUp()
