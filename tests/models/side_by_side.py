"""Long runs of training of several models at a time, each in a process of its own.

Each process writes a JSON file of its own beside the common one, which is made anew of all of them
whenever one ends; so what was found is kept when the whole is stopped. A process has a folder of
kernels of its own, since another's compile worker would hold the slots of the machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Whose compiles took longest where all were measured; they begin first, so that none is left over.
SLOW = ("DistilBert", "convnext", "mobilenet", "efficientnet", "ConvNext", "shufflenet", "resnet18")
WAIT_S = 0.5


def part_of(common: Path, name: str) -> Path:
    """The JSON file of one model."""
    return common.with_suffix("") / (re.sub(r"\W+", "-", name) + ".json")


def merged(common: Path, version: str, steps: int) -> list[dict[str, Any]]:
    """The rows of the common file and of its parts, each model once; the latest counts."""
    rows: dict[str, dict[str, Any]] = {}
    parts = sorted(common.with_suffix("").glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
    for file in [common, *parts]:
        if not file.is_file():
            continue
        found = json.loads(file.read_text())
        if (found["torch"], found["steps"]) == (version, steps):
            rows.update((row["name"], row) for row in found["rows"])
    return list(rows.values())


def write(common: Path, version: str, steps: int, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the common file in one step."""
    text = json.dumps({"torch": version, "steps": steps, "rows": rows}, indent=1)
    new = common.with_name(common.name + ".new")
    new.write_text(text)
    new.replace(common)


def _start(name: str, common: Path, steps: int, runs: int) -> subprocess.Popen[bytes]:
    part = part_of(common, name)
    part.parent.mkdir(parents=True, exist_ok=True)
    kernels = part.with_suffix("") / "kernels"
    kernels.mkdir(parents=True, exist_ok=True, mode=0o700)
    environment = {
        **os.environ,
        "EAGERCACHE_DIR": str(kernels),
        "EAGERCACHE_LINGER": "0",
        "EAGERCACHE_WORKERS": "1",
        "EAGERCACHE_SLOTS": str(os.cpu_count() or 1),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "models", "--kind", "training", "--model", name]
    command += ["--steps", str(steps), "--runs", str(runs), "--json", str(part)]
    with part.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def train(
    names: Sequence[str], jobs: int, seconds: float, steps: int, runs: int, common: Path
) -> None:
    """Trains the models, `jobs` at a time; what runs after `seconds` is ended and not counted."""
    import torch

    ends = time.monotonic() + seconds
    waiting = sorted(names, key=lambda name: not any(word in name for word in SLOW))
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs and time.monotonic() < ends:
                name = waiting.pop(0)
                running[name] = _start(name, common, steps, runs)
            time.sleep(WAIT_S)
            for name in [name for name, child in running.items() if child.poll() is not None]:
                running.pop(name)
                lines = part_of(common, name).with_suffix(".log").read_text().splitlines()
                said = [line for line in lines if line.startswith(("training ", "    "))]
                print("\n".join(said or [f"training {name}: ended without a word"]), flush=True)
                write(common, torch.__version__, steps, merged(common, torch.__version__, steps))
            if time.monotonic() > ends:
                print("not done in time:", ", ".join([*running, *waiting]), flush=True)
                return
    finally:
        for child in running.values():
            child.terminate()
