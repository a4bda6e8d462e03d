"""`eagercache run` on training loops of other libraries: what they find native, they find with it.

The programs know nothing of eagercache. Some operators of each are compiled, each call waits for
its kernel, and every proved kernel answers, so that what is compared was made by kernels.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment

pytestmark = [pytest.mark.once, pytest.mark.long]

PROGRAMS = Path(__file__).resolve().parent.parent.parent / "training_loops"
# Library, program, and the operators whose kernels answer: forward, backward and the optimizer's.
LOOPS = {
    "transformers": (
        "with_trainer.py",
        ("native_layer_norm", "gelu", "gelu_backward", "_softmax", "tanh_backward"),
    ),
    "timm": (
        "with_timm.py",
        ("native_layer_norm", "gelu", "gelu_backward", "_log_softmax"),
    ),
    "torchvision": (
        "with_torchvision.py",
        ("native_batch_norm", "threshold_backward", "_log_softmax"),
    ),
}


def run(arguments: list[str], folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        # Threads change the last bits of native's own sums.
        env=clean_environment(EAGERCACHE_DIR=str(cache), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def numbers(found: dict[str, object]) -> list[float]:
    flat: list[float] = []
    for values in found.values():
        flat += values if isinstance(values, list) else [values]  # type: ignore[list-item]
    return flat


@pytest.mark.parametrize("library", LOOPS)
def test_a_training_loop_finds_the_same_and_the_report_is_printed(
    library: str, cache: Path, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    if library == "transformers":
        pytest.importorskip("accelerate")  # its Trainer's
    name, operators = LOOPS[library]
    program = str(PROGRAMS / name)
    native = run([program, "native.json"], tmp_path, cache)
    assert native.returncode == 0, native.stderr
    options = [word for op in operators for word in ("--op", op)]
    options += ["--on-miss", "wait", "--choose", "always", "--report"]
    done = run(["-m", "eagercache", "run", *options, program, "ours.json"], tmp_path, cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout == native.stdout or library == "transformers"  # which prints times

    wanted = json.loads((tmp_path / "native.json").read_text())
    found = json.loads((tmp_path / "ours.json").read_text())
    assert wanted.keys() == found.keys()
    assert numbers(found) == pytest.approx(numbers(wanted), rel=1e-3, abs=1e-4)
    total = re.search(r"\ball\W+([\d,]+)\W+(\d+)%", done.stderr)
    assert total is not None and int(total[2]) >= 50, done.stderr
    assert "cost: " in done.stderr and len(list(tmp_path.glob("eagercache-report-*.svg"))) == 1
