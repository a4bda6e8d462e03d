"""HTTP connections that end by a deadline, however slowly the other side sends.

The timeout of a socket holds for one read: a server that sends a byte a second passes it for ever.
Here it is set anew before each read, to what is left of the whole request's time.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from typing import Any


class _TimedReader(io.RawIOBase):
    def __init__(self, connection: _Timed, raw: Any, own: socket.socket) -> None:
        super().__init__()
        self._connection, self._raw, self._socket = connection, raw, own

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._connection.left())
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedSocket:
    """What `http.client` uses of a socket."""

    def __init__(self, connection: _Timed, own: socket.socket) -> None:
        self._connection, self._socket = connection, own

    def sendall(self, data: Any) -> None:
        self._socket.settimeout(self._connection.left())  # it holds for all of them
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        raw = self._socket.makefile(mode, buffering=0)  # type: ignore[call-overload]
        return io.BufferedReader(_TimedReader(self._connection, raw, self._socket))

    def close(self) -> None:
        self._socket.close()


class _Timed(http.client.HTTPConnection):
    """A connection whose requests end by `give`."""

    _end = 0.0

    def give(self, seconds: float) -> None:
        """Says how long the next request may take, until its answer is read."""
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left of that. Raises TimeoutError."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def connect(self) -> None:
        self.timeout = self.left()
        super().connect()
        self.sock: Any = _TimedSocket(self, self.sock)


class _TimedTls(_Timed, http.client.HTTPSConnection):
    """The same over TLS, whose certificates are checked."""

    def connect(self) -> None:
        self.timeout = self.left()
        http.client.HTTPSConnection.connect(self)  # past `_Timed`: TLS is inside of our socket
        self.sock = _TimedSocket(self, self.sock)


def connection(host: str, port: int | None, context: ssl.SSLContext | None) -> _Timed:
    """A connection that is made with the first request; over TLS with a context."""
    if context is None:
        return _Timed(host, port)
    return _TimedTls(host, port, context=context)
