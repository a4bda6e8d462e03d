"""What a call costs from C++: PyTorch's own, through a hook, and answered by a kernel.

    make bench BENCH_ARGS='--only overhead'
    python -m bench.overhead.overhead_cpp [--sizes 0,8,4096] [--only add] [--rounds 100] [--json]

Each side is a process of its own, and they take turns on one core, in another order every round.
Of each call there are the median and the quartiles, the ratio to stock, and what the call takes
over stock: the median of the differences of pairs, with the interval that holds it in 95 of 100
cases, whatever the noise looks like. "again" is stock once more: how far its interval reaches from
0 is what the machine lets one tell.

stock      nothing is hooked
again      the same in another process
off        all operators are hooked, the hooks disabled
inside     the same calls made inside of one of our kernels: what the thread-local flag costs
native     decided for native, and every call is looked at
run        the same in a long run of an operator without kernels: few calls are looked at
mixed      the same in a long run of an operator that has a kernel, for other calls
allocates  a kernel answers that allocates its outputs and computes nothing
bare       a compiled kernel answers, a bare one
container  a compiled kernel answers, in AOTInductor's container. What writes an argument (add_,
           add.out) has no figure here: a container returns memory of its own, none is ever made
           of such a call, and where a bare kernel does not do native answers it

"0" elements stand for one element without dimensions. Tensors are "inference" ones, or "plain" ones
that autograd looks at; "boxed" calls are those of inference tensors by callBoxed. The programs are
made by scripts/bench; --programs names another folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from bench.overhead import overhead
from bench.shared import frame, turns

TITLE = "Overhead from C++, one thread"
FORMS = ("stock", "again", "off", "inside", "native", "run", "mixed", "allocates")
COMPILED = ("bare", "container")


def programs_of(options: argparse.Namespace) -> Path:
    """The folder of the programs."""
    import torch

    built = frame.ROOT / "build" / f"bench-{torch.__version__.split('+')[0]}" / "bench"
    folder: Path = options.programs or built
    if not (folder / "eagercache_overhead_side").exists():
        raise SystemExit(f"{folder} has no eagercache_overhead_side: run scripts/bench")
    return folder.absolute()


def start(options: argparse.Namespace, folder: Path) -> dict[str, turns.Side]:
    """The processes that take turns; those of compiled kernels with a store that was filled."""
    import torch

    programs = programs_of(options)
    settings = {"EAGERCACHE_BENCH_SIZES": options.sizes, "EAGERCACHE_BENCH_ONLY": options.only}
    sides = {}
    for form in (*FORMS, *COMPILED):
        if options.forms and form not in ("stock", *options.forms.split(",")):
            continue
        environment = dict(settings)
        program = programs / "eagercache_overhead_side"
        if form in COMPILED:
            side = "hit" if form == "bare" else form
            environment |= overhead.filled(side, options.sizes, options.only, folder)
            # Containers name torch's libraries, which a program of its own has to find for them.
            environment["LD_LIBRARY_PATH"] = str(Path(torch.__file__).parent / "lib")
            program = programs / "eagercache_overhead_hits"
        else:
            names = {"again": "stock", "allocates": "hit"}
            environment["EAGERCACHE_BENCH_FORM"] = names.get(form, form)
        sides[form] = turns.Side([str(program)], environment)
        print(f"  {form}: {len(sides[form].facts['calls'])} calls", file=sys.stderr, flush=True)
    return sides


def scaling(sides: dict[str, turns.Side], rounds: int) -> list[frame.Figure]:
    """What two threads' hits scale by, of what two threads of native scale by."""
    one, two = (f"abs, 8, threads {count}" for count in (1, 2))
    if not all(side in sides and one in sides[side].facts["calls"]
               for side in ("stock", "allocates")):  # fmt: skip
        return []
    ratios, hits = [], []
    for _ in range(rounds):
        times = {
            (side, name): sides[side].ns(name, 2000)
            for side in ("stock", "allocates")
            for name in (one, two)
        }
        mine, native = (times[side, one] / times[side, two] for side in ("allocates", "stock"))
        ratios.append(mine / native)
        hits.append(times["allocates", two])
    low, median, high = frame.quartiles(hits)
    name = "abs, 8, threads 2 allocates: scaling, of stock's"
    return [frame.Figure(name, median, low, high, statistics.median(ratios), rounds, 2000)]


def measure(options: argparse.Namespace) -> list[frame.Figure]:
    """All sides by turns."""
    frame.pin()
    figures: list[frame.Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        sides = start(options, Path(folder))
        for name in sides["stock"].facts["calls"]:
            if "threads" in name or options.kind not in name:
                continue
            those = {who: side for who, side in sides.items() if name in side.facts["calls"]}
            made = turns.compare(those, name, rounds=options.rounds, calls=options.calls)
            figures.extend(made.values())
        figures.extend(scaling(sides, max(2, options.rounds // 5)))
        for side in sides.values():
            side.end()
    return figures


def main() -> None:
    """The command line."""
    parser = overhead.make_parser(TITLE, 100)
    parser.add_argument("--kind", default="", help="inference, plain or boxed calls only")
    parser.add_argument("--forms", default="", help="these sides only, beside stock")
    parser.add_argument("--programs", type=Path, help="the folder of the programs")
    options = parser.parse_args()
    frame.show(frame.as_json(TITLE, measure(options)), options.json)


if __name__ == "__main__":
    main()
