"""Host cost of a call on 8 floats on a GPU, from C++: PyTorch's own, decided for native, a hit.

    python bench/cuda_overhead.py PATH/eagercache_overhead_bench [--rounds 7] [--json FILE]

Compiles the kernels into a store of its own, hands them to the binary as files, and runs its two
phases (nothing hooked; hooked) by turns, on one core. Nothing waits for the device within the
blocks of calls that are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def write_kernels(folder: Path, store: Path) -> None:
    """<operator>.plan and <operator>.cubin of each kernel on 8 floats."""
    import eagercache
    import torch
    from eagercache.session import session

    eagercache.enable(devices=["cuda"], on_miss="wait", choose="always", cache_dir=store)
    with torch.inference_mode():
        x, y = torch.randn(8, device="cuda"), torch.randn(8, device="cuda")
        for _ in range(2):
            torch.abs(x)
            torch.add(x, y)
            x.add_(y)
    for entry in session.store.entries():
        facts = entry["facts"]
        name = facts["op"].removeprefix("aten::").partition(".")[0]
        if entry["kind"] != "kernel" or name not in ("abs", "add", "add_"):
            continue
        (part,) = entry["objects"]
        (path,) = store.glob(f"v1/o/**/{part['digest']}*")
        (folder / f"{name}.cubin").write_bytes(path.read_bytes())
        (folder / f"{name}.plan").write_text(facts["launch_plan"])


def run(binary: Path, phase: str, kernels: Path) -> dict[str, float]:
    """Nanoseconds by "FORM/OPERATOR/..."."""
    import torch

    libraries = Path(torch.__file__).parent / "lib"
    environment = {
        **os.environ,
        "EAGERCACHE_BENCH_PHASE": phase,
        "EAGERCACHE_BENCH_KERNELS": str(kernels),
        "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    core = {max(os.sched_getaffinity(0))}
    done = subprocess.run(
        [str(binary), "--benchmark_format=json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    )
    if done.returncode != 0:
        raise SystemExit(f"{binary.name} failed:\n{done.stderr}")
    rows = json.loads(done.stdout)["benchmarks"]
    for row in rows:
        if row.get("error_occurred"):
            raise SystemExit(f"{row['name']}: {row['error_message']}")
    return {row["name"].partition("/iterations")[0]: row["real_time"] for row in rows}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store, kernels = Path(folder) / "store", Path(folder) / "kernels"
        store.mkdir(mode=0o700)
        kernels.mkdir()
        write_kernels(kernels, store)
        for _ in range(options.rounds):
            for phase in ("stock", "hooked"):
                for name, ns in run(options.binary.absolute(), phase, kernels).items():
                    times.setdefault(name, []).append(ns)
    result: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    if options.json:
        options.json.write_text(json.dumps(times, indent=1))
    print(f"{'call':24} {'stock ns':>9} {'hit':>16} {'decided native':>18}")
    for name, stock in result.items():
        form, _, call = name.partition("/")
        if form != "stock":
            continue
        hit, native = result[f"hit/{call}"], result[f"native/{call}"]
        print(f"{call:24} {stock:9.0f} {hit:8.0f} x{hit / stock:.2f}   {native - stock:+10.0f} ns")


if __name__ == "__main__":
    main()
