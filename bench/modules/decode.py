"""One token of Qwen2-0.5B with caches of both kinds: eager, kernels and torch.compile by turns.

    python -m bench.modules.decode [--device cuda] [--programs static,dynamic,generate]
                                     [--rounds 12] [--layers 24] [--hidden 896] [--no-compile]
                                     [--store DIR] [--prepare] [--output bench/results/x.md]

Batch 1, bfloat16, random weights. ``static`` decodes with a StaticCache of 1,088 positions, whose
sizes stay, so that a GPU may replay the call as a graph; ``dynamic`` with a DynamicCache, at a few
lengths; ``generate`` is transformers' own loop, its Python too, with its default cache, and beside
it with a static cache, whose decode steps transformers compiles. Prompts are eager's in the first
two. Kernels, and what torch.compile makes, are made first (``--prepare`` ends there), in processes
of their own. Then each program has a process, in which its sides take turns; a figure is the wall
time of a block of steps, its end waited for, by the step (of `generate()`, a token), and ``host``
that of the calls alone. Its process has met all lengths before: at a new one, cuDNN's attention
makes a plan, for tens of milliseconds. Ends with 1 where the logits of kernels are further from
eager's than rounding explains, or where no kernel answered a step that was compared.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

from bench.modules import generate
from bench.modules.decode_sides import (
    CALLS,
    CHECKED,
    KERNELS,
    LENGTHS,
    PROMPT,
    Sides,
    check,
    settle,
)
from bench.shared import frame

BARS = {"static": 1.9, "dynamic": 2.6, "generate": 5.0}  # milliseconds of kernels, on a GPU
TOKENS = 64
# Of the largest logit: a few units in the last place of bfloat16, added up over the layers.
ROUNDING = 0.05
REDUCED = {"mode": "reduce-overhead"}
COMPILED: dict[str, dict[str, dict[str, Any]]] = {
    "static": {"torch.compile default": {}, "torch.compile reduce-overhead": REDUCED},
    "dynamic": {"torch.compile dynamic": {"dynamic": True}},
    "generate": {
        "transformers' torch.compile, default": {"mode": "default"},
        "transformers' torch.compile, reduce-overhead": REDUCED,
    },
}
FASTER = 1.6  # than any of these two
Times = tuple[float, float]


def measure_steps(options: argparse.Namespace) -> dict[str, Any]:
    """All sides of ``static`` or ``dynamic``, in this process."""
    import eagercache
    import torch
    from eagercache.modules.manager import explain_module

    torch.set_grad_enabled(False)
    model = generate.make_model("qwen2", options.device)
    static = options.program == "static"
    sides = Sides(model, static, static and options.device == "cuda")
    if options.role != "kernels" and not options.no_compile:
        for name, settings in COMPILED[options.program].items():
            if not options.side or options.side == name:
                sides.add_compiled(name, settings)
    if options.role == "compiled":
        return {}
    times: dict[str, dict[str, list[Times]]] = {}
    with eagercache.enable((), modules="auto"):
        settled = settle(sides, options.device, options.seconds)
        if options.role == "kernels":
            return {"settled": settled, "said": explain_module(model)}
        difference, largest, by_kernel = check(sides)
        before = eagercache.stats().compiles
        for _ in range(options.rounds):
            for length in (PROMPT,) if static else LENGTHS:
                label = "static" if static else f"dynamic, from {length}"
                for name in sides.decoders:
                    decoder = sides.begin(name, length)
                    found = times.setdefault(label, {}).setdefault(name, [])
                    found.append(frame.block(decoder.step, CALLS, options.device))
        late = eagercache.stats().compiles - before
        lines = [f"{late} compiles while it was measured", *sides.failed]
        if not settled:
            lines.insert(0, "kernels were still being made when it began: its times are disturbed")
        said = [*lines, *explain_module(model)]
    return {
        "times": times,
        "said": said,
        "checked": f"{difference:.4f} at most, where the largest logit is {largest:.3f} "
        f"({CHECKED} steps, {by_kernel} by kernel)",
        "wrong": by_kernel == 0 or not difference <= ROUNDING * largest,
    }


def compiled_generators(
    options: argparse.Namespace, model: Any
) -> tuple[dict[str, Callable[[], list[int]]], list[str]]:
    """`generate()` as transformers compiles it, called until that is done; and what failed.

    It does so by itself on a GPU where the cache is static.
    """
    import transformers

    made: dict[str, Callable[[], list[int]]] = {}
    failed: list[str] = []
    for name, settings in COMPILED["generate"].items():
        if options.device == "cpu" or (options.side and options.side != name):
            continue
        other = copy.deepcopy(model)
        other.generation_config.cache_implementation = "static"
        other.generation_config.compile_config = transformers.CompileConfig(**settings)
        call = generate.generator(other, TOKENS)
        try:
            for _ in range(3):
                call()
        except Exception as error:  # what torch.compile cannot do is said, not measured
            failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        made[name] = call
    return made, failed


def measure_generate(options: argparse.Namespace) -> dict[str, Any]:
    """`generate()` by eager, kernels and torch.compile, in this process."""
    import eagercache
    from eagercache.base.load import core
    from eagercache.modules.manager import explain_module

    assert core is not None
    model = generate.make_model("qwen2", options.device)
    call = generate.generator(model, TOKENS)
    expected = call()
    calls = {"eager": call, KERNELS: call}
    failed: list[str] = []
    if options.role != "kernels" and not options.no_compile:
        compiled, failed = compiled_generators(options, model)
        calls |= compiled
    if options.role == "compiled":
        return {"said": failed}
    sides: dict[str, list[Times]] = {name: [] for name in calls}
    with eagercache.enable((), modules="auto"):
        generate.settle(call, options.seconds)
        if options.role == "kernels":
            return {"said": explain_module(model)}
        alike = generate.equal_tokens(call(), expected)
        before = eagercache.stats().compiles
        for _ in range(options.rounds):
            for name, found in sides.items():
                core.set_answering(name == KERNELS)
                wall = generate.milliseconds(calls[name], TOKENS)
                found.append((wall, wall))
        core.set_answering(True)
        late = eagercache.stats().compiles - before
        said = [f"{late} compiles while it was measured", *failed, *explain_module(model)]
    checked = f"{alike} of {TOKENS} tokens are eager's before one is not"
    return {"times": {"generate": sides}, "said": said, "checked": checked, "wrong": False}


def run(options: argparse.Namespace, role: str, program: str, side: str = "") -> dict[str, Any]:
    """What one process says."""
    arguments = ["--role", role, "--program", program, "--side", side]
    for name in ("device", "layers", "hidden", "rounds", "seconds"):
        arguments += [f"--{name}", str(getattr(options, name))]
    if options.no_compile:
        arguments.append("--no-compile")
    store = str(options.store)
    caches = {"EAGERCACHE_DIR": store, "TORCHINDUCTOR_CACHE_DIR": f"{store}/inductor"}
    result: dict[str, Any] = frame.in_process(__file__, *arguments, **caches)
    return result


def prepare(options: argparse.Namespace, programs: list[str]) -> None:
    """Makes everything that is measured later, all programs at a time."""
    tasks = {name: functools.partial(run, options, "kernels", name) for name in programs}
    for program in programs if not options.no_compile else ():
        for side in COMPILED[program]:
            tasks[f"{program}, {side}"] = functools.partial(run, options, "compiled", program, side)
    begin = time.monotonic()
    with futures.ThreadPoolExecutor(len(tasks)) as pool:
        started = {pool.submit(task): name for name, task in tasks.items()}
        for future in futures.as_completed(started):
            took = f"{time.monotonic() - begin:.0f} s"
            said = future.exception() or future.result().get("said", [])[:3]
            print(f"prepared {started[future]} in {took}: {said}", file=sys.stderr, flush=True)


def device_name(device: str) -> str:
    """Which GPU, or the device's type."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


