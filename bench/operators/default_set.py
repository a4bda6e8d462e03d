"""The default operators on CPU: what a caller sees with eagercache and without, call by call.

    python -m bench.operators.default_set --cache build/default-set [--seconds 1500] [--shapes 3]
        [--operators 200] [--pairs 41] [--output x.md]

The calls are those of default_calls.py, of every operator that is hooked by default. First all of
them get their verdicts, as in a user's process, with one thread a call; then each is timed in one
process on one core, in turns of a few hundred microseconds with eagercache answering and without,
through `torch.ops`. A call that seems slower is timed again at the end, with more turns, and that
is its row. Verdicts and rows are kept in --cache, rows for the commit that they were measured at: a
run that was stopped goes on where it was.

It ends after --seconds, with the table of what there is. On two quiet cores three sizes take about
15 minutes over an empty cache, most of it for verdicts, and 2 minutes over one that has them. The
exit status is 0 when no call is slower than native by more than 2 % beyond the interval of the
ratio's median (99 %) and every default operator has a call, 1 when not, and 2 when time ran out:
the same command goes on.
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
import torch
from eagercache.base.load import core
from eagercache.worker.timing.timing import median_interval

from bench.operators.default_calls import SHAPES, Call, calls, missing
from bench.shared import frame

ALLOWED = 1.02
TURN_NS = 300_000.0
MOST_CALLS = 500
# Before a call is measured: as many as get it a kernel of its own where that of its class lost.
SETTLED_CALLS = 40
# A call that seems slower is measured again with so many times the pairs.
SECOND_LOOK = 4

FINISHED, SLOWER, UNFINISHED = 0, 1, 2


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
    turn(function, 1, answering=True)  # it is on for what comes next
    ratios = [mine / native for mine, native in zip(sides[True], sides[False], strict=True)]
    low, high = median_interval(ratios)
    return {
        "native": statistics.median(sides[False]) / 1000,
        "with": statistics.median(sides[True]) / 1000,
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
    }


def decision(function: Callable[[], Any], name: str) -> tuple[str, str]:
    """Which side answers the call now ("kernel" or "native"), and why it is native."""
    before = eagercache.stats().operators.get(name)
    function()
    after = eagercache.stats().operators.get(name)
    if before is None or after is None:
        return "native", "not hooked"
    if after.hits > before.hits:
        return "kernel", ""
    return "native", eagercache.explain(function).reason


class Rows:
    """What was measured, by call; kept in a file, which is of one commit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._commit = frame.commit()
        self.by_key: dict[str, dict[str, Any]] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            if kept.get("commit") == self._commit:
                self.by_key = kept["rows"]

    def put(self, key: str, row: dict[str, Any]) -> None:
        """Keeps a row."""
        self.by_key[key] = row
        self._path.write_text(json.dumps({"commit": self._commit, "rows": self.by_key}))


def ask_for_verdicts(chosen: list[Call], end: float) -> bool:
    """Makes every call until it is queued; False when not all have a verdict by then."""
    for _, _, function in chosen:
        function()
        function()
    return eagercache.wait(max(0.0, end - time.monotonic()))


def measure_all(chosen: list[Call], rows: Rows, pairs: int, end: float) -> bool:
    """Measures the calls that have no row; False when time ran out."""
    keys = [f"{number} {name} {sizes}" for number, (name, sizes, _) in enumerate(chosen)]
    for key, (name, sizes, function) in zip(keys, chosen, strict=True):
        if key in rows.by_key:
            continue
        for _ in range(SETTLED_CALLS):
            function()
        if not eagercache.wait(max(0.0, end - time.monotonic())) or time.monotonic() > end:
            return False
        function()
        answers, reason = decision(function, f"aten::{name}")
        row = {"operator": name, "sizes": sizes, "answers": answers, "reason": reason}
        rows.put(key, {**row, **measure(function, pairs)})
    for key, (_, _, function) in zip(keys, chosen, strict=True):
        row = rows.by_key[key]
        if is_slower(row) and not row.get("again"):
            if time.monotonic() > end:
                return False
            function()
            rows.put(key, {**row, **measure(function, SECOND_LOOK * pairs), "again": True})
    return True


def is_slower(row: dict[str, Any]) -> bool:
    """Whether the call is slower than native by more than is allowed, for certain."""
    return bool(row["low"] > ALLOWED)


def report(rows: list[dict[str, Any]], asked: int) -> str:
    """The table as Markdown; ``asked`` is the number of calls that it is to have."""
    where = frame.machine()
    slower = [row for row in rows if is_slower(row)]
    kernels = [row for row in rows if row["answers"] == "kernel"]
    won = sorted(row["ratio"] for row in kernels)
    lines = [
        f"# The default operators on CPU, {where['date']}",
        "",
        f"{where['processor']}, {where['cores']} cores, load {where['load']}; torch "
        f"{where['torch']}, Python {where['python']}; commit {where['commit']}. Microseconds a "
        "call through torch.ops, eagercache's choice on, by turns in one process on one core, one "
        "thread a call; the ratio's 99 % interval.",
        "",
        f"- {len(rows)} of {asked} calls, of {len({row['operator'] for row in rows})} operators; "
        f"{len(kernels)} answered by kernels"
        + (f", in {statistics.median(won):.2f} of native's time (median)." if won else "."),
        f"- Default operators without a call: {', '.join(missing()) or 'none'}.",
        f"- Slower than native by more than 2 % beyond the interval: {len(slower)}, of which "
        f"{sum(row['answers'] == 'kernel' for row in slower)} are answered by kernels.",
        "",
        "| operator | sizes | answers | native us | with eagercache us | ratio | interval |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (row["operator"], row["sizes"])):
        mark = " (slower)" if is_slower(row) else ""
        answers = f"{row['answers']}: {row['reason'][:80]}" if row["reason"] else row["answers"]
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(
            f"| {row['operator']} | {row['sizes']} | {answers} | {row['native']:.2f} | "
            f"{row['with']:.2f} | {row['ratio']:.3f}{mark} | {interval} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    """Prints the table; writes it to --output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1_500.0)
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--operators", type=int, default=1_000)
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    chosen = [
        call
        for shape in SHAPES[: arguments.shapes]
        for call in list(calls(*shape))[: arguments.operators]
    ]
    arguments.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The calls' threads are part of what is compiled; the core is bound only for the measurement,
    # since the compile worker would be bound with us.
    torch.set_num_threads(1)
    names = sorted({f"aten::{name}" for name, _, _ in chosen})
    eagercache.enable(names, on_miss="background", cache_dir=arguments.cache / "store")
    finished = ask_for_verdicts(chosen, end)
    rows = Rows(arguments.cache / "rows.json")
    if finished:
        frame.pin()
        finished = measure_all(chosen, rows, arguments.pairs, end)
    frame.write(report(list(rows.by_key.values()), len(chosen)), arguments.output)
    if not finished:
        print("Time ran out; the same command goes on.", file=sys.stderr)
        return UNFINISHED
    return SLOWER if missing() or any(map(is_slower, rows.by_key.values())) else FINISHED


if __name__ == "__main__":
    sys.exit(main())
