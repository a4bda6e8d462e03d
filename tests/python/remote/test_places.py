"""Remotes as named bytes: the same over HTTP and fsspec, and one kind of error when they fail."""

from __future__ import annotations

import base64
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_servers
import remote_server
from eagercache.remote import bounded, fsspec_place
from eagercache.remote.http_place import HttpPlace
from eagercache.remote.opening import open_place
from eagercache.remote.place import (
    BadUrl,
    Denied,
    Place,
    PlaceError,
    TooLarge,
    check_url,
    shown_url,
)
from remote_server import RemoteServer

pytestmark = pytest.mark.once

SECONDS = 20.0
SOON = 0.3  # for what never answers


@pytest.fixture(params=["http", "file", "memory", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "http":
        with remote_server.serving() as running:
            yield open_place(running.url)
    elif request.param == "redis":
        with real_servers.redis_server(tmp_path) as url:
            yield open_place(url)
    elif request.param == "file":
        yield open_place(f"file://{tmp_path}/cache")
    else:
        yield open_place(f"memory://{uuid.uuid4().hex}")


def test_what_is_put_is_there_and_nothing_else(place: Place) -> None:
    assert place.get("v1/e/name", 100, SECONDS) is None
    assert place.size("v1/e/name", SECONDS) is None
    place.put("v1/e/name", b"first", SECONDS)
    assert place.get("v1/e/name", 100, SECONDS) == b"first"
    assert place.size("v1/e/name", SECONDS) == 5
    place.put("v1/e/name", b"the second one", SECONDS)
    assert place.get("v1/e/name", 100, SECONDS) == b"the second one"
    place.put("v1/empty", b"", SECONDS)
    assert place.get("v1/empty", 0, SECONDS) == b""


def test_no_more_bytes_are_read_than_may_be_there(place: Place) -> None:
    place.put("name", b"0123456789", SECONDS)
    assert place.get("name", 10, SECONDS) == b"0123456789"
    with pytest.raises(TooLarge):
        place.get("name", 9, SECONDS)


@pytest.mark.parametrize("toxic", [remote_server.hang, remote_server.drip])
def test_a_request_ends_by_its_deadline(server: RemoteServer, toxic: remote_server.Toxic) -> None:
    server.toxic = toxic
    place = open_place(server.url)
    for ask in (
        lambda: place.get("name", 100, SOON),
        lambda: place.size("name", SOON),
        lambda: place.put("name", b"bytes", SOON),
    ):
        with pytest.raises(PlaceError, match=r"no answer within 0\.3 s") as caught:
            ask()
        assert caught.value.retry_after is None


@pytest.mark.parametrize("toxic", [remote_server.cut, remote_server.truncate])
def test_an_answer_that_is_cut_off_is_none(
    server: RemoteServer, toxic: remote_server.Toxic
) -> None:
    server.content["/cache/name"] = b"0123456789"
    server.toxic = toxic
    with pytest.raises(PlaceError) as caught:
        open_place(server.url).get("name", 100, SECONDS)
    assert caught.value.retry_after is not None


def test_an_endless_answer_is_not_read_to_its_end(server: RemoteServer) -> None:
    server.toxic = remote_server.endless
    with pytest.raises(TooLarge):
        open_place(server.url).get("name", 1000, SECONDS)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_trouble_that_may_pass_says_when_to_try_again(server: RemoteServer, code: int) -> None:
    place = open_place(server.url)
    server.toxic = remote_server.status(code)
    with pytest.raises(PlaceError, match=str(code)) as caught:
        place.get("name", 100, SECONDS)
    assert caught.value.retry_after is not None and caught.value.retry_after < 1
    server.toxic = remote_server.status(code, Retry_After="7")
    with pytest.raises(PlaceError) as caught:
        place.get("name", 100, SECONDS)
    assert caught.value.retry_after == 7


def test_what_is_not_allowed_is_told_from_trouble(server: RemoteServer) -> None:
    place = open_place(server.url)
    for code in (401, 403, 405):
        server.toxic = remote_server.status(code)
        with pytest.raises(Denied, match=str(code)):
            place.put("name", b"bytes", SECONDS)
    for code in (404, 409):  # of a server that makes no folders, nor knows MKCOL
        server.toxic = remote_server.status(code)
        with pytest.raises(Denied, match=str(code)):
            place.put("name", b"bytes", SECONDS)


def test_redirects_are_not_followed(server: RemoteServer) -> None:
    server.content["/other"] = b"bytes"
    server.toxic = remote_server.status(302, Location="/other")
    with pytest.raises(PlaceError, match="302"):
        open_place(server.url).get("name", 100, SECONDS)
    assert len(server.requests) == 1


def test_requests_share_a_connection_and_survive_its_end(server: RemoteServer) -> None:
    place = open_place(server.url)
    for _ in range(3):
        place.put("name", b"bytes", SECONDS)
        assert place.get("name", 100, SECONDS) == b"bytes"
        assert place.size("other", SECONDS) is None
    assert server.connections == 1
    server.toxic = remote_server.cut
    with pytest.raises(PlaceError):
        place.get("name", 100, SECONDS)
    server.toxic = None
    assert place.get("name", 100, SECONDS) == b"bytes"


def test_a_user_of_the_url_is_sent_and_not_shown(server: RemoteServer) -> None:
    url = server.url.replace("http://", "http://me:s%20cret@")
    assert shown_url(url) == server.url
    assert open_place(url).get("name", 100, SECONDS) is None
    expected = base64.b64encode(b"me:s cret").decode()
    assert server.headers["authorization"] == f"Basic {expected}"


def test_the_proxy_of_the_environment_is_used(
    server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/cache"))
    server.content["http://remote.invalid/cache/name"] = b"bytes"
    place = HttpPlace("http://remote.invalid/cache")
    assert place.get("name", 100, SECONDS) == b"bytes"
    monkeypatch.setenv("no_proxy", "remote.invalid")
    with pytest.raises(PlaceError):
        HttpPlace("http://remote.invalid/cache").get("name", 100, SECONDS)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://host/cache", "none of http://"),
        ("cache", "none of http://"),
        ("http:///cache", "names no host"),
        ("http://host:99999/cache", "is no URL"),
        ("https://host/cache?token=1", "has a query"),
        ("s3://bucket/cache", "needs s3fs: pip install 'eagercache[remote]'"),
    ],
)
def test_a_url_that_names_no_remote_says_so(
    url: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "eagercache.remote.place.importlib.util.find_spec",
        lambda name: None if name == "s3fs" else object(),
    )
    with pytest.raises(BadUrl, match=None) as caught:
        check_url(url)
    assert text in str(caught.value)


class _Hanging:
    """A file system of fsspec's that answers when it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.released.wait(60)
        return b"late"


def test_a_file_system_that_hangs_is_left_alone_and_not_asked_more_and_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = fsspec_place.FsspecPlace(f"file://{tmp_path}")
    hanging = _Hanging()
    monkeypatch.setattr(place, "_system", lambda: (hanging, "/root"))
    for _ in range(bounded.MOST_AT_ONCE):
        with pytest.raises(PlaceError, match="no answer within"):
            place.get("name", 100, 0.01)
    with pytest.raises(PlaceError, match="hang"):
        place.get("name", 100, SECONDS)
    hanging.released.set()
    # Its threads end, one after the other.
    for _ in range(bounded.MOST_AT_ONCE):
        assert place._bounded._free.acquire(timeout=SECONDS)
        place._bounded._free.release()


def test_a_file_is_never_seen_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_place(f"file://{tmp_path}/cache")
    place.put("name", b"whole", SECONDS)
    from fsspec.implementations.local import LocalFileOpener

    def full(self: LocalFileOpener, *arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalFileOpener, "write", full)
    with pytest.raises(PlaceError, match="No space left"):
        place.put("name", b"another", SECONDS)
    assert place.get("name", 100, SECONDS) == b"whole"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["name"]
