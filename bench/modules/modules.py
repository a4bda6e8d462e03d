"""Whole models under ``enable(modules="auto")`` beside eager; on a GPU beside torch.compile too.

    python -m bench.modules.modules [--device cpu] [--threads 2] [--pairs 40]
                                      [--models llama,mobilenetv3_small_100:4]
                                      [--bars] [--output bench/results/x.md]

``--bars`` is for CPU: ten models, and it ends with 1 when one is below its bar (`BARS`).

Each model is unmodified, with random weights, in a process of its own over one store that starts
empty. On CPU it first runs until its kernels are decided (``on_miss="wait"``, so that nothing else
runs beside the proof and the timing); on a GPU it is called without a pause while that happens in
the background. Then eager and accelerated calls take turns in that process, and a second process
says what it compiled and how its calls were answered. A third one measures eager, then
torch.compile.
On a GPU a figure is the wall time of a block of calls, its end waited for, by the call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.modules.module_models import CACHED, make_model
from bench.shared import frame

MODELS = {
    "cpu": "llama:1x1,llama:1x64,mobilenetv3_small_100:4,poolformer_s12:4,resnet18:4",
    "cuda": "llama:4x1,llama_cache:4x1,llama:1x2048",
}
# What ``--bars`` demands on CPU with two threads: the median ratio.
BARS = {
    "llama:1x1": 2.5,
    "llama:1x64": 0.99,
    "mobilenetv3_small_100:4": 1.6,
    "poolformer_s12:4": 1.35,
    "resnet18:4": 1.15,
    "convnext_atto:4": 0.99,
    "vit_tiny_patch16_224:4": 0.99,
    "regnety_002:4": 0.99,
    "mixer_s32_224:4": 0.99,
    "ghostnet_100:4": 0.99,
}
BLOCK_SECONDS = 0.02
LONGEST_WAIT = 180.0  # for the background to decide


def block_ms(call: Callable[[], Any], calls: int, device: str) -> float:
    """Wall milliseconds a call."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / calls


def warm_calls(name: str) -> int:
    """Eager calls before anything is measured.

    With a cache each length is a shape of its own, for which cuDNN's attention makes a plan once in
    a process: 30 ms, whoever calls it.
    """
    return 2 * (CACHED[1] - CACHED[0]) if name.startswith("llama_cache") else 3


def by_turns(sides: list[Callable[[], Any]], pairs: int, device: str) -> list[list[float]]:
    """Wall milliseconds a call of each side, in ``pairs`` rounds."""
    calls = 1
    if device == "cuda":
        slowest = max(block_ms(side, 3, device) for side in sides)
        calls = max(1, min(50, int(1e3 * BLOCK_SECONDS / slowest)))
    rounds = [[block_ms(side, calls, device) for side in sides] for _ in range(pairs)]
    return [list(times) for times in zip(*rounds, strict=True)]


def run_until_decided(call: Callable[[], Any], device: str) -> tuple[float, list[float]]:
    """(seconds until nothing was left to compile, milliseconds of the calls until then)."""
    import eagercache

    begin, quiet = time.perf_counter(), 0
    decided, taken, until = LONGEST_WAIT, [], 0
    while quiet < 30 and time.perf_counter() - begin < LONGEST_WAIT:
        taken.append(block_ms(call, 1, device))
        quiet = quiet + 1 if eagercache.wait(0.0) else 0
        if quiet == 1:
            decided, until = time.perf_counter() - begin, len(taken)
    return decided, taken[: until or None]


