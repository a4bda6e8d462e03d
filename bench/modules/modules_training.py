"""Training steps of whole models with kernels of modules beside eager.

    python -m bench.modules.modules_training [--device cpu] [--threads 2] [--pairs 20]
                                               [--models resnet18:4,mlp:256] [--compile] [--bars]
                                               [--json FILE] [--seconds 540] [--output X.md]
                                               [--operators]

A step is forward, loss, backward and SGD, and on a GPU that of `whole_models.py`. Each model is
unmodified, with random weights, in a process of its own over one store that starts empty, and
trains until its kernels are decided, as in `modules.py`. Then eager and accelerated steps take
turns in that process; a second process says what it compiled and how its calls were answered. On a
GPU, and with ``--compile``, a third one measures torch.compile. With ``--operators`` single
operators have kernels, too, as ``enable(modules="auto")`` has it; without, modules alone. "Kept" is
the memory that the forward has made and that is there until the backward, as torch's profiler
counts it. "+checkpoints" behind the name of a model of transformers: its layers are computed again
for the backward (``gradient_checkpointing_enable()``).

"Gain" is the share of torch.compile's: of a step's time that it saves, what is saved. What the user
waited is the longest step until all is decided less an eager one, and what all those steps took
longer than eager ones together; for torch.compile, what its first three steps took.

With ``--json`` what is measured is kept model by model, and a model that the file holds is not
measured again; no model is begun ``--seconds`` after the start. The exit status is 2 where some are
left.

On CPU a program waits for nothing either, but here every step waits for the kernels that it asks
for, so that nothing runs beside the proof and the timing; the seconds are theirs.

``--bars`` ends with 1 where a model is slower than `LEAST` of eager, and names those below `BAR`,
and on a GPU those with less than `SHARE` of torch.compile's gain.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.modules import module_models, modules, whole_models
from bench.shared import frame

sys.path.append(str(frame.ROOT / "tests" / "python"))

from kept_memory import kept_bytes

MODELS = {
    "cpu": "resnet18:4,poolformer_s12:4,llama:1x64,mlp:256",
    "cuda": ",".join(whole_models.TRAINING),
}
BAR, LEAST, SHARE = 1.1, 0.99, 0.8


@dataclass(frozen=True)
class Workload:
    """A model in training mode.

    Attributes:
        loss: of the model or of its compiled form.
        step_of: a training step of the model through what it is given.
    """

    model: Any
    loss: Callable[[Any], Any]
    step_of: Callable[[Any], Callable[[], Any]]


CHECKPOINTS = "+checkpoints"


def make_workload(name: str, options: argparse.Namespace) -> Workload:
    """One of `whole_models.TRAINING`, a model of `modules.py`, "mlp:N" or "qwen2:NxLENGTH".

    `CHECKPOINTS` may stand behind it.
    """
    import torch

    if name.endswith(CHECKPOINTS):
        work = make_workload(name.removesuffix(CHECKPOINTS), options)
        work.model.gradient_checkpointing_enable()
        return work
    if name in whole_models.TRAINING:
        made = whole_models.training(name, options.device, tiny=options.tiny)
        return Workload(made.model, made.loss_of, made.step_of)
    model, loss = make_model(name, options.device)

    def step_of(called: Any) -> Callable[[], Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def step() -> None:
            loss(called).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return Workload(model, loss, step_of)


def make_model(name: str, device: str) -> tuple[Any, Callable[[Any], Any]]:
    """(model in training mode, its loss)."""
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
    if kind == "qwen2":
        return _language_model(size, device, dtype)
    model, call = module_models.make_model(name, device)

    def loss(called: Any) -> Any:
        answer = call(called)
        return getattr(answer, "logits", answer).float().square().mean()

    return model.train(), loss


def _language_model(size: str, device: str, dtype: Any) -> tuple[Any, Callable[[Any], Any]]:
    """In its default configuration: a call returns a cache beside the loss."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rows, length = map(int, size.split("x"))
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4000,
    )
    model = Qwen2ForCausalLM(config).to(device, dtype).train()
    tokens = torch.randint(0, 4000, (rows, length), device=device)
    return model, lambda called: called(input_ids=tokens, labels=tokens).loss


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
    work = make_workload(name, options)
    eager = work.step_of(work.model)
    modules.block_ms(eager, 3, device)
    compiled = work.step_of(torch.compile(work.model))
    begin = time.perf_counter()
    modules.block_ms(compiled, 3, device)
    seconds = time.perf_counter() - begin
    before, after = modules.by_turns([eager, compiled], pairs, device)
    ratio = statistics.median(a / b for a, b in zip(before, after, strict=True))
    return {"ratio": ratio, "seconds": seconds, "peak": peak_bytes(compiled, device)}


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs in a process of its own; what it measured."""
    import torch
    from eagercache.modules.manager import explain_module, manager

    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    work = make_workload(name, options)
    step = work.step_of(work.model)
    modules.block_ms(step, 3, options.device)
    # Every level has been asked after so many.
    measured = modules.measure(step, options, 20, training=True)
    return {
        **measured,
        "peaks": [
            peak_bytes(side, options.device)
            for side in modules.two_sides(step, operators=options.operators)
        ],
        "kept": [
            kept_bytes(side, options.device)
            for side in modules.two_sides(lambda: work.loss(work.model))
        ],
        "kernels": sum(row.training_hits > 0 for _, row in manager.stats()),
        "lines": explain_module(work.model),
    }


def share_of_gain(ours: float, theirs: float) -> float:
    """Of the time that torch.compile saves, the part that is saved; NaN where it saves none."""
    return (1.0 - 1.0 / ours) / (1.0 - 1.0 / theirs) if theirs > 1.0 else math.nan


def table(rows: list[modules.Row], options: argparse.Namespace) -> str:
    """The results as Markdown."""
    columns = ["model", "eager ms", "accelerated ms", "ratio", "modules with kernels"]
    columns += ["compiles (seconds until decided)", "waited s: longest step, all steps"]
    columns += ["kept MiB: eager, accelerated", "second process: compiles, ratio"]
    if options.device == "cuda":
        columns += ["peak MiB: eager, accelerated, torch.compile"]
    if options.compile:
        columns += ["torch.compile, seconds waited", "share of its gain"]
    lines = []
    for name, first, second, compiled in rows:
        cells = [
            *modules.cells_of(name, first),
            str(first["kernels"]),
            f"{first['compiles']} ({first['seconds']:.0f})",
            ", ".join(f"{max(0.0, ms) / 1e3:.2f}" for ms in waited_ms(first)),
            ", ".join(f"{kept / 2**20:.1f}" for kept in first["kept"]),
            f"{second['compiles']}, x{second['ratio']:.2f}",
        ]
        if options.device == "cuda":
            peaks = [*first["peaks"], compiled["peak"]]
            cells += [", ".join(f"{peak / 2**20:.0f}" for peak in peaks)]
        if options.compile:
            share = share_of_gain(first["ratio"], compiled["ratio"])
            cells += [f"x{compiled['ratio']:.2f}, {compiled['seconds']:.0f}"]
            cells += ["-" if math.isnan(share) else f"{100 * share:.0f} %"]
        lines.append(cells)
    return modules.document("Training steps of whole models as kernels", columns, lines, options)


def waited_ms(first: Mapping[str, Any]) -> tuple[float, float]:
    """What the longest step took longer than an eager one, and all steps together."""
    eager = first["eager_ms"]
    return first["slowest"] - eager, first["meanwhile_ms"] - first["meanwhile_calls"] * eager


def judge(rows: list[modules.Row], options: argparse.Namespace) -> int:
    """Prints what is below a bar; 1 where a model is slower than eager."""
    for limit in (BAR, LEAST):
        low = [name for name, first, _, _ in rows if first["ratio"] < limit]
        print(f"below x{limit}: {', '.join(low) or 'none'}")
    if options.device == "cuda":
        few = [
            name
            for name, first, _, compiled in rows
            if share_of_gain(first["ratio"], compiled["ratio"]) < SHARE
        ]
        print(f"below {100 * SHARE:.0f} % of torch.compile's gain: {', '.join(few) or 'none'}")
    return int(bool(low))


def main() -> int:
    """Reads the options, runs, prints; 1 when a model became slower, 2 when some are left."""
    parser = modules.parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="torch.compile too, as on a GPU")
    parser.add_argument("--bars", action="store_true")
    parser.add_argument("--json", type=Path, help="where results are kept, model by model")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--tiny", action="store_true", help="small models, to try this out")
    options = parser.parse_args()
    if options.run:
        modules.run_child(options, run_model, run_compiled)
        return 0
    options.compile = options.compile or options.device == "cuda"
    models = (options.models or MODELS[options.device]).split(",")
    kept = options.json is not None and options.json.is_file()
    rows = [tuple(row) for row in json.loads(options.json.read_text())] if kept else []
    begin = time.monotonic()
    for name in models:
        if any(name == row[0] for row in rows) or time.monotonic() - begin > options.seconds:
            continue
        rows += modules.measure_models(
            __file__,
            name,
            options,
            *(["--tiny"] if options.tiny else []),
            compiles=options.compile,
        )
        if options.json:
            options.json.write_text(json.dumps(rows))
    rows = [row for row in rows if row[0] in models]
    frame.write(table(rows, options), options.output)
    left = len(models) - len(rows)
    if left:
        print(f"left: {left} models; run it again")
        return 2
    return judge(rows, options) if options.bars else 0


if __name__ == "__main__":
    sys.exit(main())
