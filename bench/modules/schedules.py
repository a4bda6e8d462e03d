"""Optimizers whose numbers change with every step: what eagercache answers, and what it saves.

    python -m bench.modules.schedules [--steps 300] [--size 64]

SGD with momentum and Adam with an exponential schedule, on a few small matrices, twice from the
same start: natively and with kernels. The parameters must be equal bit for bit at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import eagercache
import torch
from eagercache.base.load import core

from bench.shared import frame

OPERATORS = [
    *("add_.Tensor", "mul_.Tensor", "addcmul_", "addcdiv_", "lerp_.Scalar", "sqrt", "div.Tensor"),
    *("_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_mul_.Scalar", "_foreach_sqrt"),
    *("_foreach_addcmul_.Scalar", "_foreach_addcdiv_.ScalarList", "_foreach_lerp_.Scalar"),
    *("_foreach_div_.ScalarList", "_foreach_div_.Scalar"),
]
Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
}


class Run:
    """Parameters, their gradients, and an optimizer with a schedule."""

    def __init__(self, make: Make, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = [
            torch.nn.Parameter(torch.randn(size, size, generator=generator)) for _ in range(4)
        ]
        for parameter in self.parameters:
            parameter.grad = torch.randn(size, size, generator=generator)
        self.optimizer = make(self.parameters)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.999)

    def step(self) -> None:
        """One step of the optimizer and of the schedule."""
        self.optimizer.step()
        self.schedule.step()


def compare(kind: str, steps: int, size: int) -> str:
    """One row of the table."""
    assert core is not None
    native, mine = Run(KINDS[kind], size), Run(KINDS[kind], size)
    seen = eagercache.stats()
    times: dict[bool, list[int]] = {False: [], True: []}
    for number in range(steps):
        for answering, run in ((False, native), (True, mine)):
            core.set_answering(answering)
            begin = time.perf_counter_ns()
            run.step()
            times[answering].append(time.perf_counter_ns() - begin)
        if number < 8:
            eagercache.wait(600)  # what these steps asked for
    stats = eagercache.stats()
    same = all(torch.equal(a, b) for a, b in zip(native.parameters, mine.parameters, strict=True))
    late = slice(steps // 2, None)
    ratios = [b / a for a, b in zip(times[False][late], times[True][late], strict=True)]
    low, middle, high = frame.quartiles(ratios)
    hits, missed = stats.hits - seen.hits, stats.misses - seen.misses
    return (
        f"| {kind} | {'yes' if same else 'NO'} | {stats.compiles - seen.compiles} | {hits} | "
        f"{missed} | {stats.native - seen.native} | {middle:.3f} ({low:.3f} to {high:.3f}) |"
    )


def main() -> int:
    """Prints the table; 1 where a parameter differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", type=int, default=64)
    arguments = parser.parse_args()
    frame.pin()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EAGERCACHE_DIR"] = folder
        eagercache.enable(OPERATORS, numerics="bitwise")  # the roots are not, otherwise
        rows = [compare(kind, arguments.steps, arguments.size) for kind in KINDS]
        eagercache.disable()
    where = frame.machine()
    print(
        f"{where['processor']}, {where['cores']} cores, load {where['load']}; torch "
        f"{where['torch']}; commit {where['commit']}, {where['date']}. {arguments.steps} steps, 4 "
        f"matrices of {arguments.size} x {arguments.size}; time of a step in the second half, by "
        "turns with native.\n\n| optimizer | same bits | compiles | hits | misses | native | ratio"
        " |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    print("\n".join(rows))
    return int(any("| NO |" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
