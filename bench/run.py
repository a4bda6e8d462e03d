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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frame

REPETITIONS = 9
ROUNDS = 20  # of a program with two phases
UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def run_binary(program: Path) -> Iterator[dict[str, Any]]:
    """Figures of a Google Benchmark binary: medians and quartiles over repetitions."""
    common = [
        f"--benchmark_repetitions={REPETITIONS}",
        "--benchmark_min_time=0.05",
        "--benchmark_enable_random_interleaving=true",
        "--benchmark_format=json",
    ]
    every = os.sched_getaffinity(0)
    times: dict[str, list[float]] = {}
    for cores, part in (({max(every)}, "-threads:"), (every, "threads:")):
        done = subprocess.run(
            [str(program), f"--benchmark_filter={part}", *common],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores),
        )
        if done.returncode != 0:
            raise SystemExit(f"{program.name} failed:\n{done.stderr}")
        if "Failed to match any benchmarks" in done.stderr:
            continue
        for row in json.loads(done.stdout)["benchmarks"]:
            if row["run_type"] == "iteration":
                times.setdefault(row["run_name"], []).append(
                    row["real_time"] * UNITS[row["time_unit"]]
                )
    for name, values in times.items():
        low, median, high = frame.quartiles(values)
        name = re.sub(r"/(manual_time|iterations:\d+)", "", name.removeprefix("BM_"))
        yield {"name": name, "ns": median, "low": low, "high": high,
               "ratio": None, "rounds": len(values), "calls": None}  # fmt: skip


def run_phases(program: Path) -> Iterator[dict[str, Any]]:
    """Figures of overhead_bench: its two phases by turns, each in processes of their own."""
    times: dict[str, list[float]] = {}
    core = {max(os.sched_getaffinity(0))}
    for _ in range(ROUNDS):
        for phase in ("stock", "hooked"):
            done = subprocess.run(
                [str(program), "--benchmark_min_time=0.01", "--benchmark_format=json"],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "EAGERCACHE_BENCH_PHASE": phase},
                preexec_fn=lambda: os.sched_setaffinity(0, core),
            )
            if done.returncode != 0:
                raise SystemExit(f"{program.name} failed:\n{done.stderr}")
            for row in json.loads(done.stdout)["benchmarks"]:
                form, _, call = row["name"].partition("/")
                times.setdefault(f"{call} {form}", []).append(
                    row["real_time"] * UNITS[row["time_unit"]]
                )
    for name in sorted(
        times, key=lambda name: (name.rpartition(" ")[0], not name.endswith(" stock"))
    ):
        low, median, high = frame.quartiles(times[name])
        stock = times[f"{name.rpartition(' ')[0]} stock"]
        ratio = (
            None
            if name.endswith(" stock")
            else frame.quartiles(
                [mine / base for mine, base in zip(times[name], stock, strict=True)]
            )[1]
        )
        yield {"name": name, "ns": median, "low": low, "high": high, "ratio": ratio,
               "rounds": ROUNDS, "calls": None}  # fmt: skip


def run_script(script: Path) -> dict[str, Any]:
    """The result of a Python benchmark."""
    done = subprocess.run(
        [sys.executable, str(script), "--json"], stdout=subprocess.PIPE, text=True, check=False
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
            phases = "overhead" in program.name
            run = run_phases if phases else run_binary
            figures = list(run(program.absolute()))
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
