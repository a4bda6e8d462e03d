"""Host cost of a call on 8 floats on a GPU, from C++: PyTorch's own, left to it, hits.

    python -m bench.overhead.cuda_overhead PATH/eagercache_overhead_side [--rounds 7] [--json FILE]

Compiles the kernels into a store of its own, hands them to the binary as files, and runs its two
phases (nothing hooked; hooked) by turns, on one core, and then its phase "pairs", which tells what
a hook costs a call that is decided for native. Nothing waits for the device within the blocks of
calls that are timed.
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

from bench.shared import frame

# Found first by Python, it makes every kernel for a GPU a container.
_ONLY_CONTAINERS = frame.ROOT / "tests" / "gpu" / "only_containers"


def write_containers(folder: Path, around: Path) -> None:
    """<operator>.so of each kernel on 8 floats, made by a process of its own."""
    store = around / "containers"
    store.mkdir(mode=0o700)
    path = os.pathsep.join([str(_ONLY_CONTAINERS), os.environ.get("PYTHONPATH", "")])
    command = [*frame.command(__file__), "--fill", str(folder), str(store)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)


def write_kernels(folder: Path, store: Path) -> None:
    """<operator>.plan and <operator>.cubin, or .so, of each kernel on 8 floats."""
    import eagercache
    import torch
    from eagercache.runtime.session import session

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
        if facts["form"] == "container":
            (folder / f"{name}.so").write_bytes(path.read_bytes())
            continue
        (folder / f"{name}.cubin").write_bytes(path.read_bytes())
        (folder / f"{name}.plan").write_text(facts["launch_plan"])


def _output(binary: Path, phase: str, kernels: Path) -> Any:
    import torch

    libraries = Path(torch.__file__).parent / "lib"
    environment = {
        **os.environ,
        "EAGERCACHE_BENCH_PHASE": phase,
        "EAGERCACHE_BENCH_KERNELS": str(kernels),
        "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    core = {max(os.sched_getaffinity(0))}
    return json.loads(frame.run_binary(binary, core, environment=environment).stdout)


def run(binary: Path, phase: str, kernels: Path) -> dict[str, float]:
    """Nanoseconds by "FORM/OPERATOR/..."."""
    rows = _output(binary, phase, kernels)["benchmarks"]
    for row in rows:
        if row.get("error_occurred"):
            raise SystemExit(f"{row['name']}: {row['error_message']}")
    return {row["name"].partition("/iterations")[0]: row["real_time"] for row in rows}


def _differences(sides: dict[str, list[float]], side: str) -> tuple[float, float, float]:
    """Quartiles, in ns, of what a side's calls took more than those without a hook beside them."""
    low, middle, high = statistics.quantiles(
        [ns - stock for ns, stock in zip(sides[side], sides["stock"], strict=True)], n=4
    )
    return low, middle, high


def print_pairs(pairs: dict[str, dict[str, list[float]]]) -> None:
    """What the phase "pairs" has seen."""
    print(f"\n{'left to native':26} {'no hook ns':>10}  more with it (quartiles; no hook again)")
    for name, sides in pairs.items():
        low, middle, high = _differences(sides, "hooked")
        noise = _differences(sides, "again")[1]
        stock = statistics.median(sides["stock"])
        print(f"{name:26} {stock:10.0f}  {middle:+.0f} ns ({low:+.0f}..{high:+.0f}; {noise:+.0f})")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("binary", type=Path, nargs="?")
    parser.add_argument("--fill", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.fill:
        write_kernels(*options.fill)
        return
    if options.binary is None:
        parser.error("the path of eagercache_overhead_side is missing")
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store, kernels = Path(folder) / "store", Path(folder) / "kernels"
        store.mkdir(mode=0o700)
        kernels.mkdir()
        write_kernels(kernels, store)
        write_containers(kernels, Path(folder))
        for _ in range(options.rounds):
            for phase in ("stock", "hooked"):
                for name, ns in run(options.binary.absolute(), phase, kernels).items():
                    times.setdefault(name, []).append(ns)
        pairs = _output(options.binary.absolute(), "pairs", kernels)
    result: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    if options.json:
        options.json.write_text(json.dumps({"rounds": times, "pairs": pairs}, indent=1))
    print(f"{'call':18} {'stock ns':>9} {'hit':>14} {'container':>14}")
    for name, stock in result.items():
        form, _, call = name.partition("/")
        if form == "stock":
            others = [result.get(f"{other}/{call}") for other in ("hit", "container")]
            cells = [f"{ns:8.0f} x{ns / stock:.2f}" if ns else f"{'-':>14}" for ns in others]
            print(f"{call:18} {stock:9.0f} {' '.join(cells)}")
    print_pairs(pairs)


if __name__ == "__main__":
    main()
