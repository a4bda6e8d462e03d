"""Runs benchmark programs, prints one table, and keeps everything as JSON: `make bench`.

Programs are Google Benchmark binaries, or Python scripts that use `frame`. All run on one pinned
core; the binaries' benchmarks that use several threads run on all of them, after the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.shared import frame

REPETITIONS = 9
UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def _benchmarks(program: Path, cores: set[int], *options: str) -> list[Any]:
    """The rows that a Google Benchmark binary prints, run on `cores`; none matched: no row."""
    done = frame.run_binary(program, cores, *options)
    if "Failed to match any benchmarks" in done.stderr:
        return []
    rows: list[Any] = json.loads(done.stdout)["benchmarks"]
    for row in rows:
        row["ns"] = row["real_time"] * UNITS[row["time_unit"]]
    return rows


def _figure(name: str, times: Sequence[float]) -> dict[str, Any]:
    low, median, high = frame.quartiles(times)
    return {"name": name, "ns": median, "low": low, "high": high,
            "ratio": None, "rounds": len(times), "calls": None}  # fmt: skip


def run_binary(program: Path) -> Iterator[dict[str, Any]]:
    """Figures of a Google Benchmark binary: medians and quartiles over repetitions."""
    common = (
        f"--benchmark_repetitions={REPETITIONS}",
        "--benchmark_min_time=0.05",
        "--benchmark_enable_random_interleaving=true",
    )
    every = os.sched_getaffinity(0)
    times: dict[str, list[float]] = {}
    for cores, part in (({max(every)}, "-threads:"), (every, "threads:")):
        for row in _benchmarks(program, cores, f"--benchmark_filter={part}", *common):
            if row["run_type"] == "iteration":
                times.setdefault(row["run_name"], []).append(row["ns"])
    for name in sorted(times, key=_by_numbers):  # they come in no order, being interleaved
        yield _figure(_plain_name(name), times[name])


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """What sorts names so that FindHit/2 comes before FindHit/16."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _plain_name(name: str) -> str:
    return re.sub(r"/(manual_time|iterations:\d+)", "", name.removeprefix("BM_"))


def run_script(script: Path) -> dict[str, Any]:
    """The result of a Python benchmark."""
    done = subprocess.run(
        [*frame.command(script), "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{script.name} failed")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Runs benchmarks and prints one table.")
    parser.add_argument("programs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--json", action="store_true", help="print JSON, not the table")
    options = parser.parse_args()
    results = []
    for program in options.programs:
        if options.only not in program.name:
            continue
        print(f"  {program.name} ...", file=sys.stderr, flush=True)
        if program.suffix == ".py":
            results.append(run_script(program))
        else:
            figures = list(run_binary(program.absolute()))
            title = program.name.removeprefix("eagercache_").replace("_", " ") + ", from C++"
            results.append({"title": title, "machine": frame.machine(), "figures": figures})
    text = json.dumps(results, indent=2)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
    else:
        frame.print_tables(results)


if __name__ == "__main__":
    main()
