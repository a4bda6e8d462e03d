"""What an artifact of a gigabyte costs: seconds until it is ready, and pages that processes share.

    python -m bench.modules.deploy [--gigabytes 1] [--processes 3] [--json]

A chain of linear layers without biases is exported once. Then processes open the artifact, each for
its first time: "ready" is load_module() from its call to its return, in a process that has
imported eagercache and done nothing else, with the file in the page cache (it was just written);
below it stands the processor's time of that, to which other programs do not add. "First answer" is
the first call, which meets every weight. Where they are copied, the weights are read into memory
and compared with their digests. Pages are those of /proc/PID/smaps while all processes hold the
file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.shared import frame

sys.path.append(str(frame.ROOT / "tests" / "python"))

from mapped_pages import pages_of

WIDTH = 2048

OPEN = """
import json, sys, time
import eagercache, torch
from eagercache import load_module
torch.set_num_threads(1)
path, key, mapped, width = sys.argv[1], sys.argv[2], sys.argv[3] == "1", int(sys.argv[4])
x = torch.zeros(1, width)
times, work = [], []
for _ in range(5):
    begin, own = time.perf_counter(), time.process_time()
    module = load_module(path, keys=[key], mmap=mapped)
    times.append((time.perf_counter() - begin) * 1e3)
    work.append((time.process_time() - own) * 1e3)
    if not mapped:
        break
begin = time.perf_counter()
module(x)
first = (time.perf_counter() - begin) * 1e3
begin = time.perf_counter()
module(x)
second = (time.perf_counter() - begin) * 1e3
found = dict(ready=times[0], work=work[0], again=min(times), first=first, second=second)
print(json.dumps(found), flush=True)
sys.stdin.readline()
"""


def export(folder: Path, gigabytes: float) -> Path:
    """The artifact; its keys are beside it."""
    import eagercache
    import torch
    from eagercache.ahead import bundle

    bundle.keygen(folder / "key")
    layers = max(1, round(gigabytes * 2**30 / (4 * WIDTH * WIDTH)))
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        *[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
    ).eval()
    path = folder / "artifact"
    eagercache.export_module(model, (torch.randn(1, WIDTH),), path=path, key=folder / "key.pem")
    return path


class Process:
    """One that has opened the artifact and holds it."""

    def __init__(self, path: Path, *, mapped: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OPEN, str(path), str(path.parent / "key.pub"),
             str(int(mapped)), str(WIDTH)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.times: dict[str, float] = json.loads(self._process.stdout.readline())

    def pages(self, path: Path) -> dict[str, float]:
        """MiB of its mappings of the file, by kind."""
        return {kind: kib / 1024 for kind, kib in pages_of(self._process.pid, path).items()}

    def close(self) -> None:
        """Lets it end."""
        self._process.communicate("\n", timeout=60)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times by way of opening, and pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = export(folder, options.gigabytes)
        size = path.stat().st_size
        processes: list[Process] = []
        try:
            processes.extend(Process(path, mapped=True) for _ in range(options.processes))
            pages = [process.pages(path) for process in processes]
        finally:
            for process in processes:
                process.close()
        copied = Process(path, mapped=False)
        copied.close()
    return {
        "bytes": size,
        "mapped": [process.times for process in processes],
        "copied": copied.times,
        "pages": pages,
    }


def show(found: dict[str, Any]) -> None:
    """The table."""
    mapped = found["mapped"]
    print(f"artifact: {found['bytes'] / 2**30:.2f} GiB, {len(mapped)} processes")
    print(f"{'':24}{'median':>10}{'least':>10}{'most':>10}")
    for name, text in (
        ("ready", "ready, ms"),
        ("work", "  of the processor, ms"),
        ("again", "ready, opened again, ms"),
        ("first", "first answer, ms"),
        ("second", "second answer, ms"),
    ):
        values = [row[name] for row in mapped]
        print(f"{text:24}{statistics.median(values):10.1f}{min(values):10.1f}{max(values):10.1f}")
    print(f"{'copied: ready, ms':24}{found['copied']['ready']:10.1f}")
    for number, row in enumerate(found["pages"]):
        shared = row["Shared_Clean"] + row["Shared_Dirty"]
        private = row["Private_Clean"] + row["Private_Dirty"]
        print(
            f"process {number}: {row['Rss']:.0f} MiB of the file in memory, {shared:.0f} shared, "
            f"{private:.0f} its own; proportional share {row['Pss']:.0f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    os.environ.pop("EAGERCACHE_DIR", None)
    result = {**measure(chosen), "machine": frame.machine()}
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
        print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
