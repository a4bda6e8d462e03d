"""How much slower a program's own work is while its kernels are compiled.

    python -m bench.operators.slow_down [--windows 9] [--threads 1]

The program multiplies matrices, which eagercache leaves alone. In every second window a few new
calls are made before it, whose kernels are compiled in the background meanwhile; in the others
nothing is. Printed are the medians of a step in both and the ratio of neighbouring windows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time

import eagercache
import torch

from bench.operators.default_calls import UNARY
from bench.shared import frame

SECONDS = 3.0
NEW_CALLS = 4


def steps(seconds: float, a: torch.Tensor, b: torch.Tensor) -> float:
    """The median step of a window, in microseconds."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter_ns()
        torch.mm(a, b)
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def ask_for_kernels(window: int) -> None:
    """Calls of operators that were not called before, twice each: their kernels are asked for."""
    x = torch.rand(16, 24) + 0.5
    for name in UNARY[window * NEW_CALLS : (window + 1) * NEW_CALLS]:
        for _ in range(2):
            getattr(torch.ops.aten, name)(x)


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--windows", type=int, default=len(UNARY) // NEW_CALLS - 1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EAGERCACHE_DIR"] = folder
        eagercache.enable([f"aten::{name}" for name in UNARY])
        ask_for_kernels(0)
        eagercache.wait(300)  # the worker has started
        idle, busy, compiled = [], [], 0
        for window in range(1, arguments.windows + 1):
            idle.append(steps(SECONDS, a, b))
            before = eagercache.stats().compiles
            ask_for_kernels(window)
            busy.append(steps(SECONDS, a, b))
            eagercache.wait(300)
            compiled += eagercache.stats().compiles - before
        eagercache.disable()
    ratios = [mine / base for mine, base in zip(busy, idle, strict=True)]
    low, middle, high = frame.quartiles(ratios)
    where = frame.machine()
    print(
        f"{where['processor']}, {where['cores']} cores, {arguments.threads} threads, load "
        f"{where['load']}; torch {where['torch']}; commit {where['commit']}, {where['date']}\n\n"
        f"- step alone {statistics.median(idle):.0f} us, while kernels compile "
        f"{statistics.median(busy):.0f} us; {compiled} compiled in {len(busy)} windows of "
        f"{SECONDS:.0f} s\n- ratio {middle:.3f}, quartiles {low:.3f} to {high:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
