"""Calls of whole modules that are replayed as CUDA graphs, beside eager and torch.compile.

    python -m bench.modules.replay [--programs llama,mobilenetv3,vit_tiny,bert] [--rounds 25]
                                     [--output bench/results/x.md]

Batch 1 in bfloat16, random weights, the same sizes at each call. Kernels are made first, of all
programs at a time, by calls without a pause. Then each program has a process of its own, which
calls until its replays are decided; and five sides take turns: eager, kernels without replay,
kernels, ``torch.compile``, and its mode ``reduce-overhead``. A figure is the wall time of a block
of calls, its end waited for, by the call; ``host`` is that of the calls alone, while the device has
not ended.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

from bench.shared import frame

PROGRAMS = ("llama", "mobilenetv3", "vit_tiny", "bert")
CALLS = 40
LONGEST_WAIT = 200.0


def make(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, arguments, keyword arguments)."""
    import torch

    torch.manual_seed(0)
    if name in ("mobilenetv3", "vit_tiny"):
        import timm

        kind = {"mobilenetv3": "mobilenetv3_small_100", "vit_tiny": "vit_tiny_patch16_224"}[name]
        images = torch.randn(1, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        return timm.create_model(kind).eval().to("cuda", torch.bfloat16), (images,), {}
    import transformers

    if name == "bert":
        model: Any = transformers.BertModel(transformers.BertConfig()).eval()
        ids = torch.randint(0, 30000, (1, 128), device="cuda")
        return model.to("cuda", torch.bfloat16), (ids, torch.ones_like(ids)), {}
    from bench.modules import module_models

    model = module_models.make_llama("cuda").to("cuda", torch.bfloat16)
    ids = torch.randint(0, 32000, (4, 1), device="cuda")
    return model, (ids,), {"use_cache": False}


def settle(call: Callable[[], Any]) -> None:
    """Calls until nothing is compiled any more, and then until replays are decided."""
    import torch
    from eagercache.modules.manager import manager

    end = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < end:
        for _ in range(8):
            call()
        if manager.wait(0.2):
            break
    for _ in range(200):
        call()
        torch.cuda.synchronize()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All sides of one program, in this process."""
    import eagercache
    import torch
    from eagercache.base.load import core
    from eagercache.modules import replay
    from eagercache.modules.manager import explain_module

    model, args, keywords = make(options.program)
    calls: dict[str, Callable[[], Any]] = {}
    for mode in ("default", "reduce-overhead"):
        other = copy.deepcopy(model)
        other.forward = torch.compile(other.forward, mode=mode)
        calls[f"torch.compile {mode}"] = lambda other=other: other(*args, **keywords)
    torch.set_grad_enabled(False)
    if options.role == "warm":
        with eagercache.enable((), modules=type(model)):
            settle(lambda: model(*args, **keywords))
    for call in calls.values():
        for _ in range(6):
            call()
    if options.role == "warm":
        return {}
    sides: dict[str, list[tuple[float, float]]] = {}
    with eagercache.enable((), modules=type(model)):
        mine = lambda: model(*args, **keywords)  # noqa: E731
        settle(mine)
        for _ in range(options.rounds):
            core.set_answering(False)
            sides.setdefault("eager", []).append(frame.block(mine, CALLS, "cuda"))
            core.set_answering(True)
            core.set_replay_handler(None)
            sides.setdefault("kernels, not replayed", []).append(frame.block(mine, CALLS, "cuda"))
            replay.set_limit(64 << 20)
            sides.setdefault("kernels", []).append(frame.block(mine, CALLS, "cuda"))
            core.set_answering(False)
            for name, call in calls.items():
                sides.setdefault(name, []).append(frame.block(call, CALLS, "cuda"))
            core.set_answering(True)
        said = explain_module(model)[:1]
    return {"sides": sides, "said": said, "pool": replay.pool_bytes() + replay.workspace_bytes()}


def main() -> int:
    """Measures each program and prints a table; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--program", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        print(json.dumps(measure(options)))
        return 0
    rows, said = [], []
    names = options.programs.split(",")

    def run(role: str, name: str, store: str) -> Any:
        given = ["--role", role, "--program", name, "--rounds", str(options.rounds)]
        caches = {"EAGERCACHE_DIR": store, "TORCHINDUCTOR_CACHE_DIR": f"{store}/inductor"}
        return frame.in_process(__file__, *given, **caches)

    with tempfile.TemporaryDirectory() as store:
        with futures.ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(lambda name: run("warm", name, store), names))
        for name in names:
            result = run("measure", name, store)
            rows += frame.block_rows(name, result["sides"])
            said.append(f"{name}: {result['said']}; pools {result['pool']:,} bytes")
    head = ["program", "side", *frame.BLOCK_COLUMNS]
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    frame.write("\n".join([where, "", *frame.markdown(head, rows), "", *said]), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
