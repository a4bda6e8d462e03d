"""What it costs to compile the default operators on CPU, step by step.

    python -m bench.compiling.compile [--shapes 3] [--operators 60] [--output bench/results/x.md]

Every operator is called natively in a process whose misses are compiled in the background by the
ordinary service, into a store of its own: first one call alone (a cold process), then one more,
then all others at once but for a few, and those few alone, one after the other, in the worker that
is warm by then. A second size of a class of calls is made into a kernel of all sizes ("shapes").
Seconds of CPU time are the workers' own accounts, stored with each entry; what a batch had in
common is shared out among its kernels. The exit status is 0 when the bounds below hold.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import eagercache
import torch
from eagercache.runtime.session import session

from bench.operators.default_calls import SHAPES, Call, calls
from bench.shared import frame

# Seconds: CPU time a kernel without and with proof and timing, wall time of one alone in a warm
# worker and of the first in a cold process.
BOUNDS = {"without": 0.35, "with": 0.8, "alone": 0.8, "first": 10.0}

# Made alone, at their first sizes, after all others.
ALONE = ("sigmoid", "tanh", "hardswish", "hardsigmoid", "mish")


def wait_for(chosen: list[Call]) -> float:
    """Makes the calls until they are queued, waits for all verdicts; seconds of wall time."""
    start = time.monotonic()
    for _, _, function in chosen:
        function()
        function()
    if not eagercache.wait(3600):
        sys.exit("kernels are still being compiled")
    return time.monotonic() - start


STEPS = ("native", "compile.lower", "compile.kernel", "compile.link", "compile.headers")
CONTAINER_STEPS = ("compile.wrapper", "compile.weights")
PROOF_STEPS = ("prove", "time", "publish")


def seconds_of(kernel: Any, step: str) -> float:
    """CPU seconds that the entry says its step took."""
    return float(kernel.facts.get(f"seconds_{step}", 0.0))


def compile_seconds(kernel: Any) -> float:
    """CPU seconds without native's answers, proof and timing."""
    steps = (*STEPS[1:], *CONTAINER_STEPS)
    return sum(seconds_of(kernel, step) for step in steps)


def main() -> int:
    """Prints the tables; writes them to --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--operators", type=int, default=1_000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    chosen = [
        call
        for shape in SHAPES[: arguments.shapes]
        for call in list(calls(*shape))[: arguments.operators]
    ]
    names = sorted({f"aten::{name}" for name, _, _ in chosen})
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        store.mkdir(mode=0o700)
        begin = time.monotonic()
        # Skipped where an operator is not eligible here: say so rather than stop.
        with eagercache.enable(names, on_miss="background", choose="faster", cache_dir=store):
            first = wait_for(chosen[:1])
            second = wait_for(chosen[1:2])
            apart = [call for call in chosen[2:] if call[0] in ALONE]
            wait_for([call for call in chosen[2:] if call[0] not in ALONE])
            # Their first sizes: a second size asks for a kernel of all sizes instead.
            alone = [wait_for([call]) for call in apart[: len(ALONE)]]
            wait_for(apart[len(ALONE) :])
            kernels = [k for k in eagercache.kernels() if k.facts]
            spent = sum(service.seconds for service in session.services())
        total = time.monotonic() - begin
    made = [k for k in kernels if k.facts.get("form")]
    figures = {
        "first": first,
        "alone": statistics.median(alone or [second]),
        "without": statistics.mean(map(compile_seconds, made)),
        "with": statistics.mean(map(total_seconds, made)),
    }
    frame.write(report(kernels, figures, second, total, spent), arguments.output)
    return 0 if all(value <= BOUNDS[name] for name, value in figures.items()) else 1


def report(
    kernels: list[Any], figures: dict[str, float], second: float, total: float, spent: float
) -> str:
    """The tables as Markdown."""
    where = frame.machine()
    made = [k for k in kernels if k.facts.get("form")]
    by_form = collections.defaultdict(list)
    for kernel in made:
        by_form[kernel.facts["form"]].append(kernel)
    counts = ", ".join(f"{len(some)} {form}" for form, some in sorted(by_form.items()))
    steps = [*STEPS, *CONTAINER_STEPS, *PROOF_STEPS]
    lines = [
        f"# Compile cost, CPU, {where['date']}",
        "",
        f"{where['processor']}, {where['cores']} cores, load {where['load']}; torch "
        f"{where['torch']}, Python {where['python']}; commit {where['commit']}; "
        f"{torch.get_num_threads()} threads a call. CPU seconds are the workers' own.",
        "",
        f"- {len(kernels)} keys decided, {len(made)} timed: {counts}; wall time {total:.0f} s. "
        f"Workers spent {spent:.0f} s of CPU time on requests, those that failed among them.",
        f"- First kernel of a cold process, worker start included: {figures['first']:.1f} s wall; "
        f"the second one alone (no precompiled header yet): {second:.2f} s; one alone after all "
        f"others: {figures['alone']:.2f} s (median of {len(ALONE)}). Bounds: {BOUNDS}.",
    ]
    for title, some in (*sorted(by_form.items()), ("all that were timed", made)):
        if some:
            lines.append(
                f"- CPU seconds a kernel, {title}: "
                f"{statistics.mean(map(compile_seconds, some)):.3f} mean, "
                f"{statistics.median(map(compile_seconds, some)):.3f} median without proof and "
                f"timing; {statistics.mean(total_seconds(k) for k in some):.3f} mean with them."
            )
    decisions = collections.Counter((k.decision, k.reason.split(":")[0][:60]) for k in kernels)
    lines += ["", "| decision | reason | keys |", "| --- | --- | --- |"]
    lines += [f"| {d} | {reason} | {n} |" for (d, reason), n in sorted(decisions.items())]
    head = ["operator", "sizes", "form", "decision", "native us", "kernel us", *steps]
    lines += ["", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    lines += [_row(kernel, steps) for kernel in sorted(made, key=_sort_key)]
    return "\n".join([*lines, ""])


def total_seconds(kernel: Any) -> float:
    """CPU seconds of everything that the worker did for the kernel."""
    return compile_seconds(kernel) + sum(seconds_of(kernel, s) for s in ("native", *PROOF_STEPS))


def _sort_key(kernel: Any) -> tuple[str, str]:
    return kernel.op, kernel.facts["call"]


def _row(kernel: Any, steps: list[str]) -> str:
    tensors = [a for a in kernel.call["args"] if a["kind"] == "tensor"]
    sizes = "x".join(map(str, tensors[0]["sizes"])) if tensors else "list"
    decision = f"{kernel.decision} {kernel.reason}".strip()
    cells = [
        f"{kernel.op.removeprefix('aten::')}.{kernel.overload}".removesuffix("."),
        sizes,
        kernel.facts["form"],
        decision,
        *(f"{value / 1e3:.2f}" if value else "" for value in (kernel.native_ns, kernel.kernel_ns)),
        *(f"{seconds_of(kernel, step):.3f}" for step in steps),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
