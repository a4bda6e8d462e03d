"""Who uses a GPU, asked of NVIDIA's management library (NVML), which makes no context on it.

The functions and structures are those of the NVML API reference
(https://docs.nvidia.com/deploy/nvml-api/): nvmlDeviceGetMemoryInfo, ...GetComputeMode, and
...GetComputeRunningProcesses_v3 with its nvmlProcessInfo_t.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

# As NVML, `nvidia-smi -L` and CUDA_VISIBLE_DEVICES name a GPU, but for a part of one (MIG).
UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_LIBRARY = "libnvidia-ml.so.1"
_MOST_PROCESSES = 64
_DEFAULT_COMPUTE_MODE = 0  # NVML_COMPUTEMODE_DEFAULT: several processes may use it


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Use:
    """What is on a GPU. ``pids``: the processes that compute there, as NVML numbers them."""

    free_bytes: int
    total_bytes: int
    shared: bool  # its compute mode lets several processes use it
    pids: frozenset[int]


def use_of(uuid: str) -> Use | None:
    """What is on a GPU now; None where it is not there, or cannot be asked."""
    library = _library()
    if library is None or not UUID.fullmatch(uuid):
        return None
    handle, memory, mode = ctypes.c_void_p(), _Memory(), ctypes.c_uint()
    try:
        failed = (
            library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
            or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            or library.nvmlDeviceGetComputeMode(handle, ctypes.byref(mode))
        )
        pids = None if failed else _pids(library, handle)
    except AttributeError:  # an old driver's library lacks one
        return None
    if failed or pids is None:
        return None
    return Use(memory.free, memory.total, mode.value == _DEFAULT_COMPUTE_MODE, frozenset(pids))


def strangers(use: Use, groups: Iterable[int]) -> set[int]:
    """The processes on a GPU that are in none of these process groups."""
    ours = set(groups)
    return {pid for pid in use.pids if _group_of(pid) not in ours}


def _pids(library: ctypes.CDLL, handle: ctypes.c_void_p) -> set[int] | None:
    # Not those that only draw: a desktop's are always there.
    count, processes = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes):
        return None
    return {one.pid for one in processes[: count.value]}


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # ended, or of another user's view of processes
        return None


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
        return None if library.nvmlInit_v2() else library
    except (AttributeError, OSError):
        return None
