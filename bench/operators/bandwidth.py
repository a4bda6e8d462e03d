"""Bandwidth-bound calls on a GPU: eager, torch.compile, its max-autotune, and kernels of ours.

    python -m bench.operators.bandwidth [--only softmax] [--dtypes bfloat16,float32] [--output FILE]
        [--rounds 9] [--search deep] [--sides eager,compile,max-autotune,eagercache]

Each side is a process of its own; one is at work at a time, and blocks of calls take turns. A time
is the device's: a block is queued behind a wait, so that the host is not in it. GB/s are bytes of
inputs and outputs, each once, and the last column is their share of a copy's, measured in the same
turns. The store is empty at the start and thrown away.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.operators.bandwidth_cases import CASES, Case, moved
from bench.shared import frame, turns

SIDES = ("eager", "compile", "max-autotune", "eagercache")
_MODES = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}
_COPY = "copy"
_COPIED = 256 << 20
_HEAD_START = 2_000_000  # cycles that the device waits until a block is queued
_CALLS = 20


def serve(side: str, names: list[str], dtypes: list[str]) -> None:
    """A side's process: makes everything ready, then times blocks as it is asked to."""
    import torch

    blocks: dict[str, Callable[[int], float]] = {}
    facts: dict[str, Any] = {"card": torch.cuda.get_device_name(0), "torch": torch.__version__}
    if side == "eagercache":
        import eagercache

        operators = {CASES[n].operator for n in names if CASES[n].operator.startswith("aten::")}
        eagercache.enable(sorted(operators), devices="cuda", on_miss="wait")
    with torch.no_grad():
        for name in names:
            for dtype in dtypes:
                make = _made(CASES[name], side, f"{name} {dtype}")
                inputs = CASES[name].inputs(getattr(torch, dtype), "cuda")
                outputs = make(*inputs)
                facts[f"{name} {dtype}"] = moved(inputs, outputs)
                blocks[f"{name} {dtype}"] = _block(make, CASES[name], getattr(torch, dtype))
                del inputs, outputs
                torch.cuda.empty_cache()
    blocks[_COPY] = _copy_block()
    if side == "eagercache":
        facts["kernels"] = [
            (row.op, row.decision, row.reason, row.facts.get("kernel_form", ""))
            for row in eagercache.kernels()
        ]
    turns.serve(blocks, facts)


def _made(case: Case, side: str, label: str) -> Callable[..., Any]:
    """The case's function, as this side calls it."""
    import torch

    if side in _MODES:
        torch._dynamo.reset()
        return torch.compile(case.function, mode=_MODES[side], fullgraph=True)
    if side == "eagercache" and not case.operator.startswith("aten::"):
        import eagercache

        name = "bandwidth::" + label.replace(" ", "_")
        return eagercache.op(name, schema=case.operator, autograd=False)(case.function)
    return case.function


def _block(call: Callable[..., Any], case: Case, dtype: Any) -> Callable[[int], float]:
    """Times calls on data that is there for the block alone."""

    def block(calls: int) -> float:
        import torch

        inputs = case.inputs(dtype, "cuda")
        with torch.no_grad():
            took = _device_ns(lambda inputs=inputs: call(*inputs), calls)
        del inputs
        torch.cuda.empty_cache()
        return took

    return block


def _copy_block() -> Callable[[int], float]:
    import torch

    def block(calls: int) -> float:
        source = torch.zeros(_COPIED, dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        return _device_ns(lambda: target.copy_(source), calls)

    return block


def _device_ns(call: Callable[[], Any], calls: int) -> float:
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_HEAD_START)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e6 / calls


def table(
    sides: dict[str, turns.Side], names: list[str], dtypes: list[str], rounds: int
) -> list[str]:
    """The result, in Markdown."""
    copy = turns.compare(sides, _COPY, rounds=rounds, calls=_CALLS)
    limit = max(2 * _COPIED / figure.ns for figure in copy.values())
    facts = next(iter(sides.values())).facts
    rows, gains = [], {side: [] for side in sides}
    for name in names:
        for dtype in dtypes:
            label = f"{name} {dtype}"
            figures = turns.compare(sides, label, rounds=rounds, calls=_CALLS)
            amount = int(facts[label])
            cells = [f"{amount / figure.ns:,.0f}" for figure in figures.values()]
            last = list(figures.values())[-1]
            for side, figure in figures.items():
                gains[side].append(figure.ns / last.ns)
            spread = f"{amount / last.high:,.0f} to {amount / last.low:,.0f}"
            rows.append([name, dtype, *cells, spread, f"{amount / last.ns / limit:.0%}"])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    columns = ["call", "dtype", *(f"{side}, GB/s" for side in sides), "quartiles", "of a copy"]
    return [
        f"{facts['card']}, torch {facts['torch']}, commit {frame.commit()}, "
        f"{time.strftime('%Y-%m-%d')}; a copy: {limit:,.0f} GB/s; medians of {rounds} blocks of "
        f"{_CALLS} calls.",
        "",
        *frame.markdown(columns, rows),
        "",
        "Median over the calls of a side's time by the last side's: "
        + ", ".join(f"{side} x{statistics.median(gains[side]):.2f}" for side in sides),
    ]


def main() -> int:
    """Runs the sides, or is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="calls whose name has one of these words")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--search", default="deep", help="EAGERCACHE_SEARCH of our side")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    words = options.only.split(",")
    names = [name for name in CASES if any(word in name for word in words)]
    dtypes = options.dtypes.split(",")
    if options.serve:
        serve(options.serve, names, dtypes)
        return 0
    sides: dict[str, turns.Side] = {}
    with tempfile.TemporaryDirectory(prefix="eagercache-bandwidth-") as folder:
        for side in options.sides.split(","):
            command = [*frame.command(__file__), "--serve", side, "--only", options.only]
            own = {"EAGERCACHE_SEARCH": options.search, "EAGERCACHE_DIR": folder}
            sides[side] = turns.Side([*command, "--dtypes", options.dtypes], own)
        text = "\n".join(table(sides, names, dtypes, options.rounds))
        made = sides["eagercache"].facts["kernels"] if "eagercache" in sides else []
        for side in sides.values():
            side.end()
    forms = [f"- {op}: {decision} {form or reason}" for op, decision, reason, form in made]
    frame.write("\n".join([text, "", *forms]) + "\n", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
