"""Models called with sizes at random under ``enable(modules="auto")``: compiles and speed.

    python -m bench.modules.modules_varying [--device cuda] [--threads 2] [--calls 150]
                                              [--models llama,mlp] [--training]
                                              [--output bench/results/x.md]

A Llama-shaped model of transformers, hidden size 256 (on a GPU 2048), batch 1 and length 1 to 512;
a small convolutional model and an MLP, batch 1 to 64; in float32. Each in a process of its own over
an empty store, which waits for what a call has led to until nothing more is compiled; then it is
called at sizes spread over the whole range, by turns with and without kernels. With ``--training``
a call is the forward and its backward, and answers are gradients. A second process over the same
store compiles nothing. Ends with 1 when a kind of module led to more than 6 compiles, an answer is
wrong, or a step is more than 2 % slower (beyond what two sides without kernels differ by).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.modules import module_models, modules
from bench.shared import frame

MODELS = ("llama", "convolutions", "mlp")
SIZES = {"llama": 512, "convolutions": 64, "mlp": 64}
SHOWN = {
    "llama": (1, 2, 5, 16, 40, 64, 100, 128, 200, 256, 333, 400, 512),
    "convolutions": (1, 2, 3, 5, 8, 13, 16, 24, 32, 48, 64),
    "mlp": (1, 2, 3, 5, 8, 13, 16, 24, 32, 48, 64),
}
MAX_COMPILES = 6
SLACK = 0.02


def make_model(name: str, device: str) -> tuple[Any, Callable[[int], Callable[[], Any]]]:
    """(model, a function of a size that gives a call)."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    generator = torch.Generator(device).manual_seed(1)
    if name == "llama":
        llama = module_models.make_llama(device)
        words = module_models.LLAMA[device][-1]

        def tokens(length: int) -> Callable[[], Any]:
            ids = torch.randint(0, words, (1, length), generator=generator, device=device)
            return lambda: llama(ids, use_cache=False).logits

        return llama, tokens
    if name == "convolutions":
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.Hardswish()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        shape: tuple[int, ...] = (3, 32, 32)
    else:
        width = 256
        layers = []
        for _ in range(3):
            layers += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
        model = nn.Sequential(*layers)
        shape = (width,)
    model.eval()

    def batch(size: int) -> Callable[[], Any]:
        x = torch.randn(size, *shape, generator=generator, device=device)
        return lambda: model(x)

    return model, batch


def as_steps(
    model: Any, call_of: Callable[[int], Callable[[], Any]]
) -> Callable[[int], Callable[[], Any]]:
    """Of calls that give tensors, calls that go backward, too, and give all gradients."""
    import torch

    model.train()
    given = list(model.parameters())

    def step(size: int) -> Callable[[], Any]:
        call = call_of(size)

        def run() -> Any:
            gradients = torch.autograd.grad(call().square().mean(), given)
            return torch.cat([gradient.flatten() for gradient in gradients])

        return run

    return step


