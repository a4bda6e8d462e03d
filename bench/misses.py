"""What a miss costs its caller while the compiler is blocked.

    .venv/bin/python bench/misses.py [--keys 3000]

A process of its own enables one operator in the background mode with a compiler that only sleeps,
and calls it with sizes that are all new, by turns with a call of the same sizes that is answered
natively. Also in it: the calls of keys that wait for their kernel.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

COMPILER = """\
#!/bin/sh
if [ "$1" = "-v" ] || [ "$1" = "--version" ]; then exec /usr/bin/g++ "$@"; fi
exec sleep 600
"""


def quantile(values: list[int], share: float) -> float:
    """The value below which ``share`` of the values lie, in microseconds."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] / 1000


def measure(keys: int) -> int:
    """Prints the figures; 0 when the 99th percentile is within native's + 100 us."""
    import eagercache
    import torch

    torch.set_num_threads(1)
    tensors = [torch.randn(2 + number % 50, 2 + number // 50) for number in range(keys)]
    operator = torch.ops.aten.neg.default
    eagercache.enable(["neg"])
    native: list[int] = []
    miss: list[int] = []
    pending: list[int] = []
    for tensor in tensors:
        eagercache.disable()
        operator(tensor)
        begin = time.perf_counter_ns()
        operator(tensor)
        native.append(time.perf_counter_ns() - begin)
        eagercache.enable(["neg"])
        for times in (miss, pending, pending):
            begin = time.perf_counter_ns()
            operator(tensor)
            times.append(time.perf_counter_ns() - begin)
    stats = eagercache.stats()
    print(f"{keys} keys, {stats.misses} misses, {stats.hits} hits, {stats.compiles} compiles\n")
    print("| us a call | median | 99 % | 99.9 % | largest |\n| --- | --- | --- | --- | --- |")
    for name, times in (("native", native), ("miss", miss), ("pending", pending)):
        figures = [quantile(times, 0.99), quantile(times, 0.999), max(times) / 1000]
        text = " | ".join(f"{figure:.1f}" for figure in figures)
        print(f"| {name} | {statistics.median(times) / 1000:.2f} | {text} |")
    good = quantile(miss, 0.99) <= quantile(native, 0.99) + 100
    print(f"\n99 % of misses within native's + 100 us: {'yes' if good else 'no'}", flush=True)
    os._exit(0 if good else 1)


def main() -> int:
    """Starts over with a store and a compiler of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--keys", type=int, default=3000)
    arguments = parser.parse_args()
    if os.environ.get("EAGERCACHE_CXX"):
        return measure(arguments.keys)
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "g++"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        environment = {**os.environ, "EAGERCACHE_DIR": folder, "EAGERCACHE_CXX": str(compiler)}
        return os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.argv], environment)


if __name__ == "__main__":
    sys.exit(main())