def rows_of(
    program: str, result: dict[str, Any], barred: bool
) -> tuple[list[list[str]], list[str]]:
    """The rows of a program's table, and a sentence for each bar that is missed."""
    rows, missed = [], []
    for label, sides in result["times"].items():
        rows += frame.block_rows(label, sides)
        middle = statistics.median(wall for wall, _ in sides[KERNELS])
        if barred and middle > BARS[program]:
            bar = f"the {BARS[program]} ms that are wanted"
            missed.append(f"{label}: kernels take {middle:.3f} ms, more than {bar}.")
        for side in COMPILED["generate"]:
            gain = statistics.median(wall for wall, _ in sides.get(side, [(math.inf, 0)])) / middle
            if barred and gain < FASTER:
                missed.append(f"{label}: kernels are x{gain:.2f} over {side}, less than x{FASTER}.")
    return rows, missed


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--programs", default=",".join(BARS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=generate.QWEN2["num_hidden_layers"])
    parser.add_argument("--hidden", type=int, default=generate.QWEN2["hidden_size"])
    parser.add_argument("--seconds", type=float, default=400, help="for kernels, each process")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--store", type=Path, help="kept; by default one of its own, which is not")
    parser.add_argument("--prepare", action="store_true", help="make kernels and end")
    parser.add_argument("--output", type=Path)
    for name in ("role", "program", "side"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def shrink(options: argparse.Namespace) -> bool:
    """Gives the model the sizes that were asked for; whether they are others than its own."""
    asked = {"num_hidden_layers": options.layers, "hidden_size": options.hidden}
    if all(generate.QWEN2[name] == value for name, value in asked.items()):
        return False
    if options.hidden != generate.QWEN2["hidden_size"]:
        heads = max(1, options.hidden // 64)
        asked |= {"num_attention_heads": heads, "num_key_value_heads": 1}
        asked |= {"intermediate_size": 2 * options.hidden, "vocab_size": 1000}
    generate.QWEN2.update(asked)
    return True


def main() -> int:
    """Measures each program and prints a table; see the module's text."""
    options = parse()
    shrunk = shrink(options)
    if options.role:
        steps = options.program != "generate"
        print(json.dumps(measure_steps(options) if steps else measure_generate(options)))
        return 0
    programs = options.programs.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        prepared = options.store is not None and options.store.is_dir() and not options.prepare
        options.store = options.store or Path(temporary)
        if not prepared:
            prepare(options, programs)
        if options.prepare:
            return 0
        results = {name: run(options, "measure", name) for name in programs}
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    rows, sentences = [], []
    for name, result in results.items():
        found, missed = rows_of(name, result, options.device == "cuda" and not shrunk)
        rows += found
        sentences += [*missed, f"{name}: differs from eager: {result['checked']}"]
        sentences += [f"{name}: {line}" for line in result["said"][:5]]
    head = ["program", "side", *frame.BLOCK_COLUMNS]
    name = device_name(options.device)
    text = [f"{name}; {where}", "", *frame.markdown(head, rows), "", *sentences, ""]
    frame.write("\n".join(text), options.output)
    return int(any(result["wrong"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
