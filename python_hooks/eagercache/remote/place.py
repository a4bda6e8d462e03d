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
REDIS_SCHEMES = ("redis", "rediss")
_REDIS_PREFIX = "eagercache"


_MOST_REASON = 500  # characters


class BadUrl(ValueError):
    """A URL that names no remote; one line with the remedy."""


class PlaceError(Exception):
    """A request that a remote did not answer as it should.

    Attributes:
        retry_after: seconds after which another attempt may succeed; None: none will soon.
    """

    def __init__(self, reason: str, *, retry_after: float | None = None) -> None:
        # It may hold what a server sent, which must not reach a terminal as it is.
        printable = "".join(c if c.isprintable() else "?" for c in reason)
        super().__init__(printable[:_MOST_REASON])
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

    def missing(self, seconds: float) -> str | None:
        """In words what would have to be there and is not; None where it is, or nobody can tell.

        A name without bytes tells nothing: it is the same in an empty remote.
        """


def check_url(url: str) -> None:
    """Raises BadUrl for what is not the URL of a remote, or needs a package that is not there."""
    try:
        parts = urlsplit(url)
        port = parts.port  # reading it checks it
    except ValueError as error:
        raise BadUrl(f"remote {url!r} is no URL: {error}") from error
    shown = shown_url(url)
    if parts.scheme in (*HTTP_SCHEMES, *REDIS_SCHEMES):
        form = f"{parts.scheme}://HOST/{'DATABASE' if parts.scheme in REDIS_SCHEMES else 'PATH'}"
        if not parts.hostname or port == 0:
            raise BadUrl(f"remote {shown!r} names no host; use {form}")
        if parts.query or parts.fragment:
            raise BadUrl(f"remote {shown!r} has a query or a fragment; use {form}")
    elif parts.scheme not in FSSPEC_PACKAGES:
        known = ", ".join(f"{one}://" for one in (*HTTP_SCHEMES, *REDIS_SCHEMES, *FSSPEC_PACKAGES))
        raise BadUrl(f"remote {shown!r} is none of {known}")
    if parts.scheme in REDIS_SCHEMES:
        _check_redis_path(parts.path, shown)
        _check_packages(shown, "redis", "redis")
    elif parts.scheme in FSSPEC_PACKAGES:
        _check_packages(shown, "remote", "fsspec", FSSPEC_PACKAGES[parts.scheme])


def _check_packages(shown: str, extra: str, *packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise BadUrl(f"remote {shown!r} needs {package}: pip install 'eagercache[{extra}]'")


def _check_redis_path(path: str, shown: str) -> None:
    try:
        redis_path(path)
    except ValueError:
        raise BadUrl(
            f"remote {shown!r} names no database; use redis://HOST/0 or redis://HOST/0/PREFIX"
        ) from None


def redis_path(path: str) -> tuple[int, str]:
    """(database, prefix of keys) of the path of a redis:// URL. Raises ValueError."""
    database, _, prefix = path.strip("/").partition("/")
    if database and not (database.isascii() and database.isdecimal()):
        raise ValueError(path)
    return int(database or 0), prefix or _REDIS_PREFIX


def shown_url(url: str) -> str:
    """The URL as logs and messages may have it: without a user's name, password or query."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return url
    return parts._replace(netloc=host, query="", fragment="").geturl()
