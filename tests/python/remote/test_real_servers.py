"""Servers that others wrote, as remotes: what one machine pushes there another one pulls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import real_servers
from eagercache.remote import transfer
from eagercache.remote.opening import open_place
from eagercache.remote.place import TooLarge
from remote_world import World, key_of, tier_of

pytestmark = pytest.mark.once

SECONDS = 30.0


@pytest.fixture(params=["nginx", "rclone webdav", "rclone s3", "moto"])
def url(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("server")
    if request.param == "nginx":
        with real_servers.nginx_server(folder) as running:
            yield running
    elif request.param == "rclone webdav":
        with real_servers.webdav_server(folder) as running:
            yield running
    else:
        serve = real_servers.moto_server
        if request.param == "rclone s3":
            serve = real_servers.rclone_s3_server
        with serve(folder) as (running, variables):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            import s3fs

            s3fs.S3FileSystem.clear_instance_cache()
            yield running
            s3fs.S3FileSystem.clear_instance_cache()


def test_a_real_server_is_a_remote(world: World, url: str) -> None:
    place = open_place(url)
    assert place.get("v1/one", 100, SECONDS) is None and place.size("v1/one", SECONDS) is None
    place.put("v1/one", b"first", SECONDS)
    place.put("v1/one", b"the second one", SECONDS)
    assert place.get("v1/one", 100, SECONDS) == b"the second one"
    assert place.size("v1/one", SECONDS) == 14
    with pytest.raises(TooLarge):
        place.get("v1/one", 13, SECONDS)

    sender = world.exchange(world.filled("a", 1, 2, 3), url)
    sent = transfer.push([tier_of(url)], sender)
    assert sent.sent == 3 and sent.errors == []
    assert transfer.push([tier_of(url)], sender).sent == 0
    reader = world.exchange(world.store("b"), url, signs=False)
    taken = transfer.pull([tier_of(url)], reader)
    assert taken.fetched == 3 and taken.errors == [] and not taken.refused
    assert world.store("b").find(key_of(1))["kind"] == "kernel"


def test_a_bucket_that_is_not_there_is_told_from_an_empty_one(world: World, url: str) -> None:
    reader = world.exchange(world.store("b"), url, signs=False)
    assert transfer.pull([tier_of(url)], reader).errors == []
    if not url.startswith("s3://"):
        return  # a server of bytes makes its folders, and says nothing of those that it lacks
    missing = "s3://not-there/cache"
    assert transfer.pull([tier_of(missing)], reader).errors == [
        f"{missing}: there is no bucket not-there; {transfer.MISSING_REMEDY}"
    ]
