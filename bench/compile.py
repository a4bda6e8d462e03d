"""What it costs to compile the default operators on CPU, step by step.

    .venv/bin/python bench/compile.py [--shapes 3] [--operators 60] [--output bench/results/x.md]

Every operator is called natively in a process whose misses are compiled in the background by the
ordinary service, into a store of its own: first one call alone (a cold process), then one call
alone in the worker that is warm by then, then all others at once. Seconds of CPU time are the
workers' own accounts, stored with each entry.
"""

from __future__ import annotations

import argparse
import collections
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import eagercache
import frame
import torch

aten = torch.ops.aten
Call = tuple[str, str, Callable[[], Any]]

# Rows, columns: small enough for a warm-up of seconds, vectorised, and parallel.
SHAPES = ((4, 8), (64, 96), (512, 512))

UNARY = (
    *("relu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "mish", "abs", "neg", "exp"),
    *("expm1", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf", "floor", "ceil"),
    *("round", "trunc", "sign", "logical_not", "isnan", "sum", "mean", "amax", "amin", "aminmax"),
    *("argmax", "prod", "any", "all", "max", "min", "clone", "gelu", "elu", "softplus"),
)
BINARY = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "atan2"),
    *("eq.Tensor", "lt.Tensor", "logical_and", "threshold_backward", "tanh_backward", "mse_loss"),
    *("sigmoid_backward", "silu_backward", "gelu_backward", "hardswish_backward"),
)


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def calls(rows: int, columns: int) -> Iterator[Call]:
    """Operators with a call each, on float32 tensors of ``rows`` x ``columns``."""
    x = torch.rand(rows, columns) + 0.5
    y = torch.rand(rows, columns) + 0.5
    w = torch.rand(columns)
    image = torch.rand(2, 4, rows, columns)
    shape = f"{rows}x{columns}"

    def call(name: str, *args: Any, **kwargs: Any) -> Call:
        return name, shape, lambda: _overload(name)(*args, **kwargs)

    for name in UNARY:
        yield call(name, x)
    for name in BINARY:
        extra = (0.0,) if name == "threshold_backward" else ()
        yield call(name, x, y, *extra)
    yield call("add.Tensor", x, w)
    yield call("mul.Tensor", x, torch.rand(rows, 1))
    yield call("var.correction", x, [1])
    yield call("var_mean.correction", x, [1])
    yield call("sum.dim_IntList", x, [0])
    yield call("mean.dim", x, [1], True)
    yield call("max.dim", x, 1)
    yield call("cumsum", x, 1)
    yield call("logsumexp", x, [1])
    yield call("linalg_vector_norm", x)
    yield call("_softmax", x, -1, False)
    yield call("_log_softmax", x, -1, False)
    yield call("_softmax_backward_data", x, y, -1, torch.float32)
    yield call("native_layer_norm", x, [columns], w, w, 1e-5)
    yield call("cat", [x, y], 1)
    yield call("stack", [x, y], 0)
    yield call("where.self", x > 1, x, y)
    yield call("clamp", x, 0.6, 0.9)
    yield call("leaky_relu", x, 0.1)
    yield call("addcmul", x, y, y)
    yield call("_to_copy", x, dtype=torch.bfloat16)
    yield call("tril", x)
    yield call("flip", x, [1])
    yield call("clone", x.t(), memory_format=torch.contiguous_format)
    yield call("avg_pool2d", image, [2, 2])
    yield call("max_pool2d_with_indices", image, [2, 2])
    yield call("constant_pad_nd", image, [1, 1, 1, 1])
    yield call("upsample_nearest2d", image, [2 * rows, 2 * columns])


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
            rest = wait_for(chosen[2:])
            kernels = [k for k in eagercache.kernels() if k.facts]
        total = time.monotonic() - begin
    text = report(kernels, first, second, rest, total)
    frame.write(text, arguments.output)
    return 0


def report(kernels: list[Any], first: float, second: float, rest: float, total: float) -> str:
    """The tables as Markdown."""
    made = [k for k in kernels if k.facts.get("form")]
    bare = [k for k in made if k.facts["form"] == "bare"]
    steps = [*STEPS, *CONTAINER_STEPS, *PROOF_STEPS]
    lines = [
        f"# Compile cost, CPU, {time.strftime('%Y-%m-%d')}",
        "",
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads a call. CPU seconds are the workers' own.",
        "",
        f"- {len(kernels)} keys decided, {len(made)} timed: {len(bare)} bare, "
        f"{len(made) - len(bare)} containers; wall time {total:.0f} s.",
        f"- First kernel of a cold process, worker start included: {first:.1f} s wall; "
        f"the next one alone: {second:.2f} s; the other {len(kernels) - 2} together: {rest:.0f} s.",
    ]
    for title, some in (("bare", bare), ("all that were timed", made)):
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
