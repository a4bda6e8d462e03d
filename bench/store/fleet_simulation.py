"""A remote and the nodes of a fleet, simulated request by request (see fleet.py).

Nodes behave as `remote/` does: so many threads each, a deadline for each request, a breaker. A
server has so many cores and a network of 10 Gb/s; a request takes its CPU time on one core, in the
order of arrival, also when nobody waits for it any more.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass

from eagercache.remote.breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE
from eagercache.remote.desk import THREADS
from eagercache.remote.tier import PROGRAM_SECONDS
from eagercache.remote.transfer import PARALLEL

BYTES_PER_SECOND = 10e9 / 8
ROUND_TRIP = 0.0005  # of a network within a building
NODE_WORKERS = 16  # processes that compile on a node
MOST_NODES = 4096  # that are tried


@dataclass(frozen=True)
class Cost:
    """What one entry takes: of the server, of who asks, in requests and in bytes."""

    server: float
    client: float
    requests: float
    bytes: float


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
