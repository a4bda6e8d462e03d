"""What remotes cost callers, and how soon a second machine has its kernels.

    python -m bench.store.remotes [--rounds 5] [--misses 1000] [--entries 1000]

Callers: processes take turns in which every size is a key of its own (`neg_`), is called six times
and never has a kernel, as the compiler only sleeps: without a remote, with an empty one, and with
servers that are stopped, hang, or take half a second. A second machine: a store whose entries are
pushed to a server on loopback is pulled into an empty one; and a process with an empty store and
that remote calls an operator until a kernel answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.compiling import misses
from bench.shared import frame

WAYS = ("none", "empty", "stopped", "hangs", "slow")
CALLER = """
import json, os, sys, time, torch, eagercache
torch.set_num_threads(1)
count = int(sys.argv[1])
tensors = [torch.zeros(2 + n % 50, 2 + n // 50) for n in range(count)]
eagercache.enable(["neg_"])
times = []
for first in range(0, count, 50):
    for x in tensors[first : first + 50] * 6:  # what comes once is not asked for
        begin = time.perf_counter_ns()
        torch.neg_(x)
        times.append(time.perf_counter_ns() - begin)
    time.sleep(0.02)
time.sleep(3.0)
remote = eagercache.stats().remote
print(json.dumps([times, remote.misses, remote.errors]), flush=True)
os._exit(0)  # what waits to be compiled is of no interest
"""
FIRST_HIT = """
import json, time, torch, eagercache
x = torch.randn(64, 96)
begin = time.monotonic()
eagercache.enable(["var.correction"], choose="always")
while not eagercache.stats().hits:
    torch.var(x, -1)
print(json.dumps([time.monotonic() - begin, eagercache.stats().compiles]), flush=True)
"""

# As that, without a program that is busy beside the compiler.
FILL = FIRST_HIT.replace('choose="always"', 'choose="always", on_miss="wait"')


class Server(ThreadingHTTPServer):
    """Keeps bytes under paths; waits before each answer as long as it is told."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content: dict[str, bytes] = {}
        self.delay = 0.0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is none."""

    @property
    def url(self) -> str:
        """Of the remote."""
        return f"http://127.0.0.1:{self.server_address[1]}/cache"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        time.sleep(self.server.delay)
        content = self.server.content.get(self.path)
        self.send_response(200 if content is not None else 404)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_GET = do_HEAD = _answer  # noqa: N815

    def do_PUT(self) -> None:
        """Takes bytes."""
        self.server.content[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def served(delay: float = 0.0) -> Iterator[Server]:
    """A server that runs meanwhile."""
    with Server() as server:
        server.delay = delay
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def run(code: str, folder: Path, *arguments: str, **variables: str) -> Any:
    """What a program prints, as JSON."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EAGERCACHE_")}
    environment |= {"EAGERCACHE_DIR": str(folder), "EAGERCACHE_LINGER": "0", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def remote(way: str) -> Iterator[str]:
    """The URL of one that behaves so."""
    if way == "none":
        yield ""
    elif way in ("empty", "slow"):
        with served(0.5 if way == "slow" else 0.0) as server:
            yield server.url
    else:
        with socket.create_server(("127.0.0.1", 0)) as listening:  # takes calls, never answers
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/cache"
            if way == "stopped":
                listening.close()
            yield url


def callers(rounds: int, count: int, folder: Path, public: Path) -> list[str]:
    """Times of misses, by turns."""
    compiler = folder / "compiler"
    compiler.write_text(misses.COMPILER)
    compiler.chmod(0o755)
    times: dict[str, list[int]] = {way: [] for way in WAYS}
    asked = dict.fromkeys(WAYS, 0)
    tails: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            store = folder / f"{way}{number}"
            store.mkdir(mode=0o700)
            with remote(way) as url:
                variables = {"EAGERCACHE_REMOTE_TRUST": str(public), "EAGERCACHE_REMOTE": url}
                found, empty, errors = run(
                    CALLER,
                    store,
                    str(count),
                    EAGERCACHE_CXX=str(compiler),
                    **(variables if url else {}),
                )
            times[way] += found
            tails[way].append(misses.quantile(found, 0.999))
            asked[way] += empty + errors
    lines = [
        "| remote | calls | median, us | 99 %, us | 99.9 %, us (per round) | keys looked up |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way, found in times.items():
        per_round = ", ".join(f"{tail:.0f}" for tail in sorted(tails[way]))
        lines.append(
            f"| {way} | {len(found)} | {misses.quantile(found, 0.5):.1f} | "
            f"{misses.quantile(found, 0.99):.1f} | {misses.quantile(found, 0.999):.1f} "
            f"({per_round}) | {asked[way]} |"
        )
    return lines


def filled_store(first: Path, entries: int) -> tuple[Any, str, list[str]]:
    """(a store of so many kernels, its environment's text, the keys).

    One is a program's, and the others are copies that nobody asks for, each with its own object.
    """
    from eagercache import _C
    from eagercache.base import config, environment

    first.mkdir(mode=0o700)
    run(FILL, first)
    text = environment.environment_text(cxx=config.read_settings().cxx)
    store = _C.Store(str(first), text)
    (known,) = [row for row in store.entries() if row["kind"] == "kernel"]
    (item,) = known["objects"]
    library = next(first.rglob(f"{item['digest']}.so")).read_bytes()
    keys = [known["key"]]
    with tempfile.TemporaryDirectory(prefix="eagercache-remotes-") as folder:
        copy = Path(folder) / "copy.so"
        for number in range(entries - 1):
            copy.write_bytes(library + f"{number}".encode())
            facts = {"facts": known["facts"], "cpu_features": known["cpu_features"]}
            keys.append(f"{number:064x}")
            store.publish({"key": keys[-1], "kind": "kernel", **facts}, [("so", str(copy))])
    return store, text, keys


def second_machine(rounds: int, entries: int, folder: Path, keys: tuple[Path, Path]) -> list[str]:
    """How long a pull of so many entries takes, and the way to a first hit."""
    from eagercache import _C
    from eagercache.remote import transfer
    from eagercache.remote.entries import Exchange
    from eagercache.remote.plan import RemotePlan
    from eagercache.remote.tier import Tier

    store, text, _ = filled_store(folder / "first", entries)
    private, public = keys
    pulls, hits = [], []
    with served() as server:
        plan = RemotePlan((server.url,), (_C.public_key(str(public)),), str(private))
        pushed = transfer.push([Tier(server.url, seconds=30)], Exchange(store, text, plan))
        for number in range(rounds):
            other, empty = folder / f"pulled{number}", folder / f"asks{number}"
            for made in (other, empty):
                made.mkdir(mode=0o700)
            begin = time.monotonic()
            exchange = Exchange(_C.Store(str(other), text), text, plan)
            pulled = transfer.pull([Tier(server.url, seconds=30)], exchange)
            pulls.append(time.monotonic() - begin)
            assert pulled.fetched == entries and not pulled.errors, pulled
            seconds, compiles = run(
                FIRST_HIT,
                empty,
                EAGERCACHE_REMOTE=server.url,
                EAGERCACHE_REMOTE_TRUST=str(public),
            )
            assert compiles == 0
            hits.append(seconds)
    return [
        f"{pushed.sent} entries pushed, {pushed.bytes_sent / 1e6:.1f} MB. Pulled into an empty "
        f"store in {_seconds(pulls)}. A program with an empty store has its first hit "
        f"{_seconds(hits)} after `enable()`, with 0 compiles.",
    ]


def _seconds(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})"


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--misses", type=int, default=1000)
    parser.add_argument("--entries", type=int, default=1000)
    options = parser.parse_args()
    from eagercache.ahead import bundle

    print(frame.machine())
    with tempfile.TemporaryDirectory(prefix="eagercache-remotes-") as name:
        folder = Path(name)
        keys = bundle.keygen(folder / "fleet")
        print("\n".join(second_machine(options.rounds, options.entries, folder, keys)), flush=True)
        if options.misses:
            print("\n".join(callers(options.rounds, options.misses, folder, keys[1])))


if __name__ == "__main__":
    main()
