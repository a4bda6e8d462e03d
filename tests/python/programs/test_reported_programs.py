"""Twelve programs that know nothing of eagercache, run with `eagercache run --report`.

What they print, write to standard error and end with is as without us; the report comes after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment

pytestmark = [pytest.mark.once, pytest.mark.long]

PROGRAMS = Path(__file__).resolve().parent.parent.parent / "reported_programs"
# Processes of each that import torch and end themselves, forks not.
REPORTING = {
    "train_classifier": 1,
    "classify_images": 1,
    "encode_text": 1,
    "load_data": 1,
    "share_work": 2,  # without the pool, which is terminated
    "serve_threads": 1,
    "fail_with_status": 1,
    "raise_error": 1,
    "die_by_signal": 0,
    "handle_interrupt": 1,
    "leave_at_once": 1,
    "warn_and_save": 1,
}


def run(words: list[str], cache: Path, folder: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *words],
        env=clean_environment(EAGERCACHE_DIR=str(cache), OMP_NUM_THREADS="1"),
        cwd=folder,
        input=b"a line\nanother line\n",
        capture_output=True,
        timeout=240,
        check=False,
    )


def test_every_program_is_here() -> None:
    assert {path.stem for path in PROGRAMS.glob("*.py")} == set(REPORTING)
    assert len(REPORTING) == 12


@pytest.mark.parametrize("name", REPORTING)
def test_a_program_is_as_without_a_report(name: str, cache: Path, tmp_path: Path) -> None:
    program = str(PROGRAMS / f"{name}.py")
    native = run([program], cache, tmp_path)
    page = tmp_path / "page.html"
    options = ["--report", "--json", "--page", str(page), "--picture", "picture.png"]
    done = run(["-m", "eagercache", "run", *options, program], cache, tmp_path)
    assert done.returncode == native.returncode, done.stderr.decode()
    assert done.stdout == native.stdout
    assert done.stderr.startswith(native.stderr), (native.stderr, done.stderr)
    report = json.loads(done.stderr[len(native.stderr) :])
    assert report["processes"] - report["cut_off"] == REPORTING[name]
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_reported_program_may_use_kernels(cache: Path, tmp_path: Path) -> None:
    program = str(PROGRAMS / "train_classifier.py")
    native = run([program], cache, tmp_path)
    chosen = ["--op", "native_layer_norm", "--op", "gelu", "--on-miss", "wait", "--choose"]
    options = ["--report", "--json", *chosen, "always"]
    done = run(["-m", "eagercache", "run", *options, program], cache, tmp_path)
    assert (done.returncode, done.stdout) == (0, native.stdout)
    report = json.loads(done.stderr)
    assert report["total"]["hits"] >= 50 and report["timelines"][0]["step_count"] == 30
