"""Remotes in a Redis server, through redis-py: names are keys, and each value is set at once."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from eagercache.remote.bounded import Bounded
from eagercache.remote.place import Denied, PlaceError, TooLarge, redis_path

_RETRY_SECONDS = 0.1
# A thread that nobody waits for any longer ends after so long a silence of the server.
_SILENCE_SECONDS = 60.0


class RedisPlace:
    """Keys below a prefix in one of a server's databases. See `Place`.

    The client's deadlines hold for one read of a socket, so that `Bounded` ends requests. It makes
    no attempts of its own: a tier does.
    """

    def __init__(self, url: str) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        parts = urlsplit(url)
        database, self._prefix = redis_path(parts.path)
        self._redis: Any = redis.Redis(
            host=parts.hostname or "",
            port=parts.port or 6379,
            db=database,
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password is not None else None,
            ssl=parts.scheme == "rediss",
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_SILENCE_SECONDS,
            socket_connect_timeout=_SILENCE_SECONDS,
        )
        self._bounded = Bounded(_place_error)

    def get(self, name: str, most: int, seconds: float) -> bytes | None:
        """As `Place.get`."""

        def read() -> bytes | None:
            there, content = self._at_once("getrange", name, 0, most)
            if not there:
                return None
            if len(content) > most:
                raise TooLarge(f"more than {most} bytes")
            return bytes(content)

        return self._bounded.within(seconds, read)

    def size(self, name: str, seconds: float) -> int | None:
        """As `Place.size`."""

        def ask() -> int | None:
            there, length = self._at_once("strlen", name)
            return int(length) if there else None

        return self._bounded.within(seconds, ask)

    def put(self, name: str, content: bytes, seconds: float) -> None:
        """As `Place.put`."""
        self._bounded.within(seconds, lambda: self._redis.set(self._key(name), content))

    def missing(self, seconds: float) -> str | None:
        """As `Place.missing`: a server has all of its databases."""
        return None

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _at_once(self, command: str, name: str, *arguments: int) -> tuple[bool, Any]:
        """Whether a key is there, which an empty answer does not tell, and a command's answer."""
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.exists(self._key(name))
            getattr(pipeline, command)(self._key(name), *arguments)
            there, answer = pipeline.execute()
        return bool(there), answer


def _place_error(error: BaseException) -> PlaceError:
    from redis import exceptions

    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    # Where a server has no room left, or is a replica, it can still be read.
    denied = (
        *(exceptions.AuthenticationError, exceptions.NoPermissionError),
        *(exceptions.OutOfMemoryError, exceptions.ReadOnlyError),
    )
    if isinstance(error, denied):
        return Denied(reason)
    if isinstance(error, (exceptions.ResponseError, exceptions.DataError)):
        return PlaceError(reason)
    passing = isinstance(error, (exceptions.RedisError, OSError))
    return PlaceError(reason, retry_after=_RETRY_SECONDS if passing else None)
