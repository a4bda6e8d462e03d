"""What a compile worker takes of a GPU that the program runs on."""

from __future__ import annotations

import contextlib

# Of what is free when a request comes; the program may want the rest meanwhile.
SHARE = 2 / 3


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
