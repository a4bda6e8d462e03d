"""Training steps of whole models under ``enable(modules="auto")`` beside eager.

    .venv/bin/python bench/modules_training.py [--device cpu] [--threads 2] [--pairs 20]
                                               [--models resnet18:4,mlp:256] [--compile] [--bars]
                                               [--output bench/results/x.md]

A step is forward, loss, backward and SGD. Each model is unmodified, with random weights, in a
process of its own over one store that starts empty, and trains until its kernels are decided, as in
`modules.py`. Then eager and accelerated steps take turns in that process; a second process says
what it compiled and how its calls were answered. On a GPU, and with ``--compile``, a third one
measures torch.compile. "Kept" is the memory that the forward has made and that is there until the
backward, as torch's profiler counts it.

On CPU a program waits for nothing either, but here every step waits for the kernels that it asks
for, so that nothing runs beside the proof and the timing; the seconds are theirs.

``--bars`` ends with 1 where a model is slower than `LEAST` of eager, and names those below `BAR`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import frame
import modules

sys.path.append(str(frame.ROOT / "tests" / "python"))

from kept_memory import kept_bytes

MODELS = {
    "cpu": "resnet18:4,poolformer_s12:4,llama:1x64,mlp:256",
    "cuda": "resnet50:64,vit_base_patch16_224:64,llama:4x1024,mlp:4096",
}
BAR, LEAST = 1.1, 0.99


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


def run_compiled(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """torch.compile beside eager, in a process of its own."""
    import torch

    device, pairs = options.device, options.pairs
    if device == "cpu":
        torch.set_num_threads(options.threads)
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


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs in a process of its own; what it measured."""
    import torch
    from eagercache.modules import explain_module, manager

    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    model, loss = make_model(name, options.device)
    step = stepper(model, loss, model)
    modules.block_ms(step, 3, options.device)
    measured = modules.measure(step, options, 20)  # every level has been asked by then
    return {
        **measured,
        "peaks": [peak_bytes(side, options.device) for side in modules.two_sides(step)],
        "kept": [
            kept_bytes(side, options.device) for side in modules.two_sides(lambda: loss(model))
        ],
        "kernels": sum(row.training_hits > 0 for _, row in manager.stats()),
        "lines": explain_module(model),
    }


def table(rows: list[modules.Row], options: argparse.Namespace) -> str:
    """The results as Markdown."""
    columns = ["model", "eager ms", "accelerated ms", "ratio", "modules with kernels"]
    columns += ["compiles (seconds until decided)", "slowest step meanwhile ms"]
    columns += ["kept MiB: eager, accelerated", "second process: compiles, ratio"]
    if options.device == "cuda":
        columns += ["peak MiB: eager, accelerated, torch.compile"]
    if options.compile:
        columns += ["torch.compile, seconds waited"]
    lines = []
    for name, first, second, compiled in rows:
        cells = [
            *modules.cells_of(name, first),
            str(first["kernels"]),
            f"{first['compiles']} ({first['seconds']:.0f})",
            f"{first['slowest']:.1f}",
            ", ".join(f"{kept / 2**20:.1f}" for kept in first["kept"]),
            f"{second['compiles']}, x{second['ratio']:.2f}",
        ]
        if options.device == "cuda":
            peaks = [*first["peaks"], compiled["peak"]]
            cells += [", ".join(f"{peak / 2**20:.0f}" for peak in peaks)]
        if options.compile:
            cells += [f"x{compiled['ratio']:.2f}, {compiled['seconds']:.0f}"]
        lines.append(cells)
    return modules.document("Training steps of whole models as kernels", columns, lines, options)


def main() -> int:
    """Reads the options, runs, prints; 1 when a model became slower."""
    parser = modules.parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="torch.compile too, as on a GPU")
    parser.add_argument("--bars", action="store_true")
    options = parser.parse_args()
    if options.run:
        modules.run_child(options, run_model, run_compiled)
        return 0
    options.compile = options.compile or options.device == "cuda"
    models = options.models or MODELS[options.device]
    rows = modules.measure_models(
        __file__, models, options, compiles=options.compile, EAGERCACHE_MODULE_TRAINING="1"
    )
    frame.write(table(rows, options), options.output)
    if not options.bars:
        return 0
    for limit in (BAR, LEAST):
        low = [name for name, first, _, _ in rows if first["ratio"] < limit]
        print(f"below x{limit}: {', '.join(low) or 'none'}")
    return int(bool(low))


if __name__ == "__main__":
    sys.exit(main())
