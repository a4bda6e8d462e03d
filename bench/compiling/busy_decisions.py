"""What is decided about an operator while the program that calls it keeps all cores busy.

    python -m bench.compiling.busy_decisions [--stores 9] [--threads 2] [--until 120]

A loop of `torch.tanh` of 64x96 runs beside an empty store until the operator is decided, in a
process of its own for each store. The table has what the store then says: the verdict, why, and
the times that it was taken from, which are microseconds: milliseconds are the scheduler's.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from typing import Any

from bench.shared import frame

SHAPE = (64, 96)
ROUND_S = 0.25


def decided(threads: int, until: float) -> dict[str, Any]:
    """Runs the loop; what the store says of the operator at the end."""
    import eagercache
    import torch
    from eagercache.runtime.session import session

    torch.set_num_threads(threads)
    argument = torch.randn(*SHAPE)
    torch.tanh(argument)
    eagercache.enable(["tanh"])
    begin = time.monotonic()
    calls = 0
    while (seconds := time.monotonic() - begin) < until and (
        not calls or eagercache.stats().outstanding
    ):
        end = time.perf_counter() + ROUND_S
        while time.perf_counter() < end:
            torch.tanh(argument)
            calls += 1
    rows = [
        {"kind": entry["kind"], **entry["facts"]}
        for entry in session.store.entries()
        if entry["facts"].get("op") == "aten::tanh"
    ]
    return {"seconds": seconds, "calls": calls, "rows": rows}


def cells(turn: dict[str, Any]) -> list[str]:
    """One row of the table."""
    if not turn["rows"]:
        return ["not yet", "", "", "", "", f"{turn['seconds']:.0f}"]
    facts = turn["rows"][0]
    times = [f"{float(facts.get(name, 'nan')) / 1e3:,.1f}" for name in ("native_ns", "kernel_ns")]
    counts = [facts.get("spread", ""), facts.get("pairs", "")]
    verdict = f"{facts['kind']} {facts.get('reason', '')[:60]}".strip()
    return [verdict, *times, *counts, f"{turn['seconds']:.0f}"]


def main() -> int:
    """Starts a process for each store, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--stores", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--until", type=float, default=120.0, help="seconds for the verdict")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(decided(options.threads, options.until)))
        return 0
    rows = []
    for _ in range(options.stores):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            flags = ["--child", "--threads", str(options.threads), "--until", str(options.until)]
            rows.append(cells(frame.in_process(__file__, *flags, EAGERCACHE_DIR=folder)))
        print(rows[-1], file=sys.stderr, flush=True)
    head = ("verdict", "native, us", "kernel, us", "kernel / native", "pairs", "seconds")
    print("\n".join(frame.markdown(head, rows)))
    print()
    for verdict, count in collections.Counter(row[0] for row in rows).most_common():
        print(f"{count} of {len(rows)}: {verdict}")
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    print(f"\n{options.threads} threads, load average {os.getloadavg()[0]:.1f}. {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
