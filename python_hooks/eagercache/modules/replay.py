"""Captures calls of modules on a GPU as CUDA graphs (`python_hooks/nn_modules/replays.h`).

The core says which call has come often enough; here are the allocator's pools, in which a graph's
memory lies, and the comparison of what it answers with what its kernel does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from eagercache.base.load import core

log = logging.getLogger("eagercache")

# So often a stream's pool is given back; each time leaves a library's workspace behind.
MOST_CLOSED = 3
# What a replay may differ by where a kernel adds in any order. Most give the same bits.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
LOOSE = 2e-2


@dataclass
class _Lane:
    """What is captured for one stream: core's lane, the pool, and the stream for captures.

    The stream is made for this and never destroyed. cuBLAS keeps a workspace for each stream,
    which comes from the pool at the first capture; no work of others can get hold of it.
    """

    core: Any
    pool: Any  # torch.cuda.MemPool
    stream: Any  # torch.cuda.ExternalStream
    bytes: int = 0


class GraphCaptures:
    """Makes the graphs of one process, of `limit` bytes of each GPU's memory at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._lanes: dict[tuple[int, int], _Lane] = {}  # by device and stream
        self._closed: dict[tuple[int, int], int] = {}  # how often

    def bytes(self) -> int:
        """What the pools hold of all GPUs' memory."""
        return sum(lane.bytes for lane in self._lanes.values())

    def __call__(self, request: Any) -> str:
        """Captures the call of ``request``; empty, "busy", or why it is not replayed."""
        if torch.cuda.get_allocator_backend() != "native":
            return "the allocator of CUDA's memory is not PyTorch's own"
        if torch.cuda.get_sync_debug_mode() != 0:
            return "synchronizations are watched (torch.cuda.set_sync_debug_mode)"
        if self._closed.get((request.device_index, request.stream), 0) >= MOST_CLOSED:
            return "graphs of its stream need more memory than EAGERCACHE_GRAPH_BYTES"
        if not self._lock.acquire(blocking=False):
            return "busy"
        try:
            return self._capture(request)
        except torch.cuda.OutOfMemoryError:
            return "there was no memory for it"
        except RuntimeError as error:
            return f"its capture failed ({str(error).splitlines()[0]})"
        finally:
            self._lock.release()

    def _capture(self, request: Any) -> str:
        assert core is not None
        place = (request.device_index, request.stream)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = _make_lane(*place)
        with _captured_in(lane, request.device_index):
            reason: str = request.capture(lane.core)
        # Another thread may be capturing, which must not notice what comes.
        with core.RelaxedCapture():
            return reason or self._judge(request, lane, place)

    def _judge(self, request: Any, lane: _Lane, place: tuple[int, int]) -> str:
        """Why what was captured is not to be replayed; empty where it is."""
        lane.bytes = sum(
            segment["total_size"] for segment in lane.pool.snapshot(include_traces=False)
        )
        held = sum(other.bytes for key, other in self._lanes.items() if key[0] == place[0])
        if held > self.limit:
            self._close(place, for_good=held > lane.bytes)
            return f"its graph needs more of the GPU's memory ({held:,} bytes in all) than it may"
        differs = _difference(request.outputs(False), request.outputs(True))
        log.info(
            "event=capture device=%d nodes=%d pool_bytes=%d differs=%r",
            request.device_index,
            request.num_nodes,
            lane.bytes,
            differs,
        )
        return differs

    def _close(self, place: tuple[int, int], *, for_good: bool) -> None:
        """Gives a lane's memory back. Its calls are counted anew, and may be captured again.

        For good where other streams have the memory.
        """
        lane = self._lanes.pop(place)
        lane.core.close()
        self._closed[place] = MOST_CLOSED if for_good else self._closed.get(place, 0) + 1
        # Of the last replay. Where that cannot be waited for, nothing is given back.
        torch.cuda.ExternalStream(place[1], device=place[0]).synchronize()
        torch._C._cuda_releasePool(place[0], lane.pool.id)
        torch.cuda.empty_cache()


def _make_lane(device: int, stream: int) -> _Lane:
    assert core is not None
    with torch.cuda.device(device):
        pool = torch.cuda.MemPool()
        _keep(pool)
        return _Lane(
            core.GraphLane(device, stream),
            pool,
            torch.cuda.ExternalStream(core.make_capture_stream(), device=device),
        )


def _keep(pool: Any) -> None:
    """Has a pool never end: at the interpreter's end it would call a driver that has gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


@contextlib.contextmanager
def _captured_in(lane: _Lane, device: int) -> Iterator[None]:
    """The capture's stream is current, and this thread's memory is the pool's."""
    with (
        torch.cuda.device(device),
        torch.cuda.stream(lane.stream),
        torch.cuda.use_mem_pool(lane.pool, device),
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
