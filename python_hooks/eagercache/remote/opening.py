"""The place of a URL, whose kind alone is imported."""

from __future__ import annotations

from urllib.parse import urlsplit

from eagercache.remote.place import HTTP_SCHEMES, REDIS_SCHEMES, Place


def open_place(url: str) -> Place:
    """The place that a checked URL names. Connects to nothing."""
    scheme = urlsplit(url).scheme
    if scheme in REDIS_SCHEMES:
        from eagercache.remote.redis_place import RedisPlace

        return RedisPlace(url)
    if scheme in HTTP_SCHEMES:
        from eagercache.remote.http_place import HttpPlace

        return HttpPlace(url)
    from eagercache.remote.fsspec_place import FsspecPlace

    return FsspecPlace(url)
