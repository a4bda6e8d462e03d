"""Remotes over HTTP, with GET, HEAD and PUT: what ccache, sccache and plain servers speak.

A server of WebDAV's takes no bytes into a folder that is not there: then MKCOL makes it.

Python's own `http.client` does it. Three verbs need no more, and of the libraries that are in use
none ends a whole request by a deadline. Redirects are not followed: the remote's name is what its
user trusts.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from eagercache.remote import timed_http
from eagercache.remote.place import Denied, PlaceError, TooLarge

_MOST_IDLE = 8  # connections that are kept for the next requests
_DRAINED_BYTES = 4096  # of an answer that nobody asked for
_RETRY_SECONDS = 0.1
_MISSING = (404, 410)
_CONFLICT = 409
_NO_FOLDER = (*_MISSING, _CONFLICT)  # the answers to PUT
_DENIED = (401, 403, 405, 407, 413, 501)
_LATER = (408, 425, 429, 500, 502, 503, 504)
_CHUNK = 1 << 16


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes


class HttpPlace:
    """A server that keeps bytes under paths. See `Place`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = host, parts.port
        self._path = parts.path.rstrip("/")
        self._headers = {"User-Agent": "eagercache"}
        if parts.username is not None:
            self._headers["Authorization"] = _basic(parts.username, parts.password)
        self._tunnel: tuple[str, int | None, dict[str, str]] | None = None
        self._take_proxy(parts.scheme, host)
        self._lock = threading.Lock()
        self._idle: list[timed_http._Timed] = []

    def _take_proxy(self, scheme: str, host: str) -> None:
        """Goes through the proxy that http_proxy, https_proxy and no_proxy name."""
        proxy = urllib.request.getproxies().get(scheme)
        if not proxy or urllib.request.proxy_bypass(host):
            return
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        headers = {}
        if parts.username is not None:
            headers["Proxy-Authorization"] = _basic(parts.username, parts.password)
        if scheme == "https":
            self._tunnel = (*self._address, headers)
        else:
            name = f"[{host}]" if ":" in host else host
            port = f":{self._address[1]}" if self._address[1] else ""
            self._path = f"http://{name}{port}{self._path}"
            self._headers.update(headers)
        self._address = parts.hostname or "", parts.port

    def get(self, name: str, most: int, seconds: float) -> bytes | None:
        """As `Place.get`."""
        answer = self._ask("GET", name, most, seconds)
        return None if answer.status in _MISSING else answer.content

    def size(self, name: str, seconds: float) -> int | None:
        """As `Place.size`."""
        answer = self._ask("HEAD", name, 0, seconds)
        if answer.status in _MISSING:
            return None
        length = answer.headers.get("content-length", "")
        # One that does not say is taken to have something else: it is sent again.
        return int(length) if length.isdecimal() else -1

    def put(self, name: str, content: bytes, seconds: float) -> None:
        """As `Place.put`."""
        end = time.monotonic() + seconds
        answer = self._ask("PUT", name, _DRAINED_BYTES, seconds, content)
        if answer.status in _NO_FOLDER:
            self._make_folders(name, end)
            answer = self._ask("PUT", name, _DRAINED_BYTES, end - time.monotonic(), content)
        if answer.status in _NO_FOLDER:
            raise Denied(f"PUT {name} is answered with {answer.status}")

    def missing(self, seconds: float) -> str | None:
        """As `Place.missing`: a server of bytes has no folders, or makes them."""
        return None

    def _make_folders(self, name: str, end: float) -> None:
        """Makes the folders of a name, as far as the server knows what that is."""
        *folders, _ = name.split("/")
        for depth in range(len(folders) + 1):
            with contextlib.suppress(PlaceError):  # as where it is there
                folder = "/".join([*folders[:depth], ""])
                self._ask("MKCOL", folder, _DRAINED_BYTES, end - time.monotonic())

    def _ask(
        self, method: str, name: str, most: int, seconds: float, content: bytes | None = None
    ) -> _Answer:
        """The answer: a success, or that there is nothing. Raises PlaceError for all others."""
        try:
            answer = self._exchange(method, name, most, seconds, content)
        except TimeoutError as error:
            raise PlaceError(f"no answer within {seconds:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PlaceError(reason, retry_after=_RETRY_SECONDS) from error
        status = answer.status
        no_folder = method in ("PUT", "MKCOL") and status == _CONFLICT
        if 200 <= status < 300 or status in _MISSING or no_folder:
            return answer
        what = f"{method} is answered with {status}"
        if status in _DENIED:
            raise Denied(what)
        if status in _LATER:
            wish = answer.headers.get("retry-after", "")
            later = float(wish) if wish.isdecimal() and len(wish) < 6 else _RETRY_SECONDS
            raise PlaceError(what, retry_after=later)
        raise PlaceError(what)

    def _exchange(
        self, method: str, name: str, most: int, seconds: float, content: bytes | None
    ) -> _Answer:
        connection = self._connection()
        connection.give(seconds)
        whole = False
        try:
            connection.request(method, f"{self._path}/{name}", body=content, headers=self._headers)
            response = connection.getresponse()
            found = 200 <= response.status < 300
            body = _body(response, most if found else _DRAINED_BYTES, strict=found)
            whole = response.isclosed() and not response.will_close
            headers = {key.lower(): value for key, value in response.getheaders()}
            return _Answer(response.status, headers, body)
        finally:
            self._give_back(connection, whole)

    def _connection(self) -> timed_http._Timed:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        made = timed_http.connection(*self._address, self._context)
        if self._tunnel is not None:
            host, port, headers = self._tunnel
            made.set_tunnel(host, port, headers)
        return made

    def _give_back(self, connection: timed_http._Timed, whole: bool) -> None:
        """Keeps a connection whose last answer was read to its end."""
        if whole:
            with self._lock:
                if len(self._idle) < _MOST_IDLE:
                    self._idle.append(connection)
                    return
        connection.close()


def _body(response: http.client.HTTPResponse, most: int, *, strict: bool) -> bytes:
    """At most so many bytes; where there are more, `TooLarge` when ``strict``."""
    length = response.length  # None: it ends with the connection, or comes in pieces
    if strict and length is not None and length > most:
        raise TooLarge(f"{length} bytes, where at most {most} may be")
    pieces: list[bytes] = []
    read = 0
    while read <= most:
        piece = response.read(min(_CHUNK, most + 1 - read))
        if not piece:
            break
        pieces.append(piece)
        read += len(piece)
    if read > most:
        if strict:
            raise TooLarge(f"more than {most} bytes")
        return b""
    if strict and length is not None and read < length:
        raise http.client.IncompleteRead(b"", length - read)
    return b"".join(pieces)


def _basic(user: str, password: str | None) -> str:
    text = f"{unquote(user)}:{unquote(password or '')}"
    return "Basic " + base64.b64encode(text.encode()).decode("ascii")