def two_sides(
    call: Callable[[], Any], *, operators: bool = False
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """``call`` without and with kernels of whole modules, and of single ``operators``."""
    from eagercache.base.load import core

    def side(active: bool) -> Callable[[], Any]:
        def run() -> Any:
            assert core is not None
            core.set_modules_active(active)
            if operators:
                core.set_answering(active)
            return call()

        return run

    return side(False), side(True)


def measure(
    call: Callable[[], Any],
    options: argparse.Namespace,
    first_calls: int,
    *,
    training: bool = False,
) -> dict[str, Any]:
    """Enables, calls until nothing is left to compile, then measures both sides by turns.

    With ``on_miss="wait"`` each of the ``first_calls`` waits for the kernels that it asks for.
    """
    import eagercache

    device, begin = options.device, time.perf_counter()
    ops: dict[str, Any] = {} if options.operators else {"ops": ()}
    eagercache.enable(modules="auto", training=training, on_miss=options.on_miss, **ops)
    if options.on_miss == "background":
        seconds, taken = run_until_decided(call, device)
    else:
        taken = [block_ms(call, 1, device) for _ in range(first_calls)]
        seconds = time.perf_counter() - begin
    sides = two_sides(call, operators=options.operators)
    eager_ms, accelerated_ms = by_turns([*sides], options.pairs, device)
    ratios = sorted(e / a for e, a in zip(eager_ms, accelerated_ms, strict=True))
    return {
        "eager_ms": statistics.median(eager_ms),
        "accelerated_ms": statistics.median(accelerated_ms),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
        "seconds": seconds,
        "slowest": max(taken),
        "meanwhile_ms": sum(taken),
        "meanwhile_calls": len(taken),
        "compiles": eagercache.stats().compiles,
        "steps": compile_steps(),
    }


def compile_steps() -> list[dict[str, float]]:
    """Seconds by step of what was compiled, whole modules alone; the least facts that say why."""
    from eagercache.runtime.session import session

    rows = []
    for entry in session.store.entries() if session.store is not None else ():
        facts = entry["facts"]
        steps = {name: facts[name] for name in facts if name.startswith("seconds_module.wall.")}
        if steps:
            rows.append({name.rpartition(".")[2]: float(value) for name, value in steps.items()})
    return rows


def run_compiled(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """torch.compile beside eager, in a process of its own."""
    import torch

    device, pairs = options.device, options.pairs
    model, call = make_model(name, device)
    with torch.inference_mode():
        block_ms(lambda: call(model), warm_calls(name), device)
        (eager,) = by_turns([lambda: call(model)], pairs, device)
        compiled = torch.compile(model)
        begin = time.perf_counter()
        block_ms(lambda: call(compiled), 3, device)
        seconds = time.perf_counter() - begin
        block_ms(lambda: call(compiled), CACHED[1], device)
        (ours,) = by_turns([lambda: call(compiled)], pairs, device)
    return {
        "compiled_ms": statistics.median(ours),
        "ratio": statistics.median(eager) / statistics.median(ours),
        "seconds": seconds,
    }


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs in a process of its own; what it measured."""
    import torch
    from eagercache.modules.manager import explain_module, manager

    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    model, call_of = make_model(name, options.device)

    def call() -> Any:
        return call_of(model)

    with torch.inference_mode():
        block_ms(call, warm_calls(name), options.device)
        measured = measure(call, options, 30)  # every level of the model has been asked by then
        eager, accelerated = (side() for side in two_sides(call))
    leaves = torch.utils._pytree.tree_leaves
    difference = max(
        float((a - b).abs().max()) for a, b in zip(leaves(eager), leaves(accelerated), strict=True)
    )
    if name.startswith("llama_cache"):
        difference = float("nan")  # each call answers for another position
    return {
        **measured,
        "difference": difference,
        "kernels": sum(row.hits > 0 for _, row in manager.stats()),
        "lines": explain_module(model),
    }


def where(device: str, threads: int) -> str:
    """When and where this was measured, for the head of a table."""
    import torch

    machine = (
        f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
        if device == "cuda"
        else f"{threads} threads"
    )
    return (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, commit {frame.commit()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {machine}, "
        f"{os.cpu_count()} cores, {os.getloadavg()[0]:.1f} load"
    )


def document(
    title: str, columns: list[str], rows: list[list[str]], options: argparse.Namespace
) -> str:
    """The table with its head."""
    lines = [
        f"# {title}, {options.device.upper()}",
        "",
        f"{where(options.device, options.threads)}.",
        "Medians of alternating calls in one process; the ratio with its 10th and 90th percentile.",
        "",
        *frame.markdown(columns, rows),
    ]
    return "\n".join(lines) + "\n"


Row = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]


def cells_of(name: str, measured: dict[str, Any]) -> list[str]:
    """The first columns of a row: name, eager ms, accelerated ms, ratio."""
    return [
        name,
        f"{measured['eager_ms']:.3g}",
        f"{measured['accelerated_ms']:.3g}",
        f"**x{measured['ratio']:.2f}** ({measured['low']:.2f}..{measured['high']:.2f})",
    ]


def table(rows: list[Row], options: argparse.Namespace) -> str:
    """The results as Markdown."""
    beside = options.device == "cuda"
    columns = ["model", "eager ms", "accelerated ms", "ratio", "largest difference", "kernels"]
    columns += ["compiles (seconds until decided)", "second process: compiles, ratio"]
    if beside:
        columns += ["slowest call meanwhile ms", "torch.compile ms", "ratio", "seconds waited"]
    lines = []
    for name, first, second, compiled in rows:
        cells = [
            *cells_of(name, first),
            f"{first['difference']:.1e}".replace("nan", "-"),
            str(first["kernels"]),
            f"{first['compiles']} ({first['seconds']:.0f})",
            f"{second['compiles']}, x{second['ratio']:.2f}",
        ]
        if beside:
            cells += [
                f"{first['slowest']:.1f}",
                f"{compiled['compiled_ms']:.3g}",
                f"x{compiled['ratio']:.2f}",
                f"{compiled['seconds']:.0f}",
            ]
        lines.append(cells)
    return document("Whole models as kernels", columns, lines, options)


def parser_of(doc: str) -> argparse.ArgumentParser:
    """The options of a benchmark that measures each model in processes of its own."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", help="names, with commas between them")
    parser.add_argument("--output", type=Path, help="where the Markdown goes")
    parser.add_argument(
        "--operators", action="store_true", help="kernels of single operators, too, as by default"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--on-miss", default="wait", help=argparse.SUPPRESS)
    return parser


Run = Callable[[str, argparse.Namespace], dict[str, Any]]


def run_child(options: argparse.Namespace, run_model: Run, run_compiled: Run) -> None:
    """The child's end of `measure_models`."""
    run = run_compiled if options.on_miss == "compile" else run_model
    print(json.dumps(run(options.run, options)))


def measure_models(
    script: str,
    models: str,
    options: argparse.Namespace,
    *more: str,
    compiles: bool,
    **settings: str,
) -> list[Row]:
    """Each model in fresh processes of ``script`` over one store; prints what they say.

    ``compiles``: with torch.compile in a third process. ``more``: options that these get, too.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as store:
        settings["EAGERCACHE_DIR"] = store

        def in_process(name: str, on_miss: str) -> dict[str, Any]:
            wanted = ["--run", name, "--on-miss", on_miss, "--device", options.device]
            wanted += ["--threads", str(options.threads), "--pairs", str(options.pairs), *more]
            wanted += ["--operators"] if options.operators else []
            result: dict[str, Any] = frame.in_process(script, *wanted, **settings)
            return result

        for name in models.split(","):
            first = in_process(name, "wait" if options.device == "cpu" else "background")
            print(f"{name}: x{first['ratio']:.2f}", *first["lines"][:16], sep="\n  ", flush=True)
            for steps in first["steps"]:
                print("  seconds by step:", ", ".join(f"{k} {v:.1f}" for k, v in steps.items()))
            second = in_process(name, "native")
            print(
                f"second process: x{second['ratio']:.2f} "
                f"({second['eager_ms']:.3g} -> {second['accelerated_ms']:.3g} ms)",
                *second["lines"][:16],
                sep="\n  ",
                flush=True,
            )
            compiled = in_process(name, "compile") if compiles else {}
            rows.append((name, first, second, compiled))
    return rows


def main() -> int:
    """Reads the options, runs, prints; 1 when a bar is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--bars", action="store_true")
    options = parser.parse_args()
    if options.run:
        run_child(options, run_model, run_compiled)
        return 0
    models = options.models or (",".join(BARS) if options.bars else MODELS[options.device])
    rows = measure_models(__file__, models, options, compiles=options.device == "cuda")
    frame.write(table(rows, options), options.output)
    missed = [name for name, first, _, _ in rows if first["ratio"] < BARS.get(name, 0.0)]
    if options.bars:
        print(f"below the bar: {', '.join(missed) or 'none'}")
    return int(options.bars and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
