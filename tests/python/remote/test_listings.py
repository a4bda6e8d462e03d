"""Where many keys are asked for at once, a remote's list answers for those that it lacks."""

from __future__ import annotations

import queue

import pytest
import remote_server
from eagercache.remote import catalogue
from eagercache.remote.desk import LookedUp, RemoteDesk
from eagercache.remote.listings import FRESH_SECONDS, MANY, Listings
from remote_server import RemoteServer
from remote_world import TEXT, World, key_of, tier_of

pytestmark = pytest.mark.once

IDENTITY = catalogue.environment_id(TEXT)
LIST = f"/cache/v1/{IDENTITY}/keys"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_a_list_lacks_is_missing_while_it_is_fresh(server: RemoteServer) -> None:
    tier, clock = tier_of(server.url), Clock()
    catalogue.add_keys(tier, TEXT, [key_of(n) for n in range(100)])
    server.requests.clear()
    listings = Listings(IDENTITY, clock)
    assert not listings.lacks(tier, key_of(200), MANY - 1) and server.requests == []
    assert listings.lacks(tier, key_of(200), MANY)
    # Then it is known for others, too, however few wait.
    assert not any(listings.lacks(tier, key_of(n), 0) for n in range(100))
    assert all(listings.lacks(tier, key_of(n), 0) for n in range(100, 300))
    assert server.requests == [f"GET {LIST}"]
    clock.now += FRESH_SECONDS + 1
    assert not listings.lacks(tier, key_of(200), 0)
    assert listings.lacks(tier, key_of(200), MANY) and len(server.requests) == 2


@pytest.mark.parametrize("harm", ["damaged", "fails"])
def test_a_list_that_cannot_be_read_says_nothing(server: RemoteServer, harm: str) -> None:
    tier = tier_of(server.url)
    catalogue.add_keys(tier, TEXT, [key_of(1)])
    if harm == "damaged":
        server.content[LIST] += b"half a li"
    else:
        server.toxic = remote_server.status(500)
    listings = Listings(IDENTITY)
    assert not listings.lacks(tier, key_of(2), MANY)
    asked = len(server.requests)
    assert not listings.lacks(tier, key_of(3), MANY) and len(server.requests) == asked


def test_an_empty_remote_is_asked_for_few_of_many_keys(world: World, server: RemoteServer) -> None:
    server.toxic = remote_server.delayed(0.05)  # so that they wait for each other
    plan = world.plan(server.url, signs=False)
    desk = RemoteDesk(plan, lambda: world.store("b"), TEXT, [tier_of(server.url)])
    answers: queue.Queue[LookedUp] = queue.Queue()
    for number in range(300):
        desk.look_up(key_of(number), answers.put)
    assert all(answers.get(timeout=60) == LookedUp() for _ in range(300))
    assert desk.counts()["misses"] == 300 and len(server.requests) < 60
    desk.close()
