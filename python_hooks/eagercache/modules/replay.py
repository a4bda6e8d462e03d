"""Captures calls of modules on a GPU as CUDA graphs (`python_hooks/nn_modules/replays.h`).

The core says which call has come often enough; here are the allocator's pools, in which a graph's
memory lies, and the comparison of what it answers with what its kernel does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.base.load import core
from eagercache.calls.texts import first_line

log = logging.getLogger("eagercache")

# cuBLAS works in memory of its own for each thread and stream that captures (32 MiB on Hopper, 8 on
# others), as it does in eager calls, which nothing bounds. It is no graph's, so that it does not
# count against the limit, or a second thread or stream would be left without replays for what the
# first one has. So many of them are made on a GPU. A thread that comes later captures nothing, but
# replays what others have captured.
MOST_WORKSPACES = 8
# Seconds after a stream's pool was given back, in which nothing is captured for it; twice as long
# after each further time. A process may run for months and meet other sizes each day, so that no
# stream is given up for ever; and one whose graphs do not fit spends no time on making them.
SHORTEST_REST = 1.0
LONGEST_REST = 3600.0
# What a replay may differ by where a kernel adds in any order. Most give the same bits.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
LOOSE = 2e-2
# Of each GPU a pool from which nothing is taken.
_idle_pools: dict[int, Any] = {}


@dataclass
class _Lane:
    """What is captured for one stream: core's lane, the pool, and the stream for captures.

    The stream is made for this and never destroyed. cuBLAS keeps a workspace for each thread and
    stream, which lies in a pool that is never given back: no work of others can get hold of it,
    also where somebody clears the workspaces. When the graphs' pool is given back, the next one
    has the same stream, so that nothing is left behind.
    """

    core: Any
    pool: Any  # torch.cuda.MemPool
    stream: Any  # torch.cuda.ExternalStream
    workspaces: Any  # torch.cuda.MemPool
    bytes: int = 0  # of the pool
    workspace_bytes: int = 0
    rests_until: float = 0.0
    rest: float = 0.0


class GraphCaptures:
    """Makes the graphs of one process, of `limit` bytes of each GPU's memory at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._lanes: dict[tuple[int, int], _Lane] = {}  # by device and stream
        self._workspaces: dict[int, int] = {}  # how many a device has
        self._thread = threading.local()  # the places where a thread has one

    def bytes(self) -> int:
        """What the pools of graphs hold of all GPUs' memory."""
        return sum(lane.bytes for lane in self._lanes.values())

    def workspace_bytes(self) -> int:
        """What libraries hold of all GPUs' memory for captures, besides."""
        return sum(lane.workspace_bytes for lane in self._lanes.values())

    def give_back(self) -> None:
        """Gives the memory of all graphs back. Their calls are counted anew."""
        assert core is not None
        with self._lock, core.RelaxedCapture():
            for place, lane in self._lanes.items():
                if lane.bytes > 0:
                    _empty(lane, place)
                lane.rest = lane.rests_until = 0.0

    def __call__(self, request: Any) -> str:
        """Captures the call of ``request``; empty, "busy", or why it is not replayed."""
        if torch.cuda.get_allocator_backend() != "native":
            return "the allocator of CUDA's memory is not PyTorch's own"
        if torch.cuda.get_sync_debug_mode() != 0:
            return "synchronizations are watched (torch.cuda.set_sync_debug_mode)"
        if not self._lock.acquire(blocking=False):
            return "busy"
        try:
            return self._capture(request)
        except torch.cuda.OutOfMemoryError:
            return "there was no memory for it"
        except RuntimeError as error:
            return f"its capture failed ({first_line(error)})"
        finally:
            self._lock.release()

    def _capture(self, request: Any) -> str:
        assert core is not None
        place = (request.device_index, request.stream)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = _make_lane(*place)
        if time.monotonic() < lane.rests_until or not self._give_workspace(lane, place):
            return "busy"
        # How much it needs is known when it has been captured, and then the pool has grown. So it
        # is captured beside it first: one that is too large costs no other graph its memory.
        reason, needed = _try(request, lane)
        if reason:
            return reason
        others = self._held(place[0]) - lane.bytes
        if others + max(lane.bytes, needed) > self.limit:
            held = f"{others + max(lane.bytes, needed):,} bytes in all"
            return f"its graph needs more of the GPU's memory ({held}) than it may"
        with _captured_in(lane.stream, lane.pool, request.device_index):
            reason = request.capture(lane.core)
        # Another thread may be capturing, which must not notice what comes.
        with core.RelaxedCapture():
            return reason or self._judge(request, lane, place)

    def _give_workspace(self, lane: _Lane, place: tuple[int, int]) -> bool:
        """Has cuBLAS make its handle and memory for this thread, which no capture may contain.

        False where the GPU has enough of them. Threads that end leave theirs to later ones.
        """
        assert core is not None
        known: set[tuple[int, int]] = vars(self._thread).setdefault("places", set())
        if place not in known and self._workspaces.get(place[0], 0) >= MOST_WORKSPACES:
            return False
        with core.RelaxedCapture(), _captured_in(lane.stream, lane.workspaces, place[0]):
            torch.cuda.current_blas_handle()
            held = _bytes_of(lane.workspaces)
        if held > lane.workspace_bytes:
            self._workspaces[place[0]] = self._workspaces.get(place[0], 0) + 1
            lane.workspace_bytes = held
        known.add(place)
        return True

    def _held(self, device: int) -> int:
        return sum(lane.bytes for key, lane in self._lanes.items() if key[0] == device)

    def _judge(self, request: Any, lane: _Lane, place: tuple[int, int]) -> str:
        """Why what was captured is not to be replayed; empty where it is."""
        lane.bytes = _bytes_of(lane.pool)
        if self._held(place[0]) > self.limit:
            # What graphs leave of each other's segments adds up. All are made anew, by and by.
            _empty(lane, place)
            lane.rest = min(max(2 * lane.rest, SHORTEST_REST), LONGEST_REST)
            lane.rests_until = time.monotonic() + lane.rest
            return "busy"
        differs = _difference(request.outputs(False), request.outputs(True))
        log.info(
            "event=capture device=%d nodes=%d pool_bytes=%d differs=%r",
            request.device_index,
            request.num_nodes,
            lane.bytes,
            differs,
        )
        return differs


