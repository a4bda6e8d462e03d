"""A whole model's kernels ahead of time: recorded, warmed into an empty store, run from it.

    python -m bench.compiling.warm_up [--model resnet50] [--workers N]

Seconds of `eagercache warm --device cuda` for what one training step asks for, with the CPU time a
kernel; then a fresh process over that store: steps until it is at its pace, compiles and misses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.modules import models
from bench.shared import frame


def run_steps(name: str, record: Path | None) -> dict[str, Any]:
    """In a process of its own: a few steps recorded, or eighty over a warm store."""
    import eagercache

    model, step_of = models.make(name)
    step = step_of(model)
    if record is not None:
        with eagercache.record(record):
            for _ in range(5):
                step()
        return {}
    eagercache.enable()
    times = [models.block_ms(step, 1) for _ in range(80)]
    pace = statistics.median(times[50:])
    settled = next(i for i in range(80) if statistics.median(times[i : i + 5]) <= 1.05 * pace)
    stats = eagercache.stats()
    return {
        "pace_ms": pace,
        "settled_after": settled,
        "compiles": stats.compiles,
        "outstanding": stats.outstanding,
        "hits": stats.hits,
        "misses": stats.misses,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--child", choices=["record", "run"], help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_steps(options.model, options.trace)), flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        store, trace = Path(folder) / "store", Path(folder) / "trace"
        store.mkdir(mode=0o700)
        environment = {**os.environ, "EAGERCACHE_LINGER": "0", "EAGERCACHE_DIR": str(store)}
        own = [*frame.command(__file__), "--model", options.model]
        subprocess.run(
            [*own, "--child", "record", "--trace", str(trace)], env=environment, check=True
        )
        command = [sys.executable, "-m", "eagercache", "warm", "--device", "cuda", "--json"]
        command += ["--workers", str(options.workers)] * (options.workers > 0)
        begin = time.monotonic()
        warmed = subprocess.run(
            [*command, str(trace)], env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        seconds = time.monotonic() - begin
        report = json.loads(warmed.stdout)
        entries = [entry for entry in report["entries"] if entry["state"] == "compiled"]
        cpu = sum(entry["cpu_seconds"] for entry in entries)
        verdicts: dict[str, int] = {}
        for entry in report["entries"]:
            name = entry["verdict"] or entry["state"]
            verdicts[name] = verdicts.get(name, 0) + 1
        print(
            f"{options.model}: warmed in {seconds:.1f} s (exit {warmed.returncode}), "
            f"{report['workers']} workers, {verdicts}; {cpu / max(1, len(entries)):.2f} CPU s and "
            f"{seconds / max(1, len(entries)):.2f} s a key"
        )
        ran = subprocess.run(
            [*own, "--child", "run"], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        print("a fresh process:", ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
