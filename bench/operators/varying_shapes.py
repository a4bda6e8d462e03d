"""Ten operators on sizes at random: kernels compiled, calls that waited, answers against native.

    python -m bench.operators.varying_shapes [--device cpu] [--calls 2000] [--choose always]
                                             [--output x.md]

Batch 1 to 64, length 1 to 512. Every call waits for what it has compiled, so that one that led to
a compile is seen as such, and its answer is compared with the one that native gave before. With
``--choose faster`` (what users have) a class kernel answers only near sizes where it was faster.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagercache
import torch

from bench.shared import frame

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def operators() -> dict[str, Function]:
    """The ten, as functions of a matrix and a vector as long as its rows."""
    aten = torch.ops.aten
    return {
        "relu": lambda x, w: aten.relu(x),
        "silu": lambda x, w: aten.silu(x),
        "gelu": lambda x, w: aten.gelu(x),
        "add.Tensor": lambda x, w: aten.add(x, w),
        "mul.Tensor": lambda x, w: aten.mul(x, x),
        "sum.dim_IntList": lambda x, w: aten.sum(x, [-1]),
        "amax": lambda x, w: aten.amax(x, [-1]),
        "var.correction": lambda x, w: aten.var(x, [-1]),
        "_softmax": lambda x, w: aten._softmax(x, -1, False),
        "native_layer_norm": lambda x, w: aten.native_layer_norm(x, [x.size(1)], w, w, 1e-5)[0],
    }


def same(kernel: torch.Tensor, native: torch.Tensor) -> bool:
    """Within what the proof allows (a bound for the longest row here), and of native's layout."""
    return (
        kernel.dtype == native.dtype
        and kernel.size() == native.size()
        and kernel.stride() == native.stride()
        and torch.allclose(kernel, native, rtol=2e-5, atol=2e-5, equal_nan=True)
    )


def run(device: str, calls: int, choose: str, seed: int) -> dict[str, Any]:
    """Makes the calls; what was counted."""
    functions = operators()
    options: dict[str, Any] = {"devices": [device], "on_miss": "wait", "choose": choose}
    chooser = random.Random(seed)
    torch.manual_seed(seed)
    eagercache.enable(list(functions), **options)
    wrong: list[str] = []
    compiling: collections.Counter[str] = collections.Counter()
    compiled: collections.Counter[str] = collections.Counter()
    hits = 0
    start = time.monotonic()
    for number in range(calls):
        name = list(functions)[number % len(functions)]
        batch, length = chooser.randint(1, 64), chooser.randint(1, 512)
        x, w = torch.randn(batch, length).to(device), torch.randn(length).to(device)
        eagercache.disable()
        native = functions[name](x, w)
        eagercache.enable(list(functions), **options)
        seen = eagercache.stats()
        answer = functions[name](x, w)
        stats = eagercache.stats()
        eagercache.disable()  # comparing calls operators too
        before, after = seen.compiles + seen.failures, stats.compiles + stats.failures
        hits += stats.hits - seen.hits
        compiling[name] += after > before
        compiled[name] += after - before
        if not same(answer, native):
            wrong.append(f"{name} {batch}x{length}")
    return {
        "seconds": time.monotonic() - start,
        "calls": calls,
        "hits": hits,
        "failures": eagercache.stats().failures,
        "compiling": compiling,
        "compiled": compiled,
        "wrong": wrong,
    }


def _machine(device: str) -> str:
    return platform.machine() if device == "cpu" else torch.cuda.get_device_name()


def report(result: dict[str, Any], device: str, choose: str) -> str:
    """The result as Markdown."""
    needed = sum(result["compiling"].values())
    lines = [
        f"# Varying shapes, {device.upper()}, {datetime.date.today()}",
        "",
        f"torch {torch.__version__}, {_machine(device)}, {os.cpu_count()} cores, "
        f'choose="{choose}". Batch 1 to 64, length 1 to 512 at random, {result["calls"]} calls.',
        "",
        f"- Wrong answers: {len(result['wrong'])} {' '.join(result['wrong'][:5])}",
        f"- Calls that needed no further compile: {1 - needed / result['calls']:.1%}; "
        f"hits: {result['hits'] / result['calls']:.1%}; failures: {result['failures']}; "
        f"wall time: {result['seconds']:.0f} s.",
        "",
        "| operator | compiled | calls that waited |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {result['compiled'][name]} | {result['compiling'][name]} |"
        for name in operators()
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """0 when every answer was native's and the number of compiles is within its bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--choose", choices=("faster", "always"), default="always")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EAGERCACHE_DIR"] = folder
        device = arguments.device
        result = run(device, arguments.calls, arguments.choose, arguments.seed)
        text = report(result, device, arguments.choose)
        frame.write(text, arguments.output)
        eagercache.disable()
    needed = sum(result["compiling"].values())
    good = (
        not result["wrong"]
        and max(result["compiled"].values()) <= 6
        and needed <= 0.05 * arguments.calls
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
