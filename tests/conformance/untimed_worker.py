"""A compile worker that proves kernels and does not time them.

With `choose="always"` no time decides anything, and timings take turns on a machine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from eagercache.worker import main as worker
from eagercache.worker.jobs import cuda_job, job
from eagercache.worker.timing import cuda_timing, timing


@contextlib.contextmanager
def _no_turns() -> Iterator[None]:
    yield


def _untimed(*_: Any) -> timing.Timing:
    return timing.Timing(1.0, 1.0, 1.0, 1.0, 0, 0)


def _untimed_on_gpu(*_: Any) -> cuda_timing.CudaTiming:
    """As short as nothing: no faster form is looked for either."""
    return cuda_timing.CudaTiming(1.0, 1.0, 1.0, 1.0, 0, 0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def _undecided(*_: Any) -> tuple[bool, str]:
    return False, "not timed"


if __name__ == "__main__":
    timing.machine_to_itself = _no_turns
    timing.time_call = _untimed
    timing.decide = _undecided
    cuda_job.time_cuda_call = _untimed_on_gpu
    cuda_job.decide_cuda = _undecided
    assert job.timing is timing
    sys.exit(worker.main(sys.argv[1:]))
