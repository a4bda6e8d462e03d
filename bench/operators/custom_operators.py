"""Functions as operators (`eagercache.op`) beside the same functions eager and under torch.compile.

    python -m bench.operators.custom_operators [--only swiglu] [--no-compile] [--rounds 20] [--bars]

One core. Each function at 8 elements, where the price of a call is seen, and at working sets of
4 KB and 1 MB; without gradients ("forward") and forward and backward together ("training"). Kernels
are used whether they win or not, so that the figures say where they do. The store is empty at the
start and thrown away. With --bars it says what is met of: x1.5 over eager at 1 MB, x1 at 4 KB, and
a call of 8 elements at most 0.25 (forward) or 0.5 (training) of one under torch.compile; it ends
with 1 where something is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import eagercache
import torch
from torch import Tensor

from bench.shared import frame

sys.path.append(str(frame.ROOT / "examples"))  # compile workers find them there too

from fused_functions import lstm_gates, rms_norm_gate, rotary, swiglu, z_loss

SIZES = {"8 elements": 8, "4 KB": 1 << 10, "1 MB": 1 << 18}  # elements of the working set
# What an operator's call may take at most of another one's: (size, mode) to (of what, share).
BARS = {
    ("8 elements", "forward"): ("torch.compile", 0.25),
    ("8 elements", "training"): ("torch.compile", 0.5),
    ("4 KB", "forward"): ("eager", 1.0),
    ("4 KB", "training"): ("eager", 1.0),
    ("1 MB", "forward"): ("eager", 1 / 1.5),
    ("1 MB", "training"): ("eager", 1 / 1.5),
}


def arguments(name: str, elements: int) -> list[Tensor]:
    """Arguments whose first tensor has about ``elements`` elements, half of that for two."""
    width = min(256, elements)
    rows = max(1, elements // 2 // width)
    if name == "rms_norm_gate":
        return [torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)]
    if name == "rotary":
        angles = torch.randn(max(1, 2 * rows // 8), width // 2)
        return [
            torch.randn(8 if rows >= 4 else 1, angles.size(0), width),
            angles.cos(),
            angles.sin(),
        ]
    if name == "z_loss":
        return [torch.randn(2 * rows, width), torch.randint(width, (2 * rows,))]
    if name == "lstm_gates":
        small = max(1, width // 4)
        return [torch.randn(2 * rows, 4 * small), torch.randn(2 * rows, small)]
    return [torch.randn(rows, width), torch.randn(rows, width)]


def training(function: Callable[..., Any], args: list[Tensor]) -> Callable[[], Any]:
    """Forward and backward of one call."""
    made = function(*args)
    outputs = made if isinstance(made, tuple) else (made,)
    inputs = [tensor for tensor in args if tensor.requires_grad]
    grads = [torch.randn_like(output) for output in outputs]

    def step() -> Any:
        made = function(*args)
        outputs = made if isinstance(made, tuple) else (made,)
        return torch.autograd.grad(outputs, inputs, grads)

    return step


def pairs(
    operator: Any, args: list[Tensor], compiled: Any
) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """What is compared: (mode, functions by name)."""
    candidates = {"eager": operator.function, "operator": operator}
    if compiled is not None:
        candidates["torch.compile"] = compiled
    yield "forward", {who: (lambda f=f: f(*args)) for who, f in candidates.items()}
    wanted = [t.clone().requires_grad_(t.is_floating_point()) for t in args]
    if operator is rotary:
        wanted = [wanted[0], *args[1:]]
    yield "training", {who: training(f, wanted) for who, f in candidates.items()}


def measure(options: argparse.Namespace) -> list[frame.Figure]:
    """All figures."""
    torch.manual_seed(0)
    figures: list[frame.Figure] = []
    for operator in (rms_norm_gate, rotary, swiglu, z_loss, lstm_gates):
        name = operator.name.partition("::")[2]
        if options.only not in name:
            continue
        for size, elements in SIZES.items():
            args = arguments(name, elements)
            torch.compiler.reset()
            compiled = torch.compile(operator.function, dynamic=False) if options.compile else None
            for mode, functions in pairs(operator, args, compiled):
                for function in functions.values():
                    for _ in range(3):
                        function()
                # Of a block of few calls the first one, which finds the caches as another function
                # has left them, would be the figure.
                calls = max(20, options.calls // max(1, elements // 64))
                for figure in frame.compare(functions, rounds=options.rounds, calls=calls):
                    title = f"{name}, {size}, {mode}: {figure.name}"
                    figures.append(frame.Figure(**{**figure.__dict__, "name": title}))
    for kernel in eagercache.kernels():
        if kernel.decision != "kernel":
            print(f"{kernel.op}: {kernel.decision}, {kernel.reason}")
    return figures


def judge(figures: Sequence[frame.Figure]) -> bool:
    """Prints what is met of the bars; whether all is."""
    times = {figure.name: figure.ns for figure in figures}
    missed = 0
    for title in [name.removesuffix(": operator") for name in times if name.endswith(": operator")]:
        _, size, mode = title.split(", ")
        other, bar = BARS[size, mode]
        if f"{title}: {other}" not in times:
            continue
        share = times[f"{title}: operator"] / times[f"{title}: {other}"]
        text = f"x{1 / share:.2f} of {other}, bar x{1 / bar:.2f}"
        if f"{title}: torch.compile" in times and other == "eager":
            theirs = times[f"{title}: eager"] / times[f"{title}: torch.compile"]
            text += f"; torch.compile x{theirs:.2f}"
        missed += share > bar
        print(f"{'met' if share <= bar else 'MISSED':7}{title}: {text}")
    return not missed


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of calls by turns")
    parser.add_argument("--calls", type=int, default=1000, help="calls a round of 8 elements")
    parser.add_argument("--only", default="", help="functions whose name contains this")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--bars", action="store_true", help="say what is met, and exit so")
    options = parser.parse_args()
    frame.pin()
    with tempfile.TemporaryDirectory() as store:
        eagercache.enable((), on_miss="wait", choose="always", cache_dir=store)
        figures = measure(options)
        eagercache.disable()
    frame.show(frame.as_json("functions as operators", figures), options.json)
    return int(options.bars and not judge(figures))


if __name__ == "__main__":
    sys.exit(main())
