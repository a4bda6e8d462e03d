"""A remote as named bytes: what its kinds have in common, and which URL is of which kind."""

from __future__ import annotations

import importlib.util
from typing import Protocol
from urllib.parse import urlsplit

# Schemes that fsspec serves, each with the package that it needs for that.
FSSPEC_PACKAGES = {
    "file": "fsspec",
    "memory": "fsspec",
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
}
HTTP_SCHEMES = ("http", "https")


class BadUrl(ValueError):
    """A URL that names no remote; one line with the remedy."""


class PlaceError(Exception):
    """A request that a remote did not answer as it should.

    Attributes:
        retry_after: seconds after which another attempt may succeed; None: none will soon.
    """

    def __init__(self, reason: str, *, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class Denied(PlaceError):
    """The remote does not let us do that."""


class TooLarge(PlaceError):
    """There are more bytes under a name than may be there."""


class Place(Protocol):
    """Named bytes. Names are of a-z, 0-9, "/", "." and "_". Thread-safe.

    Every method ends about ``seconds`` after it was called, and raises `PlaceError`.
    """

    def get(self, name: str, most: int, seconds: float) -> bytes | None:
        """The bytes under a name, None where there are none; `TooLarge` beyond ``most``."""

    def size(self, name: str, seconds: float) -> int | None:
        """How many bytes are under a name; None where there is nothing."""

    def put(self, name: str, content: bytes, seconds: float) -> None:
        """Puts bytes under a name, also where there are others. Readers see all or nothing."""


def check_url(url: str) -> None:
    """Raises BadUrl for what is not the URL of a remote, or needs a package that is not there."""
    try:
        parts = urlsplit(url)
        port = parts.port  # reading it checks it
    except ValueError as error:
        raise BadUrl(f"remote {url!r} is no URL: {error}") from error
    shown = shown_url(url)
    if parts.scheme in HTTP_SCHEMES:
        if not parts.hostname or port == 0:
            raise BadUrl(f"remote {shown!r} names no host; use https://HOST/PATH")
        if parts.query or parts.fragment:
            raise BadUrl(f"remote {shown!r} has a query or a fragment; use https://HOST/PATH")
        return
    if parts.scheme not in FSSPEC_PACKAGES:
        known = ", ".join(f"{name}://" for name in (*HTTP_SCHEMES, *FSSPEC_PACKAGES))
        raise BadUrl(f"remote {shown!r} is none of {known}")
    for package in ("fsspec", FSSPEC_PACKAGES[parts.scheme]):
        if importlib.util.find_spec(package) is None:
            raise BadUrl(f"remote {shown!r} needs {package}: pip install 'eagercache[remote]'")


def shown_url(url: str) -> str:
    """The URL as logs and messages may have it: without a user's name, password or query."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return url
    return parts._replace(netloc=host, query="", fragment="").geturl()
