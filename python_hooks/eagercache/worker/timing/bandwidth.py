"""What a call has to move, and how fast this machine's memory is: the limit of its kernels."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from eagercache.calls.call import Call
from eagercache.calls.storage import extent

# Of calls that move less than this the caches answer, and a copy is no limit.
LEAST_BYTES = 8 << 20
_COPIED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # more than a cache holds
_COPIES = 7


def bytes_moved(call: Call, outputs: Sequence[Any]) -> int:
    """Bytes of the call's tensors and results, each once, and of what it writes once more.

    What no kernel can do without; of an expanded tensor what is stored. Some have to read twice,
    as a softmax whose rows fit in no registers.
    """
    read = [spec.extent * spec.dtype.itemsize for spec in call.tensors]
    written = sum(read[index] for index in call.written)
    fresh = [outputs[index] for index in call.fresh] if call.written else outputs
    made = sum(
        extent(output.size(), output.stride()) * output.element_size()
        for output in fresh
        if isinstance(output, torch.Tensor)
    )
    return sum(read) + written + made


def facts_of(call: Call, outputs: Sequence[Any]) -> dict[str, str]:
    """For the entry: bytes moved, and gigabytes a second of a copy; nothing for small calls."""
    moved = bytes_moved(call, outputs)
    if moved < LEAST_BYTES:
        return {}
    device = "cuda" if any(spec.device.startswith("cuda") for spec in call.tensors) else "cpu"
    return {"bytes": str(moved), "copy_gbps": f"{copy_gbps(device, torch.get_num_threads()):.1f}"}


@functools.cache
def copy_gbps(device: str, threads: int) -> float:
    """Gigabytes a second that a copy between two buffers reads and writes; the best of several.

    ``threads`` are those that torch has now; on CUDA the device is the worker's first.
    """
    source = torch.zeros(_COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    measure = _cuda_seconds if device == "cuda" else _seconds
    best = min(measure(source, target) for _ in range(_COPIES))
    return 2 * source.nbytes / best * 1e-9


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin


def _cuda_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(4):
        target.copy_(source)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / 4
