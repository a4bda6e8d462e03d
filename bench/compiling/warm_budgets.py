"""Whether `eagercache warm` keeps the budget that it is given, with kernels really made.

    python -m bench.compiling.warm_budgets TRACE... [--scale 64] [--seconds 60] [--bytes 500kB]

TRACES are operator logs or files of `eagercache record`; the batch dimension of logs is divided by
--scale. The command runs once for each budget, on the CPU and into an empty store: seconds are from
its start to its end, bytes are those of the kernels and manifests on disk. A budget is kept where
no more than 1.1 times as much was used and, as long as calls were left, no less than 0.9 times. The
exit status is 1 where one is not kept or made no kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagercache.ahead.budget import Budget
from eagercache.ahead.errors import WarmError
from eagercache.base import config

from bench.shared import frame

MISS = 0.1


@dataclass(frozen=True)
class Warmed:
    """What one run used of its budget, in the budget's unit, and what came of the keys."""

    budget: str
    allowed: float
    used: float
    kernels: int
    native: int
    left: int
    keys: int
    workers: int

    @property
    def kept(self) -> bool:
        """Whether it used what it was given, and made kernels with it."""
        share = self.used / self.allowed
        return bool(self.kernels) and share <= 1 + MISS and (share >= 1 - MISS or not self.left)


def stored_bytes(store: Path) -> int:
    """Bytes of the store's kernels and manifests."""
    folders = [store / "v1" / "o", *(store / "v1").glob("*/m")]
    return sum(
        path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()
    )


def run(budget: str, options: argparse.Namespace) -> Warmed:
    """`eagercache warm` of an empty store. Ends the program where the command fails."""
    limit = Budget.parse(budget)
    with tempfile.TemporaryDirectory() as store:
        words = ["--device", "cpu", "--json", "--dir", store, "--budget", budget]
        words += ["--scale", str(options.scale), *map(str, options.traces)]
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "eagercache", "warm", *words],
            env={k: v for k, v in os.environ.items() if not k.startswith("EAGERCACHE_")},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - begin
        if done.returncode != 0:
            raise SystemExit(f"eagercache warm: exit {done.returncode}\n{done.stderr[-2000:]}")
        used = seconds if limit.bytes is None else stored_bytes(Path(store))
    report: dict[str, Any] = json.loads(done.stdout)
    states = [(entry["state"], entry["verdict"]) for entry in report["entries"]]
    return Warmed(
        budget,
        float(limit.seconds or limit.bytes or 0),
        used,
        states.count(("compiled", "kernel")),
        states.count(("compiled", "native")),
        sum(state == "left" for state, _ in states),
        len(states),
        report["workers"],
    )


def table(results: list[Warmed]) -> list[str]:
    """The lines of a table of all runs."""
    columns = ["budget", "used", "of it", "kernels", "native keeps", "not reached", "keys", ""]
    rows = [
        [
            one.budget,
            f"{one.used:.1f} s" if one.budget[-1] not in "bB" else f"{one.used:,.0f} bytes",
            f"{one.used / one.allowed:.1%}",
            *map(str, (one.kernels, one.native, one.left, one.keys)),
            "kept" if one.kept else "MISSED",
        ]
        for one in results
    ]
    return frame.markdown(columns, rows)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--scale", type=int, default=64, help="divides the batch of logs")
    parser.add_argument("--seconds", default="60", help="a budget of time; 0: none")
    parser.add_argument("--bytes", default="500kB", help="a budget of bytes; 0: none")
    parser.add_argument("--output", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    budgets = [f"{options.seconds}s"] * (options.seconds != "0")
    budgets += [options.bytes] * (options.bytes != "0")
    try:
        for budget in budgets:
            Budget.parse(budget)
    except (WarmError, config.BadValue) as error:
        parser.error(str(error))
    results = [run(budget, options) for budget in budgets]
    where = ", ".join(f"{name} {value}" for name, value in frame.machine().items())
    names = ", ".join(path.stem for path in options.traces)
    heading = f"{names}, batch divided by {options.scale}, {results[0].workers} workers; {where}."
    frame.write("\n".join([heading, "", *table(results)]), options.output)
    return int(not all(result.kept for result in results))


if __name__ == "__main__":
    sys.exit(main())
