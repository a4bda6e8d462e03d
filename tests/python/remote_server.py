"""A server on loopback that keeps bytes under paths, as remotes do, and misbehaves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# (request, content): answers in the server's place; content is None where it has none.
Toxic = Callable[[BaseHTTPRequestHandler, bytes | None], None]


class RemoteServer(ThreadingHTTPServer):
    """`http://127.0.0.1:PORT/cache`.

    Attributes:
        content: bytes by path, "/cache" before each.
        toxic: what answers instead of the server itself.
        requests: "METHOD PATH" of every request.
        headers: those of the last request, by lower-case name.
        connections: how many there were.
    """

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content: dict[str, bytes] = {}
        self.toxic: Toxic | None = None
        self.requests: list[str] = []
        self.headers: dict[str, str] = {}
        self.connections = 0
        self.released = threading.Event()  # what hangs goes on

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/cache"

    def get_request(self):  # type: ignore[no-untyped-def]
        self.connections += 1
        return super().get_request()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is none."""


class _Handler(BaseHTTPRequestHandler):
    server: RemoteServer
    protocol_version = "HTTP/1.1"

    def _begin(self) -> bytes | None:
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.headers = {key.lower(): value for key, value in self.headers.items()}
        return self.server.content.get(self.path)

    def _answer(self) -> None:
        content = self._begin()
        if self.server.toxic is not None:
            self.server.toxic(self, content)
        elif content is None:
            respond(self, 404)
        else:
            respond(self, 200, content)

    do_GET = do_HEAD = _answer  # noqa: N815

    def do_PUT(self) -> None:
        self._begin()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.toxic is not None:
            self.server.toxic(self, None)
        else:
            self.server.content[self.path] = body
            respond(self, 201)

    def log_message(self, *arguments: object) -> None:
        """The tests' output is not its."""


def respond(
    request: BaseHTTPRequestHandler, status: int, content: bytes = b"", **headers: str
) -> None:
    """A whole answer; ``headers`` with "_" for "-"."""
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)


def status(code: int, **headers: str) -> Toxic:
    """Answers everything with this status."""
    return lambda request, content: respond(request, code, **headers)


def hang(request: BaseHTTPRequestHandler, content: bytes | None) -> None:
    """Says nothing until the test is over."""
    request.server.released.wait(60)  # type: ignore[attr-defined]
    request.close_connection = True


def drip(request: BaseHTTPRequestHandler, content: bytes | None) -> None:
    """Sends a byte of its headers now and then, and so never lets a single read time out."""
    with contextlib.suppress(OSError):
        request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not request.server.released.wait(0.02):  # type: ignore[attr-defined]
            request.wfile.write(b"x")
            request.wfile.flush()
    request.close_connection = True


def cut(request: BaseHTTPRequestHandler, content: bytes | None) -> None:
    """Ends the connection without an answer."""
    request.close_connection = True


def truncate(request: BaseHTTPRequestHandler, content: bytes | None) -> None:
    """Promises all of the content and sends half of it."""
    content = content or b"nothing"
    request.send_response(200)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content[: len(content) // 2])
    request.close_connection = True


def delayed(seconds: float) -> Toxic:
    """Answers rightly, and late."""

    def answer(request: BaseHTTPRequestHandler, content: bytes | None) -> None:
        request.server.released.wait(seconds)  # type: ignore[attr-defined]
        respond(request, 404 if content is None else 200, content or b"")

    return answer


def corrupt(request: BaseHTTPRequestHandler, content: bytes | None) -> None:
    """Alters a byte on the way."""
    if content is None:
        respond(request, 404)
    else:
        at = len(content) // 2
        respond(request, 200, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def endless(request: BaseHTTPRequestHandler, content: bytes | None) -> None:
    """Says no length, and sends for ever."""
    request.send_response(200)
    request.end_headers()
    with contextlib.suppress(OSError):
        while not request.server.released.is_set():  # type: ignore[attr-defined]
            request.wfile.write(b"x" * 65536)
    request.close_connection = True


@contextlib.contextmanager
def serving() -> Iterator[RemoteServer]:
    """A server that runs for a block."""
    server = RemoteServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
