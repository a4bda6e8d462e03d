"""What a call costs from Python: PyTorch's own, through a hook, and answered by a kernel.

    make bench BENCH_ARGS='--only overhead'
    python -m bench.overhead.overhead [--sizes 0,8,4096] [--no-upstream] [--rounds 20] [--json]

Each side is a process of its own, and they take turns:

stock      nothing is hooked
native     hooked and decided for native, in a long run: few calls are looked at
hit        a compiled kernel answers, a bare one
container  a compiled kernel answers, in AOTInductor's container. What writes an argument (add_,
           add.out) has no figure here: a container returns memory of its own, none is ever made
           of such a call, and where a bare kernel does not do native answers it
upstream   PyTorch's own ``Library._impl_with_aoti_compile``, in a process that finds its cache warm

"0" elements stand for one element without dimensions. Tensors are "inference" ones, or "plain" ones
that autograd looks at.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.shared import frame, turns

TITLE = "Overhead from Python, one thread"
# Call and the operator that it is.
OPERATORS = {
    "abs": "abs",
    "add": "add.Tensor",
    "add_": "add_.Tensor",
    "add.out": "add.out",
    "clamp": "clamp",
    "cat of 4": "cat",
    "_softmax": "_softmax",
    "native_layer_norm": "native_layer_norm",
    "var": "var.correction",
}
WRITING = ("add_", "add.out")
NEED_DIMENSION = ("cat of 4", "native_layer_norm")
KINDS = ("inference", "plain")
# A compile of upstream's takes seconds, and one in a process without a warm Inductor half a minute.
UPSTREAM = ("abs", "add")
UPSTREAM_SIZE = 8
# What makes a worker's kernels containers, when it is found as sitecustomize.
_CONTAINERS = """
import eagercache.worker.inductor.text_takers as _takers
_init = _takers.TextTaker.__init__
def _containers_only(self, call, allow_bare, *rest, **named):
    _init(self, call, False, *rest, **named)
_takers.TextTaker.__init__ = _containers_only
"""


def calls(elements: int) -> dict[str, Callable[[], Any]]:
    """The calls to time, by name."""
    import torch

    sizes = (elements,) if elements else ()
    x, y, out = torch.randn(sizes), torch.randn(sizes), torch.empty(sizes)
    four = [x, y, x, y]
    made: dict[str, Callable[[], Any]] = {
        "abs": lambda: torch.abs(x),
        "add": lambda: torch.add(x, y),
        "add_": lambda: x.add_(y),
        "add.out": lambda: torch.add(x, y, out=out),
        "clamp": lambda: torch.clamp(x, -1.0, 1.0),
        "cat of 4": lambda: torch.cat(four),
        "_softmax": lambda: torch._softmax(x, 0, False),
        "native_layer_norm": lambda: torch.native_layer_norm(x, sizes, y, y, 1e-5),
        "var": lambda: torch.var(x, correction=0),
    }
    return {name: call for name, call in made.items() if elements or name not in NEED_DIMENSION}


def all_calls(sizes: list[int]) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Every call by its full name, with the short one."""
    import torch

    made: dict[str, tuple[str, Callable[[], Any]]] = {}
    for elements, kind in itertools.product(sizes, KINDS):
        with torch.inference_mode(kind == "inference"):
            for name, call in calls(elements).items():
                made[f"{name}, {elements}, {kind}"] = (name, call)
    return made


def has(side: str, name: str, elements: int) -> bool:
    """Whether a side has that call."""
    if side == "container":
        return name not in WRITING
    return side != "upstream" or (name in UPSTREAM and elements == UPSTREAM_SIZE)


