"""What a warm-up on workers of Dask costs beside one worker: CPU seconds for each compile.

    python -m bench.compiling.cluster [--keys 64] [--workers 1,8]

Each run has a cluster of its own on this machine, with stores of its own. Counted are the CPU
seconds of the cluster and all that it started, by the kernel, once they have ended; and those that
compile workers said a key took, which leave out starting them. By CPU seconds a machine with fewer
cores than workers tells the same as a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.shared import frame

PROGRAM = """
import sys, torch
f = torch.nn.functional
calls = [lambda x: torch.var(x, -1), lambda x: torch.softmax(x, -1), f.silu, f.gelu,
         lambda x: torch.sum(x, -1), lambda x: torch.amax(x, -1), torch.sigmoid, torch.tanh]
for number in range(int(sys.argv[1])):
    x = torch.randn(32 + number // len(calls), 96)
    for _ in range(5):
        calls[number % len(calls)](x)
"""
CLUSTER = """
import resource, sys, distributed
if __name__ == "__main__":
    with distributed.LocalCluster(
        n_workers=int(sys.argv[1]), threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        print(cluster.scheduler_address.removeprefix("tcp://"), flush=True)
        sys.stdin.read()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(used.ru_utime + used.ru_stime, flush=True)
"""


def _environment(store: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("EAGERCACHE_")}
    return kept | {"EAGERCACHE_DIR": str(store), "EAGERCACHE_LINGER": "0"}


def _eagercache(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "eagercache", *arguments]
    done = subprocess.run(
        command, env=_environment(folder / "here"), cwd=folder, stdout=subprocess.PIPE, check=False
    )
    return done.stdout.decode()


def warm(folder: Path, trace: Path, workers: int) -> dict[str, Any]:
    """One warm-up on so many workers: what it took."""
    for name in ("here", "there"):
        (folder / name).mkdir(mode=0o700, parents=True)
    script = folder / "cluster.py"
    script.write_text(CLUSTER)
    cluster = subprocess.Popen(
        [sys.executable, str(script), str(workers)],
        env=_environment(folder / "there"),
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdin is not None and cluster.stdout is not None
    url = f"dask://{cluster.stdout.readline().strip()}"
    begin = time.monotonic()
    words = ("warm", str(trace), "--choose", "always", "--device", "cpu", "--on", url, "--json")
    report = json.loads(_eagercache(folder, *words))
    seconds = time.monotonic() - begin
    cluster.stdin.close()
    used = float(cluster.stdout.readline())
    cluster.wait()
    rows = [entry for entry in report["entries"] if entry["state"] == "compiled"]
    return {
        "workers": workers,
        "compiled": len(rows),
        "failed": sum(entry["state"] == "failed" for entry in report["entries"]),
        "wall": seconds,
        "cpu": used,
        "said": sum(entry["cpu_seconds"] for entry in rows),
        "batches": sum(report["machines"].values()),
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--workers", default="1,8")
    options = parser.parse_args()
    print(frame.machine())
    print("| workers | compiled | batches | wall s | CPU s | CPU s a key | without starting |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="eagercache-cluster-") as name:
        folder = Path(name)
        (folder / "here").mkdir(mode=0o700)
        (folder / "program.py").write_text(PROGRAM)
        _eagercache(folder, "record", "keys.trace", "--", "program.py", str(options.keys))
        for workers in map(int, options.workers.split(",")):
            row = warm(folder / str(workers), folder / "keys.trace", workers)
            made = max(1, row["compiled"])
            print(
                f"| {workers} | {row['compiled']} ({row['failed']} failed) | {row['batches']} | "
                f"{row['wall']:.0f} | {row['cpu']:.0f} | {row['cpu'] / made:.2f} | "
                f"{row['said'] / made:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