def by_turns(
    core: Any, call: Callable[[], Any], seconds: float, wait: Callable[[], None]
) -> list[tuple[float, float, float]]:
    """(eager, eager again, with kernels) milliseconds a call, in rounds of changing order.

    ``wait`` waits for the device.
    """

    def block(active: bool, calls: int) -> float:
        core.set_modules_active(active)
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return 1e3 * (time.perf_counter() - begin) / calls

    block(False, 1), block(True, 1)
    calls = max(1, int(2.0 / max(block(False, 1), 1e-3)))
    rounds: list[tuple[float, float, float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < 9 or time.perf_counter() < end:
        order = [0, 1, 2]
        random.Random(len(rounds)).shuffle(order)
        times = {side: block(side == 2, calls) for side in order}
        rounds.append((times[0], times[1], times[2]))
    return rounds


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: fills or reads the store, then measures."""
    import eagercache
    import torch
    from eagercache.base.load import core
    from eagercache.modules.manager import manager

    assert core is not None
    training = options.training
    torch.set_num_threads(options.threads)
    with torch.device(options.device):
        model, call_of = make_model(name, options.device)
    if training:
        call_of = as_steps(model, call_of)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    choose = random.Random(3)
    eagercache.enable(ops=(), modules="auto", on_miss=options.on_miss, training=training)
    compiled: collections.Counter[str] = collections.Counter()
    original = manager._requests._submit

    def submit(digest: str, module: Any, missed: Any) -> None:
        compiled[type(module).__name__] += 1
        original(digest, module, missed)

    manager._requests._submit = submit  # type: ignore[method-assign]
    rows, wrong = [], 0
    with contextlib.nullcontext() if training else torch.inference_mode():
        begin = time.perf_counter()
        for _ in range(options.calls):
            call_of(choose.randint(1, SIZES[name]))()
        for size in SHOWN[name]:
            for _ in range(3):
                call_of(size)()
        seconds = time.perf_counter() - begin
        for size in SHOWN[name]:
            call = call_of(size)
            rounds = by_turns(core, call, 1.0, wait)
            core.set_modules_active(False)
            expected = call()
            core.set_modules_active(True)
            answer = call()
            wrong += not torch.allclose(answer, expected, rtol=1e-3, atol=1e-4)
            rows.append(
                {
                    "size": size,
                    "eager_ms": statistics.median(a for a, _, _ in rounds),
                    "ratio": statistics.median((a + b) / (2 * c) for a, b, c in rounds),
                    "noise": statistics.median(a / b for a, b, _ in rounds),
                }
            )
    by_kind: collections.Counter[str] = collections.Counter()
    for _, row in manager.stats():
        by_kind[row.name.rpartition(".")[2]] += row.hits
    return {
        "rows": rows,
        "wrong": wrong,
        "seconds": seconds,
        "compiled": dict(compiled),
        "compiles": eagercache.stats().compiles,
        "hits": {kind: count for kind, count in by_kind.items() if count},
    }


def in_process(name: str, options: argparse.Namespace, on_miss: str, store: str) -> dict[str, Any]:
    """`run` in a fresh process over ``store``."""
    wanted = ["--run", name, "--on-miss", on_miss]
    wanted += ["--threads", str(options.threads), "--calls", str(options.calls)]
    wanted += ["--device", options.device]
    wanted += ["--training"] if options.training else []
    result: dict[str, Any] = frame.in_process(__file__, *wanted, EAGERCACHE_DIR=store)
    return result


def slower(result: dict[str, Any]) -> list[int]:
    """The sizes whose steps are slower than the bar allows."""
    return [
        row["size"] for row in result["rows"] if row["ratio"] < 1 - SLACK - abs(1 - row["noise"])
    ]


def report(name: str, first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """One model's part of the Markdown."""
    compiled = ", ".join(f"{kind} {count}" for kind, count in first["compiled"].items())
    lines = [
        f"## {name}",
        "",
        f"Compiles by kind of module: {compiled or 'none'}; {first['seconds']:.0f} s until nothing "
        f"was left to compile. Wrong answers: {first['wrong'] + second['wrong']}. Second process: "
        f"{second['compiles']} compiles. Sizes slower by more than {SLACK:.0%}: "
        f"{', '.join(map(str, slower(first))) or 'none'}.",
        "",
    ]
    columns = ("size", "eager ms", "ratio", "two eager sides", "second process: ratio")
    rows = [
        [
            str(row["size"]),
            f"{row['eager_ms']:.3g}",
            *(f"x{ratio:.2f}" for ratio in (row["ratio"], row["noise"], again["ratio"])),
        ]
        for row, again in zip(first["rows"], second["rows"], strict=True)
    ]
    return [*lines, *frame.markdown(columns, rows), ""]


def main() -> int:
    """Reads the options, runs, prints."""
    parser = modules.parser_of(__doc__)
    parser.add_argument("--calls", type=int, default=150)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.set_defaults(models=",".join(MODELS))
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options)))
        return 0
    what = f"{options.device}{', training' if options.training else ''}"
    lines = [
        f"# Whole modules at sizes at random, {what}",
        "",
        f'{modules.where(options.device, options.threads)}, choose="faster". '
        "Medians of alternating calls.",
        "",
    ]
    good = True
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as store:
            first = in_process(name, options, "wait", store)
            second = in_process(name, options, "native", store)
        lines += report(name, first, second)
        print("\n".join(report(name, first, second)), flush=True)
        good &= not first["wrong"] + second["wrong"] + second["compiles"]
        good &= max(first["compiled"].values(), default=0) <= MAX_COMPILES and not slower(first)
    if options.output:
        options.output.write_text("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
