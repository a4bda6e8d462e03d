"""A Redis server as a remote: one that is real, and what it answers in trouble."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_servers
from eagercache.remote import transfer
from eagercache.remote.opening import open_place
from eagercache.remote.place import BadUrl, Denied, PlaceError, check_url, redis_path, shown_url
from remote_world import World, key_of, tier_of

pytestmark = pytest.mark.once

SECONDS = 20.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_servers.redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


def test_stores_meet_in_a_redis_server(world: World, url: str) -> None:
    sender = world.exchange(world.filled("a", 1, 2, 3), f"{url}/meet")
    sent = transfer.push([tier_of(f"{url}/meet")], sender)
    assert sent.sent == 3 and sent.errors == []
    taken = transfer.pull(
        [tier_of(f"{url}/meet")], world.exchange(world.store("b"), url, signs=False)
    )
    assert taken.fetched == 3 and taken.errors == [] and not taken.refused
    assert world.store("b").find(key_of(1))["kind"] == "kernel"


def test_prefixes_and_databases_are_apart(url: str) -> None:
    open_place(f"{url}/one").put("name", b"one", SECONDS)
    open_place(url).put("name", b"default", SECONDS)
    assert open_place(f"{url}/two").get("name", 10, SECONDS) is None
    assert open_place(url.removesuffix("0") + "1/one").get("name", 10, SECONDS) is None
    assert open_place(f"{url}/one").get("name", 10, SECONDS) == b"one"
    assert open_place(f"{url}/eagercache").get("name", 10, SECONDS) == b"default"


def test_a_full_server_takes_nothing_and_is_read_on(tmp_path: Path) -> None:
    with real_servers.redis_server(tmp_path, "--maxmemory", "4mb") as url:
        place = open_place(url)
        place.put("small", b"bytes", SECONDS)
        with pytest.raises(Denied):
            for number in range(100):
                place.put(f"large{number}", b"x" * (1 << 20), SECONDS)
        assert place.get("small", 10, SECONDS) == b"bytes"


def test_a_password_is_sent_and_a_wrong_one_is_denied(tmp_path: Path) -> None:
    with real_servers.redis_server(tmp_path, "--requirepass", "s cret") as url:
        right = url.replace("redis://", "redis://:s%20cret@")
        assert shown_url(right) == url
        open_place(right).put("name", b"bytes", SECONDS)
        for wrong in (url, url.replace("redis://", "redis://:other@")):
            with pytest.raises(Denied):
                open_place(wrong).get("name", 10, SECONDS)


def test_a_server_that_is_gone_may_come_back_and_one_that_hangs_is_left(tmp_path: Path) -> None:
    real_servers.require("redis")
    port = real_servers.free_port()
    with pytest.raises(PlaceError) as caught:
        open_place(f"redis://127.0.0.1:{port}").get("name", 10, SECONDS)
    assert caught.value.retry_after is not None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = open_place(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(PlaceError, match=r"no answer within 0\.3 s"):
            place.put("name", b"bytes", 0.3)


def test_what_is_no_redis_server_is_one_error() -> None:
    real_servers.require("redis")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PlaceError):
            open_place(f"redis://127.0.0.1:{listening.getsockname()[1]}").size("name", SECONDS)
        thread.join()


def test_the_path_of_a_url_is_a_database_and_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redis_path("") == redis_path("/") == redis_path("/0") == (0, "eagercache")
    assert redis_path("/3/team/cache/") == (3, "team/cache")
    monkeypatch.setattr("eagercache.remote.place.importlib.util.find_spec", lambda name: object())
    for good in ("redis://host", "rediss://me:secret@host:6380/2/team"):
        check_url(good)
    for bad, text in {
        "redis:///0": "names no host; use redis://HOST/DATABASE",
        "redis://host/team": "names no database",
        "redis://host/0?db=1": "has a query",
    }.items():
        with pytest.raises(BadUrl, match=None) as caught:
            check_url(bad)
        assert text in str(caught.value)
    monkeypatch.setattr("eagercache.remote.place.importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadUrl, match=r"needs redis: pip install 'eagercache\[redis\]'"):
        check_url("redis://host/0")
