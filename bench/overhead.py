"""What a call on 8 floats costs from Python: PyTorch's own, through the hook, and a hit.

For each operator three figures: `stock` (PyTorch, nothing hooked), `native` (hooked, and the
verdict is native) and `hit` (hooked, and a kernel answers). The last two are measured by turns. An
override cannot be taken away, so stock comes first; how much an operator that is never hooked
changed in the meantime is the figure `drift`, and the ratios are corrected by it. The kernels are
compiled when the cache does not have them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import eagercache
import frame
import torch

TITLE = "Overhead from Python, 8 floats, one thread"
OPERATORS = {"abs": "abs", "add": "add.Tensor", "cat": "cat"}
CONTROL = "never hooked (neg)"


def calls() -> dict[str, Callable[[], Any]]:
    """The calls to time, by name."""
    x, y = torch.randn(8), torch.randn(8)
    pair = [x, y]
    return {
        "abs": lambda: torch.abs(x),
        "add": lambda: torch.add(x, y),
        "cat": lambda: torch.cat(pair),
    }


def control() -> Callable[[], Any]:
    """A call that eagercache never sees."""
    z = torch.randn(8)
    return lambda: torch.neg(z)


def measure(options: argparse.Namespace) -> list[frame.Figure]:
    """Stock, then native and hit by turns."""
    repeat = {"rounds": options.rounds, "calls": options.calls}
    functions = calls()
    stock = frame.compare({CONTROL: control(), **functions}, **repeat)
    hooked = functions_of_both_kinds()
    later = frame.compare({CONTROL: control(), **hooked}, **repeat)
    drift = later[0].ns / stock[0].ns
    by_name = {figure.name: figure for figure in [*stock[1:], *later[1:]]}
    figures = []
    for name in OPERATORS:
        base = by_name[name]
        figures.append(dataclasses.replace(base, name=f"{name} stock", ratio=None))
        for kind in ("native", "hit"):
            figure = by_name[f"{name} {kind}"]
            figures.append(dataclasses.replace(figure, ratio=figure.ns / base.ns / drift))
    figures.append(dataclasses.replace(later[0], name=f"drift: {CONTROL}", ratio=drift))
    return figures


def functions_of_both_kinds() -> dict[str, Callable[[], Any]]:
    """Each operator decided for native, and each answered by a kernel."""
    # One shape for each decision: a table holds both.
    eagercache.enable(list(OPERATORS.values()), on_miss="wait", choose="always")
    hits = calls()
    for function in hits.values():
        function()
    eagercache.enable(list(OPERATORS.values()), on_miss="native", choose="always")
    x, y = torch.randn(7), torch.randn(7)
    pair = [x, y]
    natives: dict[str, Callable[[], Any]] = {
        "abs": lambda: torch.abs(x),
        "add": lambda: torch.add(x, y),
        "cat": lambda: torch.cat(pair),
    }
    for _ in range(3):
        for function in (*hits.values(), *natives.values()):
            function()
    check(hits, natives)
    both = {}
    for name in OPERATORS:
        both[f"{name} native"] = natives[name]
        both[f"{name} hit"] = hits[name]
    return both


def check(hits: dict[str, Callable[[], Any]], natives: dict[str, Callable[[], Any]]) -> None:
    """Raises unless each call is answered as its figure says."""
    for name, operator in OPERATORS.items():
        before = eagercache.stats().operators[f"aten::{operator}"]
        hits[name]()
        natives[name]()
        after = eagercache.stats().operators[f"aten::{operator}"]
        if (after.hits - before.hits, after.native - before.native) != (1, 1):
            reasons = [k.reason for k in eagercache.kernels() if k.op == f"aten::{name}"]
            raise SystemExit(f"{name}: there is no kernel to measure; {reasons}")


if __name__ == "__main__":
    frame.main(TITLE, measure)
