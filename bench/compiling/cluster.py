"""What a warm-up on workers of Dask or Ray costs beside one worker: CPU seconds for each compile.

    python -m bench.compiling.cluster [--engines dask,ray] [--workers 1,8] [--keys 64]
    python -m bench.compiling.cluster --scale 64 TRACE...

Each run has a cluster of its own on this machine, with stores of its own. Counted are the CPU
seconds of the cluster and all that it started, in a control group of the kernel's, which takes
root; and those that compile workers said a key took, which leave out starting them. By CPU seconds
a machine with fewer cores than workers tells the same as a cluster. Without TRACEs, which may be
operator logs whose batch is divided by --scale, a program with so many keys is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
DASK = """
import sys, distributed
if __name__ == "__main__":
    with distributed.LocalCluster(
        n_workers=int(sys.argv[1]), threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        print(cluster.scheduler_address.removeprefix("tcp://"), flush=True)
        sys.stdin.read()
"""


class CountedGroup:
    """A control group: all processes that are started in it, and what they used."""

    def __init__(self) -> None:
        legacy = Path("/sys/fs/cgroup/cpuacct")
        self._folder = (legacy if legacy.is_dir() else legacy.parent) / f"cluster{os.getpid()}"
        self._folder.mkdir()

    def enter(self) -> None:
        """Puts the calling process into it; called in a child before its program begins."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def seconds(self) -> float:
        """CPU seconds of all that was ever in it."""
        if (usage := self._folder / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e9
        rows = dict(line.split() for line in (self._folder / "cpu.stat").read_text().splitlines())
        return int(rows["usage_usec"]) / 1e6

    def end(self) -> None:
        """Ends what is left in it, and removes it."""
        for _ in range(200):
            left = [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._folder.rmdir()


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def dask_cluster(folder: Path, workers: int, group: CountedGroup) -> Iterator[str]:
    """The URL of a cluster of Dask's."""
    script = folder / "cluster.py"
    script.write_text(DASK)
    process = subprocess.Popen(
        [sys.executable, str(script), str(workers)],
        env=_environment(folder / "there"),
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=group.enter,
    )
    assert process.stdin is not None and process.stdout is not None
    yield f"dask://{process.stdout.readline().strip()}"
    process.stdin.close()
    process.wait()


@contextlib.contextmanager
def ray_cluster(folder: Path, workers: int, group: CountedGroup) -> Iterator[str]:
    """The URL of a cluster of Ray's, without the dashboard."""
    client = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--num-cpus={workers}", "--disable-usage-stats", "--include-dashboard=false"]
    command += ["--node-ip-address=127.0.0.1", f"--port={free_port()}"]
    command += [f"--ray-client-server-port={client}", "--object-store-memory=100000000"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        process = subprocess.Popen(
            [*command, f"--temp-dir={short}"],  # paths of sockets are short
            env=_environment(folder / "there"),
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=group.enter,
        )
        try:
            wait_for(client)
            yield f"ray://127.0.0.1:{client}"
        finally:
            process.kill()
            process.wait()


ENGINES = {"dask": dask_cluster, "ray": ray_cluster}


def wait_for(port: int) -> None:
    """Until something listens there."""
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise RuntimeError(f"nothing listens at port {port}")


def _environment(store: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("EAGERCACHE_")}
    return kept | {"EAGERCACHE_DIR": str(store), "EAGERCACHE_LINGER": "0"}


def eagercache(folder: Path, *arguments: str) -> str:
    """What a command prints, with the store "here" in the folder."""
    command = [sys.executable, "-m", "eagercache", *arguments]
    done = subprocess.run(
        command, env=_environment(folder / "here"), cwd=folder, stdout=subprocess.PIPE, check=False
    )
    return done.stdout.decode()


def warm(folder: Path, traces: list[str], engine: str, workers: int, scale: int) -> dict[str, Any]:
    """One warm-up on so many workers: what it took."""
    for name in ("here", "there"):
        (folder / name).mkdir(mode=0o700, parents=True)
    group = CountedGroup()
    words = ["warm", *traces, "--choose", "always", "--device", "cpu", "--scale", str(scale)]
    try:
        with ENGINES[engine](folder, workers, group) as url:
            begin = time.monotonic()
            for _ in range(3):  # Ray's port answers before its server does
                report = json.loads(eagercache(folder, *words, "--on", url, "--json"))
                if "entries" in report:
                    break
            seconds = time.monotonic() - begin
        used = group.seconds()
    finally:
        group.end()
    rows = [entry for entry in report["entries"] if entry["state"] == "compiled"]
    shutil.rmtree(folder)
    return {
        "keys": len(report["entries"]),
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
    parser.add_argument("--engines", default="dask")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("traces", nargs="*", type=Path)
    options = parser.parse_args()
    print(frame.machine())
    print("| engine | workers | compiled | batches | wall s | CPU s | CPU s a key | said |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="eagercache-cluster-") as name:
        folder = Path(name)
        traces = [str(path.resolve()) for path in options.traces]
        if not traces:
            (folder / "here").mkdir(mode=0o700)
            (folder / "program.py").write_text(PROGRAM)
            eagercache(folder, "record", "keys.trace", "--", "program.py", str(options.keys))
            traces = [str(folder / "keys.trace")]
        for engine in options.engines.split(","):
            for workers in map(int, options.workers.split(",")):
                row = warm(folder / f"{engine}{workers}", traces, engine, workers, options.scale)
                made = max(1, row["compiled"])
                print(
                    f"| {engine} | {workers} | {row['compiled']} of {row['keys']} "
                    f"({row['failed']} failed) | {row['batches']} | {row['wall']:.0f} | "
                    f"{row['cpu']:.0f} | {row['cpu'] / made:.3f} | {row['said'] / made:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
