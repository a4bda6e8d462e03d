"""Training steps of whole models under ``enable(modules="auto")`` beside eager.

    .venv/bin/python bench/modules_training.py [--device cpu] [--threads 2] [--pairs 20]
                                               [--models resnet18:4,mlp:256]
                                               [--output bench/results/x.md]

A step is forward, loss, backward and SGD. Each model is unmodified, with random weights, in a
process of its own over one store that starts empty, and trains until its kernels are decided, as in
`modules.py`. Then eager and accelerated steps take turns in that process; a second process says
what it compiled and how its calls were answered. On a GPU a third one measures torch.compile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modules

MODELS = {
    "cpu": "resnet18:4,poolformer_s12:4,llama:1x64,mlp:256",
    "cuda": "resnet50:64,vit_base_patch16_224:64,llama:4x1024,mlp:4096",
}


def make_model(name: str, device: str) -> tuple[Any, Callable[[Any], Any]]:
    """(model in training mode, its loss). "mlp:N" is a perceptron for N rows."""
    import torch
    from torch import nn

    kind, _, size = name.partition(":")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if kind == "mlp":
        torch.manual_seed(0)
        layers = [nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256), nn.SiLU()]
        model = nn.Sequential(*layers, nn.Linear(256, 64)).to(device, dtype)
        rows = torch.randn(int(size), 256, device=device, dtype=dtype)
        return model.train(), lambda called: called(rows).square().mean()
    model, call = modules.make_model(name, device)

    def loss(called: Any) -> Any:
        answer = call(called)
        return getattr(answer, "logits", answer).float().square().mean()

    return model.train(), loss


def stepper(model: Any, loss: Callable[[Any], Any], called: Any) -> Callable[[], Any]:
    """A training step of ``model`` through ``called``."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        loss(called).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak_bytes(step: Callable[[], Any], device: str) -> int:
    """Most memory that a step holds on a GPU; 0 on CPU."""
    import torch

    if device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def run_compiled(name: str, device: str, pairs: int) -> dict[str, Any]:
    """torch.compile beside eager, in a process of its own."""
    import torch

    model, loss = make_model(name, device)
    eager = stepper(model, loss, model)
    modules.block_ms(eager, 3, device)
    (before,) = modules.by_turns([eager], pairs, device)
    compiled = stepper(model, loss, torch.compile(model))
    begin = time.perf_counter()
    modules.block_ms(compiled, 3, device)
    seconds = time.perf_counter() - begin
    (after,) = modules.by_turns([compiled], pairs, device)
    ratio = statistics.median(before) / statistics.median(after)
    return {"ratio": ratio, "seconds": seconds, "peak": peak_bytes(compiled, device)}


def run_model(name: str, device: str, threads: int, pairs: int, on_miss: str) -> dict[str, Any]:
    """Runs in a process of its own; what it measured."""
    import eagercache
    import torch
    from eagercache._load import core
    from eagercache.modules import explain_module, manager

    assert core is not None
    if device == "cpu":
        torch.set_num_threads(threads)
    model, loss = make_model(name, device)
    step = stepper(model, loss, model)

    def side(active: bool) -> Callable[[], Any]:
        def run() -> Any:
            core.set_modules_active(active)
            return step()

        return run

    modules.block_ms(step, 3, device)
    eagercache.enable(ops=(), modules="auto", on_miss=on_miss)
    if on_miss == "background":
        seconds, slowest = modules.run_until_decided(step, device)
    else:
        begin = time.perf_counter()
        # Enough for every level of the model to have been asked.
        slowest = max(modules.block_ms(step, 1, device) for _ in range(20))
        seconds = time.perf_counter() - begin
    eager_ms, accelerated_ms = modules.by_turns([side(False), side(True)], pairs, device)
    peaks = [peak_bytes(side(active), device) for active in (False, True)]
    ratios = sorted(e / a for e, a in zip(eager_ms, accelerated_ms, strict=True))
    return {
        "eager_ms": statistics.median(eager_ms),
        "accelerated_ms": statistics.median(accelerated_ms),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
        "seconds": seconds,
        "slowest": slowest,
        "peaks": peaks,
        "compiles": eagercache.stats().compiles,
        "kernels": sum(row.training_hits > 0 for _, row in manager.stats()),
        "lines": explain_module(model),
    }


def in_process(name: str, options: argparse.Namespace, on_miss: str, store: str) -> dict[str, Any]:
    """`run_model` (or `run_compiled`, for "compile") in a fresh process over ``store``."""
    command = [sys.executable, __file__, "--run", name, "--on-miss", on_miss]
    command += ["--threads", str(options.threads), "--pairs", str(options.pairs)]
    settings = {"EAGERCACHE_DIR": store, "EAGERCACHE_MODULE_TRAINING": "1"}
    done = subprocess.run(
        [*command, "--device", options.device],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name}: exit {done.returncode}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(rows: list[modules.Row], device: str, threads: int) -> str:
    """The results as Markdown."""
    columns = ["model", "eager ms", "accelerated ms", "ratio", "modules with kernels"]
    columns += ["compiles (seconds until decided)", "slowest step meanwhile ms"]
    columns += ["second process: compiles, ratio"]
    if device == "cuda":
        columns += ["peak MiB: eager, accelerated, torch.compile", "torch.compile, seconds waited"]
    heading = modules.heading(device, threads)
    heading[0] = f"# Training steps of whole models as kernels, {device.upper()}"
    lines = [*heading, "| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for name, first, second, compiled in rows:
        cells = [
            name,
            f"{first['eager_ms']:.3g}",
            f"{first['accelerated_ms']:.3g}",
            f"**x{first['ratio']:.2f}** ({first['low']:.2f}..{first['high']:.2f})",
            str(first["kernels"]),
            f"{first['compiles']} ({first['seconds']:.0f})",
            f"{first['slowest']:.1f}",
            f"{second['compiles']}, x{second['ratio']:.2f}",
        ]
        if device == "cuda":
            peaks = [*first["peaks"], compiled["peak"]]
            cells += [", ".join(f"{peak / 2**20:.0f}" for peak in peaks)]
            cells += [f"x{compiled['ratio']:.2f}, {compiled['seconds']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Reads the options, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--models")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--on-miss", default="wait", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = options.device
    if options.run:
        if options.on_miss == "compile":
            result = run_compiled(options.run, device, options.pairs)
        else:
            result = run_model(options.run, device, options.threads, options.pairs, options.on_miss)
        print(json.dumps(result))
        return
    rows: list[modules.Row] = []
    with tempfile.TemporaryDirectory() as store:
        for name in (options.models or MODELS[device]).split(","):
            first = in_process(name, options, "wait" if device == "cpu" else "background", store)
            print(f"{name}: x{first['ratio']:.2f}", *first["lines"][:16], sep="\n  ", flush=True)
            second = in_process(name, options, "native", store)
            print(f"second process: x{second['ratio']:.2f}", flush=True)
            compiled = in_process(name, options, "compile", store) if device == "cuda" else {}
            rows.append((name, first, second, compiled))
    text = table(rows, device, options.threads)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