def _make_lane(device: int, stream: int) -> _Lane:
    assert core is not None
    with torch.cuda.device(device):
        captures = torch.cuda.ExternalStream(core.make_capture_stream(), device=device)
        return _Lane(core.GraphLane(device, stream), _kept_pool(), captures, _kept_pool())


def _try(request: Any, lane: _Lane) -> tuple[str, int]:
    """Captures a call in a pool of its own, which ends: (why it cannot be, what it needs)."""
    assert core is not None
    device = request.device_index
    with torch.cuda.device(device):
        pool = _kept_pool()
    try:
        with _captured_in(lane.stream, pool, device):
            reason: str = request.capture(lane.core)
        return reason, _bytes_of(pool)
    finally:
        with core.RelaxedCapture():
            if any(segment["allocated_size"] for segment in _segments(pool)):
                # A library's, which graphs that are captured later use too.
                lane.workspace_bytes += _bytes_of(pool)
            else:
                _release(pool, device)


def _empty(lane: _Lane, place: tuple[int, int]) -> None:
    """Gives the memory of a lane's graphs back. Its calls are counted anew, and captured again."""
    assert core is not None
    lane.core.close()
    # Of the last replay. Where that cannot be waited for, nothing is given back.
    torch.cuda.ExternalStream(place[1], device=place[0]).synchronize()
    old = lane.pool
    with torch.cuda.device(place[0]):
        lane.core, lane.pool, lane.bytes = core.GraphLane(*place), _kept_pool(), 0
    _release(old, place[0])


def _release(pool: Any, device: int) -> None:
    """Gives back the memory of a pool in which nothing lives.

    While memory of a GPU comes from a pool, the allocator gives back that of released pools alone.
    So the program's cached memory stays, and another thread may be capturing: where a MemPool
    ends meanwhile, so does the process.
    """
    torch._C._cuda_releasePool(device, pool.id)
    with contextlib.ExitStack() as stack:
        for index in range(torch.cuda.device_count()):
            if index == device or torch.cuda.memory_reserved(index) > 0:
                if index not in _idle_pools:
                    with torch.cuda.device(index):
                        _idle_pools[index] = _kept_pool()
                stack.enter_context(torch.cuda.use_mem_pool(_idle_pools[index], index))
        torch.cuda.empty_cache()


def _segments(pool: Any) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = pool.snapshot(include_traces=False)
    return segments


def _bytes_of(pool: Any) -> int:
    return sum(segment["total_size"] for segment in _segments(pool))


def _kept_pool() -> Any:
    """One of the current device, whose object never ends: see `_release`.

    At the interpreter's end it would call a driver that has gone.
    """
    pool = torch.cuda.MemPool()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool


@contextlib.contextmanager
def _captured_in(stream: Any, pool: Any, device: int) -> Iterator[None]:
    """The capture's stream is current, and this thread's memory is the pool's."""
    with (
        torch.cuda.device(device),
        torch.cuda.stream(stream),
        torch.cuda.use_mem_pool(pool, device),
    ):
        yield


def _difference(run: list[torch.Tensor], replayed: list[torch.Tensor]) -> str:
    """Empty where a replay answered as the kernel did."""
    for index, (ours, expected) in enumerate(zip(replayed, run, strict=True)):
        if not expected.is_floating_point() and not expected.is_complex():
            alike = torch.equal(ours, expected)
        else:
            bound = TOLERANCE.get(expected.dtype, LOOSE)
            alike = torch.allclose(ours, expected, rtol=bound, atol=bound, equal_nan=True)
        if not alike:
            return f"its replay did not answer as its kernel does (output {index})"
    return ""


_captures = GraphCaptures(0)


def set_limit(limit: int) -> None:
    """How many bytes of each GPU graphs may keep; 0: nothing is captured, and nothing replayed."""
    assert core is not None
    _captures.limit = limit
    core.set_replay_handler(_captures if limit > 0 else None)


def pool_bytes() -> int:
    """What graphs keep of all GPUs' memory."""
    return _captures.bytes()


def workspace_bytes() -> int:
    """What libraries keep of it for captures, besides; bounded by MOST_WORKSPACES."""
    return _captures.workspace_bytes()


def give_back() -> None:
    """Gives back what graphs keep. Calls that come often are captured again."""
    _captures.give_back()
