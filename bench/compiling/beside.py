"""What compiling costs a program that uses several threads, while its kernels are compiled.

    python -m bench.compiling.beside [--seconds 40] [--threads 2] [--turns 2] [--until 300]

A loop of `torch.tanh` of 64x96 counts its calls in windows of two seconds: natively, then in a
process that enables the operator on an empty store, and so on by turns. The second one goes on for
--seconds and until the operator is decided, at most for --until seconds. The table has its windows
before the verdict as shares of the median window of the native turn before it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.shared import frame

WINDOW_S = 2.0
SHAPE = (64, 96)
CALLS = 20  # between looks at the clock


def windows(seconds: float, until: float, threads: int, enabled: bool) -> dict[str, Any]:
    """Calls a second of each window, and the seconds until the verdict."""
    import torch

    torch.set_num_threads(threads)
    argument = torch.randn(*SHAPE)
    one_round(lambda: torch.tanh(argument), 0.5)
    stats = None
    if enabled:
        import eagercache

        eagercache.enable(["tanh"])
        stats = eagercache.stats
    rates: list[float] = []
    decided: float | None = None
    begin = time.monotonic()
    while (now := time.monotonic() - begin) < seconds or (
        enabled and decided is None and now < until
    ):
        rates.append(one_round(lambda: torch.tanh(argument), WINDOW_S))
        if stats is not None and decided is None and not stats().outstanding:
            decided = time.monotonic() - begin
    one_round(lambda: torch.tanh(argument), WINDOW_S)  # the kernel's, if there is one
    hits = stats().hits if stats is not None else 0
    return {"rates": rates, "decided": decided, "kernel": hits > 0}


def one_round(call: Callable[[], Any], seconds: float) -> float:
    """Calls a second."""
    calls = 0
    begin = now = time.perf_counter()
    while now - begin < seconds:
        for _ in range(CALLS):
            call()
        calls += CALLS
        now = time.perf_counter()
    return calls / (now - begin)


def shares(rates: list[float], native: float) -> list[str]:
    """The cells of one row: median, worst, and each window, as shares of the native median."""
    if not rates:
        return ["", "", ""]
    of_native = [rate / native for rate in rates]
    each = " ".join(f"{share:.2f}" for share in of_native)
    return [f"{statistics.median(of_native):.2f}", f"{min(of_native):.2f}", each]


def main() -> int:
    """Starts a process for each turn, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--until", type=float, default=300.0, help="for the verdict")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--native", type=float, default=10.0, help="seconds of each native turn")
    parser.add_argument("--child", choices=("native", "enabled"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        enabled = options.child == "enabled"
        print(json.dumps(windows(options.seconds, options.until, options.threads, enabled)))
        return 0
    found: list[tuple[str, dict[str, Any]]] = []
    for _ in range(options.turns):
        for child, seconds in (("native", options.native), ("enabled", options.seconds)):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                flags = ["--child", child, "--threads", str(options.threads)]
                flags += ["--seconds", str(seconds), "--until", str(options.until)]
                turn = frame.in_process(__file__, *flags, EAGERCACHE_DIR=folder)
            found.append((child, turn))
    rows = []
    native = math.nan
    for child, turn in found:
        rates, decided = turn["rates"], turn["decided"]
        if child == "native":
            native = statistics.median(rates)
        before = len(rates)
        if decided is not None:
            before = min(before, int(decided / WINDOW_S))
        verdict = ""
        if child == "enabled":
            verdict = "none" if decided is None else f"{decided:.0f} s"
            verdict += ", kernel" if turn["kernel"] else ""
        rows.append([child, verdict, *shares(rates[:before], native)])
    print("\n".join(frame.markdown(("", "verdict after", "median", "worst", "windows"), rows)))
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    print(
        f"\nNative, last turn: {native:.0f} calls a second with {options.threads} threads. {where}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
