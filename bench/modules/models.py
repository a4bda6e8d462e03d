"""Whole models on one GPU: eager, eagercache and torch.compile, wall time per step.

    python -m bench.modules.models [--models resnet50,vit] [--json FILE] [--pairs 24] [--no-compile]

Models have random weights and synthetic data; nothing of a model is changed. For each one, in
processes of their own over one store that starts empty:

cold  eagercache.enable() from the first step on: seconds and steps until nothing is compiled any
      more, kernels and decisions.
warm  a fresh process: native steps before anything is enabled; then enabled, steps until every
      operator is answered from the store; then blocks of steps by turns, native and enabled.
equal    a fresh process: the loss (training) or the output of the first three steps from the
      same weights, native, native again, and with kernels; largest difference by largest value.
compile  torch.compile of the same model, with the seconds that its first steps take.

A figure is the median of the blocks' means; the ratio is the median of the ratios of neighbouring
blocks, with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.modules import whole_models
from bench.shared import frame

MODELS = whole_models.TRAINING + whole_models.INFERENCE

Step = whole_models.Step
make = whole_models.make


def block_ms(step: Step, steps: int) -> float:
    """Wall milliseconds a step."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3 / steps


def steps_in_block(step: Step) -> int:
    """Steps that take about an eighth of a second: short, since a host's speed wanders."""
    block_ms(step, 5)
    return max(4, min(50, int(125 / block_ms(step, 5))))


def decisions() -> dict[str, Any]:
    """What was decided, and the operators whose native time matters most without a kernel."""
    import eagercache

    kernels = eagercache.kernels()
    reasons: dict[str, int] = {}
    rows = []
    for kernel in kernels:
        reasons[kernel.decision] = reasons.get(kernel.decision, 0) + 1
        if kernel.decision != "kernel":
            rows.append((kernel.op, kernel.reason))
    refused: dict[str, int] = {}
    for operator, reason in sorted(rows):
        key = f"{operator}: {reason[:110]}"
        refused[key] = refused.get(key, 0) + 1
    won = sorted(
        (
            {
                "op": kernel.op,
                **{
                    name: float(kernel.facts[name])
                    for name in ("native_device_ns", "kernel_device_ns", "native_host_ns",
                                 "kernel_host_ns")
                    if name in kernel.facts
                },
            }
            for kernel in kernels
            if kernel.decision == "kernel"
        ),
        key=lambda row: row.get("kernel_device_ns", 0.0) - row.get("native_device_ns", 0.0),
    )  # fmt: skip
    return {"decisions": reasons, "refused": refused, "won": won[:40]}


def unanswered() -> list[str]:
    """The calls that wait for a verdict, with their tensors and seconds."""
    from eagercache.runtime.session import session

    rows = []
    for service in session.services():
        for description, seconds in service.unanswered():
            tensors = [
                f"{argument['dtype']}{argument['sizes']}"
                for argument in description.get("args", ())
                if argument["kind"] == "tensor"
            ]
            rows.append(f"{description['op']}({', '.join(tensors)}): {seconds:.0f} s")
    return rows


def run_cold(name: str, limit: float) -> dict[str, Any]:
    """Steps under `enable()` until nothing is left to compile."""
    import torch

    model, step_of = make(name)
    step = step_of(model)
    import eagercache

    eagercache.enable()
    begin = time.monotonic()
    steps = 0
    while True:
        step()
        steps += 1
        torch.cuda.synchronize()
        if steps >= 3 and eagercache.stats().outstanding == 0:
            break
        if time.monotonic() - begin > limit:
            break
        if steps >= 12:
            time.sleep(0.2)  # the compile has the GPU to itself for its timings
    stats = eagercache.stats()
    return {
        "seconds": time.monotonic() - begin,
        "steps": steps,
        "compiles": stats.compiles,
        "outstanding": stats.outstanding,
        "unanswered": unanswered(),
        **decisions(),
    }


def run_warm(name: str, pairs: int) -> dict[str, Any]:
    """Native before anything is enabled, then by turns."""
    model, step_of = make(name)
    step = step_of(model)
    steps = steps_in_block(step)
    before = [block_ms(step, steps) for _ in range(4)]
    import eagercache
    from eagercache.base.load import core

    assert core is not None
    eagercache.enable()
    settle = [block_ms(step, 5) for _ in range(10)]
    native, ours = [], []
    first = eagercache.stats()
    for index in range(pairs):
        for enabled in (index % 2 == 0, index % 2 == 1):
            core.set_answering(enabled)  # enable() would fill the tables anew
            (ours if enabled else native).append(block_ms(step, steps))
    last = eagercache.stats()
    ratios = sorted(a / b for a, b in zip(native, ours, strict=True))
    rows = {name: row.hits for name, row in last.operators.items() if row.hits > 0}
    quarter = len(ratios) // 4
    return {
        "native_unhooked_ms": statistics.median(before),
        "native_ms": statistics.median(native),
        "eagercache_ms": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[quarter],
        "ratio_high": ratios[-1 - quarter],
        "settle_ms": settle,
        "compiles": last.compiles,
        "hits_a_step": (last.hits - first.hits) / (pairs * steps),
        "others_a_step": {
            name: (getattr(last, name) - getattr(first, name)) / (pairs * steps)
            for name in ("native", "misses", "pending", "aside")
        },
        "hits": dict(sorted(rows.items(), key=lambda item: -item[1])[:25]),
    }