def child(side: str, sizes: list[int], only: str, fill: bool) -> None:
    """One side: fills its cache, or takes its turns."""
    import torch

    if not fill:
        frame.pin()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    every = all_calls(sizes)
    mine = {
        name: call for name, (short, call) in every.items()
        if only in short and has(side, short, int(name.split(", ")[1]))
    }  # fmt: skip
    if side in ("hit", "container", "native"):
        import eagercache

        on_miss = "wait" if fill else "native"
        choose = "faster" if side == "native" else "always"  # which looks at every call
        eagercache.enable(list(OPERATORS.values()), on_miss=on_miss, choose=choose)
    elif side == "upstream":
        # It warns of itself being deprecated, and of every operator that it takes.
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        library = torch.library.Library("aten", "IMPL")
        for name in UPSTREAM:
            if only not in name:
                continue
            library._impl_with_aoti_compile(OPERATORS[name], "CPU")
    answered = {name: is_answered(side, name, call, fill) for name, call in mine.items()}
    if fill:
        print(turns.READY + json.dumps({}), flush=True)
        os._exit(0)
    functions = {name: block_of(name, mine[name]) for name in mine if answered[name]}
    turns.serve(functions, {"calls": list(functions)})


def block_of(name: str, call: Callable[[], Any]) -> Callable[[int], float]:
    """What `turns.serve` times a block of ``call`` with, under the mode of its tensors."""
    import torch

    def block(count: int) -> float:
        with torch.inference_mode(name.endswith("inference")):
            return frame.one_round(call, count)

    return block


def is_answered(side: str, name: str, call: Callable[[], Any], fill: bool) -> bool:
    """Makes the call a few times; whether it is answered as the side says."""
    import torch

    with torch.inference_mode(name.endswith("inference")):
        for _ in range(1 if side == "upstream" else 3):
            call()
        if fill or side in ("stock", "upstream"):
            return True
        import eagercache

        eagercache.wait()  # until what the store says of the call was heard
        before = eagercache.stats()
        call()
        after = eagercache.stats()
    if side == "native":
        return after.native - before.native == 1
    return after.hits - before.hits == 1


def measure(options: argparse.Namespace) -> list[frame.Figure]:
    """All sides by turns."""
    figures: list[frame.Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        sides = start(options, Path(folder))
        for name in sides["stock"].facts["calls"]:
            those = {who: side for who, side in sides.items() if name in side.facts["calls"]}
            made = turns.compare(those, name, rounds=options.rounds, calls=options.calls)
            figures.extend(made.values())
        for side in sides.values():
            side.end()
    return figures


def command_of(sizes: str, only: str) -> list[str]:
    """The beginning of a side's command."""
    return [*frame.command(__file__), "--sizes", sizes, "--only", only, "--child"]


def filled(side: str, sizes: str, only: str, folder: Path) -> dict[str, str]:
    """The environment of a side: a cache of its own in ``folder``, filled where it needs one."""
    store = folder / side
    store.mkdir(mode=0o700)
    environment = {"EAGERCACHE_DIR": str(store), "TORCHINDUCTOR_CACHE_DIR": str(store)}
    extra = {}
    if side == "container":
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_CONTAINERS, encoding="utf-8")
        extra["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    if side in ("hit", "container", "upstream"):
        turns.Side([*command_of(sizes, only), side, "--fill"], {**environment, **extra}).end()
    return environment


def start(options: argparse.Namespace, folder: Path) -> dict[str, turns.Side]:
    """The processes that take turns, their caches filled."""
    command = command_of(options.sizes, options.only)
    sides = {}
    for side in ("stock", "native", "hit", "container", "upstream"):
        if side == "upstream" and not options.upstream:
            continue
        environment = filled(side, options.sizes, options.only, folder)
        sides[side] = turns.Side([*command, side], environment)
        print(f"  {side}: {len(sides[side].facts['calls'])} calls", file=sys.stderr, flush=True)
    return sides


def make_parser(title: str, rounds: int) -> argparse.ArgumentParser:
    """The options of both tables of overheads."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of blocks by turns")
    parser.add_argument("--calls", type=int, default=1000, help="calls a block")
    parser.add_argument("--sizes", default="0,8,4096", help="elements")
    parser.add_argument("--only", default="", help="calls whose name contains this")
    return parser


def main() -> None:
    """The command line."""
    parser = make_parser(TITLE, 20)
    parser.add_argument("--no-upstream", dest="upstream", action="store_false")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sizes = [int(size) for size in options.sizes.split(",")]
        child(options.child, sizes, options.only, options.fill)
        return
    frame.show(frame.as_json(TITLE, measure(options)), options.json)


if __name__ == "__main__":
    main()
