"""Operators on lists of tensors on a GPU, as optimizers call them: native's, and kernels.

    python -m bench.overhead.cuda_lists [--rounds 9] [--calls 30] [--json FILE]

"small" are 160 tensors of 16 to 4,096 numbers, where the host's time counts, "vit" the parameters
of a ViT-B (152 tensors, 86 million numbers), where the GPU's does. Blocks of calls take turns with
eagercache off and on in one process. Two times a call are told: until it is queued, and with the
wait for the device at the block's end. ``choose="always"``: what loses is shown, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.shared import frame

OPTIONS: dict[str, Any] = {"devices": ["cuda"], "on_miss": "wait", "choose": "always"}
SMALL = [(16,), (64, 64), (300,), (8, 3, 3, 3)] * 40
_LAYER = [(768,)] * 6 + [(2304, 768), (2304,), (768, 768), (3072, 768), (3072,), (768, 3072)]
_ENDS = [(1, 1, 768), (1, 197, 768), (768, 3, 16, 16), (1000, 768), (1000,)] + [(768,)] * 3
VIT = _ENDS + _LAYER * 12


def calls(sizes: list[tuple[int, ...]]) -> dict[str, Callable[[], Any]]:
    """What is called, by name; numbers stay finite however often that is."""
    import torch

    xs, ys, zs = ([torch.rand(size, device="cuda") + 0.5 for size in sizes] for _ in range(3))
    parameters = [torch.nn.Parameter(x.clone()) for x in xs]
    for parameter, y in zip(parameters, ys, strict=True):
        parameter.grad = y * 1e-3
    sgd = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, foreach=True)
    adam = torch.optim.AdamW(parameters, lr=1e-6, foreach=True)
    return {
        "_foreach_mul_.Scalar": lambda: torch._foreach_mul_(xs, 0.99999),
        "_foreach_add_.List": lambda: torch._foreach_add_(xs, ys, alpha=1e-8),
        "_foreach_addcmul_.Scalar": lambda: torch._foreach_addcmul_(xs, ys, zs, value=1e-8),
        "_foreach_addcdiv_.Scalar": lambda: torch._foreach_addcdiv_(xs, ys, zs, value=-1e-8),
        "_foreach_sqrt": lambda: torch._foreach_sqrt(ys),
        "_foreach_add.List": lambda: torch._foreach_add(xs, ys, alpha=2),
        "SGD.step": sgd.step,
        "AdamW.step": adam.step,
    }


def block(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Microseconds a call: until all are queued, and until they are done."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    return (queued - begin) * 1e6 / count, (done - begin) * 1e6 / count


def measure(call: Callable[[], Any], rounds: int, count: int) -> dict[str, float]:
    """Medians over rounds, and the share of the calls of operators that kernels answered."""
    import eagercache

    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with eagercache.enable("all", **OPTIONS):
        for _ in range(4):
            call()  # compiles
    answered = asked = 0
    for _ in range(rounds):
        times[False].append(block(call, count))
        before = eagercache.stats()
        with eagercache.enable("all", **OPTIONS):
            times[True].append(block(call, count))
            after = eagercache.stats()
        answered += after.hits - before.hits
        asked += sum(getattr(after, n) - getattr(before, n) for n in ("hits", "native", "aside"))
    result = {"answered": answered / max(asked, 1)}
    for place, name in enumerate(("queued", "done")):
        native, ours = ([each[place] for each in times[side]] for side in (False, True))
        result[f"{name}_native_us"] = statistics.median(native)
        result[f"{name}_us"] = statistics.median(ours)
        ratios = [mine / base for mine, base in zip(ours, native, strict=True)]
        result[f"{name}_ratio"] = statistics.median(ratios)
    return result


def main() -> None:
    """Prints a table."""
    import os

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as store:
        os.environ["EAGERCACHE_DIR"] = store
        import torch

        print(f"{torch.cuda.get_device_name()}; {frame.machine()}")
        print("| tensors | call | queued, us | ratio | done, us | ratio | by kernels |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
        for tensors, sizes in (("small", SMALL), ("vit", VIT)):
            for name, call in calls(sizes).items():
                row = rows[f"{tensors} {name}"] = measure(call, options.rounds, options.calls)
                cells = [
                    f"{row[f'{time}_native_us']:.0f} to {row[f'{time}_us']:.0f} | "
                    f"x{row[f'{time}_ratio']:.2f}"
                    for time in ("queued", "done")
                ]
                print(f"| {tensors} | {name} | {' | '.join(cells)} | {row['answered']:.0%} |")
    if options.json:
        options.json.write_text(json.dumps({"machine": frame.machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
