"""What a compile worker takes of a GPU that the program and other workers run on."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from eagercache.calls.numerics import is_out_of_memory
from eagercache.worker.timing.turns import turn

# Of what is free when a request comes; the program may want the rest meanwhile.
SHARE = 2 / 3
# How long others are waited for, who took what a proof needs.
ROOM_TIMEOUT = 60.0

Result = TypeVar("Result")


def take_a_share() -> None:
    """Has allocations of this worker fail past a share of what is free now.

    Such a failure passes: the request is made again. For a process that uses CUDA. A device that
    cannot be asked is left for the request to fail on.
    """
    import torch

    if not torch.cuda.is_available():
        return
    with contextlib.suppress(RuntimeError):
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            limit = torch.cuda.memory_reserved(index) + SHARE * free
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)


def give_back() -> None:
    """Frees what the allocator keeps, which the program could not have while this worker lives."""
    import torch

    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            torch.cuda.empty_cache()


def with_room(step: Callable[[], Result]) -> Result:
    """What ``step`` gives. Where a GPU's memory runs out, it is made once more with a larger share.

    Several workers prove at a time, and the first of them may take most of what was free. So this
    one gives all back, waits until twice what it had is free, and no other one makes a step once
    more meanwhile. ``step`` can be made again after it raised.
    """
    import torch

    try:
        return step()
    except Exception as error:
        if not is_out_of_memory(error) or not torch.cuda.is_initialized():
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what the memory is wanted for
        wanted = 2 * torch.cuda.max_memory_reserved()
    give_back()
    with turn("memory", ROOM_TIMEOUT):
        _wait_for(wanted)
        take_a_share()
        return step()


def _wait_for(wanted: int) -> None:
    """Waits until so many bytes may be taken, or most of the GPU is free."""
    import torch

    deadline = time.monotonic() + ROOM_TIMEOUT
    with contextlib.suppress(RuntimeError):  # of a device that is lost
        while time.monotonic() < deadline:
            free, total = torch.cuda.mem_get_info()
            if SHARE * free >= wanted or free >= SHARE * total:
                return
            time.sleep(0.25)
