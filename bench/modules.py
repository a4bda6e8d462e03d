"""Whole models under ``enable(modules="auto")`` beside eager, on CPU.

    .venv/bin/python bench/modules.py [--threads 2] [--models llama,mobilenetv3_small_100:4]
                                      [--pairs 40] [--output bench/results/x.md]

Each model is unmodified, with random weights, in a process of its own over one store that starts
empty. First it runs until its kernels are decided (``on_miss="wait"``, so that nothing else runs
beside the proof and the timing), then eager and accelerated calls take turns in that process, and a
second process says what it compiled and how its calls were answered.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = "llama:1x1,llama:1x64,mobilenetv3_small_100:4,poolformer_s12:4,resnet18:4"


def make_model(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs): a timm model by name and batch, or a Llama by batch x length."""
    import torch

    torch.manual_seed(0)
    kind, _, size = name.partition(":")
    if kind != "llama":
        import timm

        return timm.create_model(kind).eval(), (torch.randn(int(size or 1), 3, 224, 224),), {}
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
    )
    batch, length = (int(part) for part in (size or "1x1").split("x"))
    return (
        LlamaForCausalLM(config).eval(),
        (torch.randint(0, 1000, (batch, length)),),
        {"use_cache": False},
    )


def run_model(name: str, threads: int, pairs: int, on_miss: str) -> dict[str, Any]:
    """Runs in a process of its own; what it measured."""
    import eagercache
    import torch
    from eagercache._load import core
    from eagercache.modules import explain_module, manager

    assert core is not None
    torch.set_num_threads(threads)
    model, args, kwargs = make_model(name)
    with torch.inference_mode():
        model(*args, **kwargs)
        eagercache.enable(ops=(), modules="auto", on_miss=on_miss)
        begin = time.perf_counter()
        for _ in range(6):
            accelerated = model(*args, **kwargs)
        seconds = time.perf_counter() - begin
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(pairs):
            for active in (False, True):
                core.set_modules_active(active)
                begin = time.perf_counter()
                answer = model(*args, **kwargs)
                times[active].append(1e3 * (time.perf_counter() - begin))
                if not active:
                    eager = answer
    leaves = torch.utils._pytree.tree_leaves
    difference = max(
        float((a - b).abs().max()) for a, b in zip(leaves(eager), leaves(accelerated), strict=True)
    )
    ratios = sorted(e / a for e, a in zip(times[False], times[True], strict=True))
    return {
        "eager_ms": statistics.median(times[False]),
        "accelerated_ms": statistics.median(times[True]),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
        "difference": difference,
        "seconds": seconds,
        "compiles": eagercache.stats().compiles,
        "kernels": sum(row.hits > 0 for _, row in manager.stats()),
        "lines": explain_module(model),
    }


def in_process(name: str, options: argparse.Namespace, on_miss: str, store: str) -> dict[str, Any]:
    """`run_model` in a fresh process over ``store``."""
    command = [sys.executable, __file__, "--run", name, "--on-miss", on_miss]
    command += ["--threads", str(options.threads), "--pairs", str(options.pairs)]
    done = subprocess.run(
        command,
        env={**os.environ, "EAGERCACHE_DIR": store},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name}: exit {done.returncode}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(rows: list[tuple[str, dict[str, Any], dict[str, Any]]], threads: int) -> str:
    """The results as Markdown."""
    import torch

    revision = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = [
        "# Whole models as kernels, CPU",
        "",
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, commit {revision}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {threads} threads of "
        f"{os.cpu_count()} cores, {os.getloadavg()[0]:.1f} load.",
        "Medians of alternating calls in one process; the ratio with its 10th and 90th percentile.",
        "",
        "| model | eager ms | accelerated ms | ratio | largest difference | kernels | compiles "
        "(seconds until decided) | second process: compiles, ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, first, second in rows:
        lines.append(
            f"| {name} | {first['eager_ms']:.2f} | {first['accelerated_ms']:.2f} | "
            f"**x{first['ratio']:.2f}** ({first['low']:.2f}..{first['high']:.2f}) | "
            f"{first['difference']:.1e} | {first['kernels']} | {first['compiles']} "
            f"({first['seconds']:.0f}) | {second['compiles']}, x{second['ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Reads the options, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--on-miss", default="wait", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run_model(options.run, options.threads, options.pairs, options.on_miss)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as store:
        for name in options.models.split(","):
            first = in_process(name, options, "wait", store)
            second = in_process(name, options, "native", store)
            rows.append((name, first, second))
            print(f"{name}: x{first['ratio']:.2f}", *first["lines"][:6], sep="\n  ", flush=True)
    text = table(rows, options.threads)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
