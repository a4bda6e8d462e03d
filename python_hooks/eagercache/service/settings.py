"""What the compile service needs to know."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagercache.remote.plan import RemotePlan

# Of the machine's cores, what all processes of the last minute may have kept busy while it counts
# as idle.
IDLE_SHARE = 0.25
# The driver reserves address space by the terabyte, which a limit on memory would count.
CUDA_WORKER_BYTES = 1 << 46
# A worker's context takes memory from the program.
CUDA_IDLE_SECONDS = 20.0


def machine_is_idle() -> bool:
    """Whether little ran on this machine in the last minute."""
    try:
        return os.getloadavg()[0] < IDLE_SHARE * (os.cpu_count() or 1)
    except OSError:  # as in a container without /proc
        return False


@dataclass(frozen=True)
class ServiceSettings:
    """What the service needs to know. Seconds throughout.

    ``awaited``: somebody waits for the kernels, so that workers are as nice as the program, not
    nicer. ``workers`` and ``slots`` of 0 mean half the cores, ``memory_bytes`` of 0 half of the
    machine's memory for each of a worker's processes. ``slots_folder`` None is the machine's own.
    ``python`` and ``worker_arguments`` exist for tests.
    """

    store_root: str
    environment: str
    choose: str = "faster"
    numerics: str = "accurate"
    margin: float = 0.03
    search: str = "quick"  # EAGERCACHE_SEARCH
    max_bytes: int = 10 << 30
    allow_untrusted: bool = False  # EAGERCACHE_ALLOW_UNTRUSTED
    remote: RemotePlan | None = None  # asked before a worker is
    revoked: str = ""  # EAGERCACHE_REVOKED, as an absolute path
    workers: int = 0
    slots: int = 0
    memory_bytes: int = 0
    slots_folder: Path | None = None
    cxx: str | None = None
    awaited: bool = False
    # A worker beside a program that uses all cores gets a twentieth of one.
    request_timeout: float = 900.0
    start_timeout: float = 600.0
    requests_per_worker: int = 500
    largest_batch: int = 16  # requests whose kernels are built together
    first_batch: int = 4  # the same for a worker's first, which somebody may be looking at
    again_delay: float = 120.0  # before a request that waits for an idle machine
    idle_check: float = 30.0  # between looks at whether the machine is idle
    machine_is_idle: Callable[[], bool] = machine_is_idle
    idle_timeout: float = 60.0  # a worker that has nothing to do for so long is ended
    slot_delay: float = 0.25  # between attempts to get a slot
    slot_timeout: float = 120.0  # then without one: its holder may be stopped
    busy_first_delay: float = 0.5
    busy_longest_delay: float = 8.0
    busy_limit: float = 600.0
    gpu: int | None = None  # the only one that workers see, by this process's count
    python: str = sys.executable
    worker_arguments: tuple[str, ...] = ("-m", "eagercache.worker")
    extra_environment: Mapping[str, str] = field(default_factory=dict)


def for_gpu(settings: ServiceSettings, gpu: int, name: str = "") -> ServiceSettings:
    """The settings of a service whose workers see GPU ``gpu`` alone.

    ``name`` is what CUDA_VISIBLE_DEVICES calls it, where this process's own variable does not say.
    """
    named = {"CUDA_VISIBLE_DEVICES": name} if name else {}
    return replace(
        settings,
        gpu=gpu,
        memory_bytes=CUDA_WORKER_BYTES,
        idle_timeout=CUDA_IDLE_SECONDS,
        extra_environment={**settings.extra_environment, **named},
    )
