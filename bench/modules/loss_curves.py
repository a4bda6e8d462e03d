"""Loss curves of training runs, eager five times and with kernels, same seed and data.

    python -m bench.modules.loss_curves [--models resnet50,llama] [--steps 200] [--json FILE]

Where PyTorch's own kernels add in an order that differs from run to run, eager curves spread;
where not, they are equal bit for bit and no other rounding can be "within" that. So the five
eager runs start from float32 weights that differ by half a unit in bfloat16's last place, as
roundings do, and a sixth and a seventh from the very same say whether eager repeats itself. A
curve's distance is the root mean square, over its steps, of its difference from the mean of the
five (for one of them: of the other four). With kernels a first run fills a store; two that start
on it are shown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.shared import frame

EAGER_RUNS = 5
HALF_UNIT = 2.0**-9
BATCHES = 8  # of made-up data, seen again and again, so that there is something to learn


def make_resnet50() -> tuple[Any, Callable[[Any, int], Any], Any]:
    """(model, the loss of a step, optimizer), small enough for hundreds of steps."""
    import torch
    import torchvision

    model: Any = torchvision.models.resnet50(num_classes=100).cuda().train()
    images = torch.randn(BATCHES, 32, 3, 96, 96, device="cuda")
    labels = torch.randint(0, 100, (BATCHES, 32), device="cuda")

    def loss_of(network: Any, step: int) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return torch.nn.functional.cross_entropy(
                network(images[step % BATCHES]), labels[step % BATCHES]
            )

    return model, loss_of, torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)


def make_llama() -> tuple[Any, Callable[[Any, int], Any], Any]:
    """The same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=4000,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).cuda().train()
    tokens = torch.randint(0, 4000, (BATCHES, 8, 256), device="cuda")

    def loss_of(network: Any, step: int) -> Any:
        batch = tokens[step % BATCHES]
        return network(input_ids=batch, labels=batch).loss

    return model, loss_of, torch.optim.AdamW(model.parameters(), lr=3e-4)


MAKERS = {"resnet50": make_resnet50, "llama": make_llama}
DTYPES = {"resnet50": "float32", "llama": "bfloat16"}  # of the weights that are trained


def train(name: str, steps: int, enabled: bool, rounding: int) -> dict[str, Any]:
    """The losses of one run, in a process of its own; ``rounding`` seeds another one, 0: none."""
    import torch

    torch.manual_seed(0)
    model, loss_of, optimizer = MAKERS[name]()
    if rounding:
        generator = torch.Generator("cuda").manual_seed(rounding)
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.rand(weight.shape, generator=generator, device="cuda") * 2 - 1
                weight.mul_(1 + HALF_UNIT * noise)
    model.to(getattr(torch, DTYPES[name]))  # after that: rounded weights would hide half a unit
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    hits = 0
    if enabled:
        import eagercache

        eagercache.enable()
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        warmup.step()
        losses.append(float(loss.detach()))
    if enabled:
        hits = eagercache.stats().hits
        eagercache.wait(60)
    return {"losses": losses, "hits": hits}


def child(name: str, steps: int, enabled: bool, store: Path, rounding: int = 0) -> dict[str, Any]:
    """`train` in a fresh process."""
    options = ["--child", name, "--steps", str(steps), "--rounding", str(rounding)]
    options += ["--enabled"] * enabled
    result: dict[str, Any] = frame.in_process(__file__, *options, EAGERCACHE_DIR=str(store))
    return result


def distance(curve: list[float], others: list[list[float]]) -> float:
    """Root mean square over the steps of the difference from the others' mean."""
    means = [statistics.fmean(values) for values in zip(*others, strict=True)]
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(curve, means, strict=True)))


def report(
    name: str,
    eager: list[list[float]],
    repeats: list[list[float]],
    ours: dict[str, dict[str, Any]],
) -> None:
    """Prints one model's rows."""
    spread = [distance(c, [o for o in eager if o is not c]) for c in eager]
    tail = [statistics.fmean(curve[-50:]) for curve in eager]
    print(
        f"{name}: {len(eager[0])} steps, loss {eager[0][0]:.4f} to {min(tail):.4f}..{max(tail):.4f}"
        f" (mean of the last 50); eager runs' distances "
        + ", ".join(f"{value:.3g}" for value in sorted(spread))
    )
    same = "equal" if repeats[0] == repeats[1] else "not equal"
    print(
        f"  eager twice from the same weights: {same}, distance {distance(repeats[0], eager):.3g}"
    )
    for kind, row in ours.items():
        far = distance(row["losses"], eager)
        print(
            f"  {kind}: distance {far:.3g} ({'within' if far <= max(spread) else 'beyond'} eager's "
            f"spread), last 50 {statistics.fmean(row['losses'][-50:]):.4f}, {row['hits']} hits"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MAKERS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--enabled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounding", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        losses = train(options.child, options.steps, options.enabled, options.rounding)
        print(json.dumps(losses))
        return
    results = {}
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
            store = Path(folder) / "store"
            store.mkdir(mode=0o700)
            roundings = [*range(1, EAGER_RUNS + 1), 0, 0]
            runs = [
                pool.submit(child, name, options.steps, False, store, rounding)
                for rounding in roundings
            ]
            child(name, options.steps, True, store)  # most of it is over before kernels are there
            ours = {
                kind: child(name, options.steps, True, store)
                for kind in ("kernels from the store", "the same again")
            }
            curves = [run.result()["losses"] for run in runs]
        eager, repeats = curves[:EAGER_RUNS], curves[EAGER_RUNS:]
        report(name, eager, repeats, ours)
        results[name] = {"eager": eager, "repeats": repeats, **ours}
        if options.json:
            options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