def run_equal(name: str) -> dict[str, float]:
    """How far three steps with kernels are from native ones, and those from each other."""
    import eagercache
    import torch
    from eagercache.base.load import core

    assert core is not None
    eagercache.enable()

    def three_steps(enabled: bool) -> list[Any]:
        model, step_of = make(name)
        step = step_of(model)
        core.set_answering(enabled)
        results = [step().detach().double() for _ in range(3)]
        torch.cuda.synchronize()
        return results

    for _ in range(4):
        three_steps(True)  # until every kernel is loaded
        eagercache.wait(30)
    native, again = three_steps(False), three_steps(False)
    before = eagercache.stats().hits
    ours = three_steps(True)
    scale = max(float(value.abs().max()) for value in native)

    def far(others: list[Any]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(native, others, strict=True)) / scale

    return {"kernels": far(ours), "native": far(again), "hits": eagercache.stats().hits - before}


def run_compile(name: str, pairs: int) -> dict[str, Any]:
    """torch.compile beside eager, by turns."""
    import torch

    model, step_of = make(name)
    eager = step_of(model)
    steps = steps_in_block(eager)
    begin = time.monotonic()
    compiled = step_of(torch.compile(model))
    for _ in range(3):
        compiled()
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    block_ms(compiled, 5)
    ratios = sorted(block_ms(eager, steps) / block_ms(compiled, steps) for _ in range(pairs))
    return {"ratio": statistics.median(ratios), "seconds": seconds}


def child(kind: str, name: str, store: str, timeout: float, *extra: str) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [*frame.command(__file__), "--child", kind, "--models", name, *extra]
    environment = {**os.environ, "EAGERCACHE_LINGER": "0", "EAGERCACHE_DIR": store}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"over {timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1][7:]) if lines else {"error": f"exit {done.returncode}"}


def line_of(name: str, result: dict[str, Any]) -> str:
    """One row of the table."""
    cold, warm, compiled = result["cold"], result["warm"], result.get("compile", {})
    equal = result.get("equal", {})
    if "error" in warm:
        return f"{name:24} {warm['error']}"
    return (
        f"{name:24} {warm['native_ms']:8.2f} {warm['eagercache_ms']:8.2f}  "
        f"x{warm['ratio']:.3f} ({warm['ratio_low']:.3f}..{warm['ratio_high']:.3f})  "
        f"{cold.get('compiles', 0):5d} {cold.get('seconds', 0):6.0f} s "
        f"{warm['compiles']:5d} {warm['hits_a_step']:7.0f}   "
        + (f"{equal['kernels']:8.1e} ({equal['native']:7.1e})   " if "kernels" in equal else "")
        + (f"x{compiled['ratio']:.2f} {compiled['seconds']:4.0f} s" if "ratio" in compiled else "")
    )


HEADER = (
    f"{'model':24} {'eager ms':>8} {'ours ms':>8}  {'ratio (quartiles)':22} {'kernels':>7} "
    f"{'cold':>6} {'warm compiles':>6} {'hits':>4}   difference (native's own)  torch.compile"
)


def main() -> None:
    """Runs what is asked for, and prints the table last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--limit", type=float, default=120, help="seconds of a cold run")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--child", choices=["cold", "warm", "equal", "compile"], help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.child:
        run = {
            "cold": lambda: run_cold(arguments.models, arguments.limit),
            "warm": lambda: run_warm(arguments.models, arguments.pairs),
            "equal": lambda: run_equal(arguments.models),
            "compile": lambda: run_compile(arguments.models, arguments.pairs),
        }[arguments.child]
        print("RESULT " + json.dumps(run()), flush=True)
        os._exit(0)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        Path(store).mkdir(mode=0o700)
        for name in arguments.models.split(","):
            extra = ("--pairs", str(arguments.pairs), "--limit", str(arguments.limit))
            one = {
                "cold": child("cold", name, store, arguments.limit + 60, *extra),
                "warm": child("warm", name, store, 180, *extra),
                "equal": child("equal", name, store, 120),
            }
            if not arguments.no_compile:
                one["compile"] = child("compile", name, store, 180, *extra)
            results[name] = one
            print(line_of(name, one), flush=True)
            for waiting in one["cold"].get("unanswered", []):
                print(f"    no verdict: {waiting}", flush=True)
            for reason, count in one["cold"].get("refused", {}).items():
                print(f"    {count:3d} {reason}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))
    print(HEADER)
    for name, one in results.items():
        print(line_of(name, one))


if __name__ == "__main__":
    main()
