"""The default operators on CPU: what a caller sees with eagercache and without, call by call.

    .venv/bin/python bench/default_set.py --cache build/default-set [--shapes 3] [--output x.md]

The calls are those of default_calls.py, of every operator that is hooked by default. First all of
them get their verdicts, as in a user's process; then each is timed in one process, in turns of a
few hundred microseconds with eagercache answering and without, through `torch.ops`. Verdicts and
rows are kept in --cache: a run that was stopped goes on where it was. The exit status is 1 where
some call is slower than native by more than 2 % beyond the interval of the ratio's median (99 %),
or a default operator has no call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagercache
import frame
from compile import wait_for
from default_calls import SHAPES, Call, calls, missing
from eagercache._load import core
from eagercache.timing import median_interval

ALLOWED = 1.02
TURN_NS = 300_000.0
MOST_CALLS = 500
# Before a call is measured: as many as get it a kernel of its own where that of its class lost.
SETTLED_CALLS = 40


def turn(function: Callable[[], Any], calls: int, answering: bool) -> float:
    """Nanoseconds of a call."""
    assert core is not None
    core.set_answering(answering)
    function()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        function()
    return (time.perf_counter_ns() - begin) / calls


def measure(function: Callable[[], Any], pairs: int) -> dict[str, float]:
    """Medians of both sides in microseconds, and the ratio with its interval."""
    rough = min(turn(function, 3, False) for _ in range(3))
    calls = max(1, min(MOST_CALLS, int(TURN_NS / max(rough, 1.0))))
    sides: dict[bool, list[float]] = {False: [], True: []}
    for number in range(pairs):
        for answering in (False, True) if number % 2 else (True, False):
            sides[answering].append(turn(function, calls, answering))
    ratios = [mine / native for mine, native in zip(sides[True], sides[False], strict=True)]
    low, high = median_interval(ratios)
    return {
        "native": statistics.median(sides[False]) / 1000,
        "with": statistics.median(sides[True]) / 1000,
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
    }


def decisions(function: Callable[[], Any], name: str) -> str:
    """Which side answers the call now: "kernel", "native" or what it steps aside for."""
    before = eagercache.stats().operators.get(name)
    function()
    after = eagercache.stats().operators.get(name)
    if before is None or after is None:
        return "not hooked"
    return "kernel" if after.hits > before.hits else "native"


def run(chosen: list[Call], rows_path: Path, pairs: int) -> list[dict[str, Any]]:
    """Rows of all calls; those that are in the file are not measured again."""
    rows: dict[str, dict[str, Any]] = {}
    if rows_path.exists():
        rows = json.loads(rows_path.read_text())
    for number, (name, shape, function) in enumerate(chosen):
        key = f"{number} {name} {shape}"
        if key in rows:
            continue
        for _ in range(SETTLED_CALLS):
            function()
        eagercache.wait(600)
        function()
        answers = decisions(function, f"aten::{name}")
        rows[key] = {"operator": name, "sizes": shape, "answers": answers}
        rows[key].update(measure(function, pairs))
        rows_path.write_text(json.dumps(rows))
    return list(rows.values())


def is_slower(row: dict[str, Any]) -> bool:
    """Whether the call is slower than native by more than is allowed, for certain."""
    return bool(row["low"] > ALLOWED)


def report(rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    where = frame.machine()
    slower = [row for row in rows if is_slower(row)]
    kernels = [row for row in rows if row["answers"] == "kernel"]
    lines = [
        f"# The default operators on CPU, {where['date']}",
        "",
        f"{where['processor']}, {where['cores']} cores, load {where['load']}; torch "
        f"{where['torch']}, Python {where['python']}; commit {where['commit']}. Microseconds a "
        "call through torch.ops, eagercache's choice on, by turns in one process; the ratio's 99 % "
        "interval.",
        "",
        f"- {len(rows)} calls of {len({row['operator'] for row in rows})} operators, "
        f"{len(kernels)} answered by kernels.",
        f"- Default operators without a call: {', '.join(missing()) or 'none'}.",
        f"- Slower than native by more than 2 % beyond the interval: {len(slower)}, of which "
        f"{sum(row['answers'] == 'kernel' for row in slower)} are answered by kernels.",
        "",
        "| operator | sizes | answers | native us | with eagercache us | ratio | interval |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (row["operator"], row["sizes"])):
        mark = " (slower)" if is_slower(row) else ""
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(
            f"| {row['operator']} | {row['sizes']} | {row['answers']} | {row['native']:.2f} | "
            f"{row['with']:.2f} | {row['ratio']:.3f}{mark} | {interval} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    """Prints the table; writes it to --output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--operators", type=int, default=1_000)
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    chosen = [
        call
        for shape in SHAPES[: arguments.shapes]
        for call in list(calls(*shape))[: arguments.operators]
    ]
    arguments.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    frame.pin()
    names = sorted({f"aten::{name}" for name, _, _ in chosen})
    eagercache.enable(names, on_miss="background", cache_dir=arguments.cache / "store")
    wait_for(chosen)
    rows = run(chosen, arguments.cache / "rows.json", arguments.pairs)
    text = report(rows)
    frame.write(text, arguments.output)
    return 1 if missing() or any(map(is_slower, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
