"""`bench/real_programs.py` and the programs that it runs, at their smallest sizes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent.parent.parent
RUNNER = ROOT / "bench" / "real_programs.py"
FOLDER = ROOT / "bench" / "programs"
NAMES = (
    sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "loop")
    if FOLDER.exists()
    else []
)


@pytest.fixture(autouse=True)
def sources() -> None:
    if not RUNNER.exists():
        pytest.skip("no sources beside the package")


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=clean_environment(OMP_NUM_THREADS="1", **variables),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_the_runner_knows_all_programs() -> None:
    text = RUNNER.read_text()
    listed = re.findall(r'"(\w+)"', text.split("PROGRAMS = (")[1].split(")")[0])
    assert sorted(listed) == NAMES
    assert len(listed) == 12


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_program_prints_the_same_numbers_each_time(name: str) -> None:
    first, second = (run(str(FOLDER / f"{name}.py"), "--tiny", "--steps", "6") for _ in range(2))
    if first.returncode == 3:
        pytest.skip(first.stdout.strip())
    assert first.returncode == 0, first.stderr
    assert "eagercache" not in (FOLDER / f"{name}.py").read_text()
    assert len(re.findall(r"[ ]-?\d+\.?\d*", first.stdout)) >= 6
    assert first.stdout == second.stdout


def test_a_program_without_its_library_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text("raise ImportError('not here')\n")
    done = run(str(FOLDER / "train_mixer.py"), "--tiny", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "timm is not installed\n")


def test_a_program_that_is_asked_how_fast_it_is_says_nothing_else() -> None:
    done = run(str(FOLDER / "train_recommender.py"), "--tiny", "--calibrate", "0.2")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["steps"] >= 1 and seen["seconds"] >= 0.2


@pytest.mark.long
def test_a_cut_run_keeps_its_rows_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text("raise ImportError('not here')\n")
    kept, table = tmp_path / "rows.json", tmp_path / "table.md"
    words = ["-m", "bench.real_programs", "--tiny", "--runs", "1", "--settle", "0"]
    words += ["--seconds", "0.5", "--json", str(kept), "--output", str(table)]
    path = with_ours(tmp_path)
    missing = run(*words, "--only", "train_mixer", PYTHONPATH=path)
    assert missing.returncode == 1, missing.stderr
    assert "timm is not installed" in table.read_text()
    done = run(*words, "--only", "train_recommender", PYTHONPATH=path)
    assert done.returncode == 1, done.stderr  # the row of before is in the table still
    rows = {row["program"]: row for row in json.loads(kept.read_text())}
    assert set(rows) == {"train_mixer", "train_recommender"}
    comparison = rows["train_recommender"]["comparison"]
    assert comparison["fresh"] and comparison["output"]["numbers"] >= 5
    (line,) = [one for one in table.read_text().splitlines() if "train_recommender |" in one]
    assert re.search(r"\| x\d+\.\d{3} \| x\d+\.\d{3} \|", line)
    # What is done is not done again, and past its time nothing is begun.
    before = kept.read_text()
    words += ["--only", "train_recommender,train_graph", "--budget", "0"]
    again = run(*words, PYTHONPATH=path)
    assert again.returncode == 2 and "left: train_graph" in again.stdout
    assert kept.read_text() == before


def with_ours(folder: Path) -> str:
    import eagercache

    return f"{folder}:{Path(eagercache.__file__).parent.parent}:{ROOT}"
