"""`bench/figures_age.py`: which figures are older than what they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCRIPT = ROOT / "bench" / "figures_age.py"
PAGE = "2026-01-01-store.md"


@pytest.fixture(autouse=True)
def sources() -> None:
    if not SCRIPT.exists():
        pytest.skip("no sources beside the package")


class Repository:
    """A repository with one table, which is about the store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        self.write("kernel_cache/store.cc", "one")
        self.write("dispatcher/hook.cc", "one")
        self.commit("begin")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", "-C", str(self.root), *identity, *words],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", message)
        return self.git("rev-parse", "--short=7", "HEAD")

    def seen(self) -> tuple[int, list[str]]:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--root", str(self.root)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert not done.stderr
        return done.returncode, done.stdout.splitlines()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    at = made.git("rev-parse", "--short=7", "HEAD")
    made.write(f"bench/results/{PAGE}", f"# Store\n\nCommit {at}.\n\n| a | b |\n")
    made.write("README.md", f"# It\n\n| x2 | [table](bench/results/{PAGE}) |\n")
    made.write("docs/deeper/figures.md", f"x2 (`{PAGE}`)\n")
    made.commit("measure")
    return made


def test_a_figure_whose_files_are_as_they_were_is_not_listed(repository: Repository) -> None:
    repository.write("dispatcher/hook.cc", "two")  # is not what the table measures
    repository.commit("change")
    assert repository.seen() == (
        0,
        ["0 of 2 figures are of tables whose files have changed since:"],
    )


def test_a_figure_whose_files_changed_is_listed_with_its_places(repository: Repository) -> None:
    at = repository.git("rev-parse", "--short=7", "HEAD~1")
    for text in ("two", "three"):
        repository.write("kernel_cache/store.cc", text)
        repository.commit(text)
    assert repository.seen() == (
        0,
        [
            "2 of 2 figures are of tables whose files have changed since:",
            f"  {PAGE} (at {at}): 1 files in 2 commits since; figures: README.md:3, "
            "docs/deeper/figures.md:1",
        ],
    )


def test_a_table_without_a_commit_counts_as_of_the_one_that_brought_it(
    repository: Repository,
) -> None:
    repository.write(f"bench/results/{PAGE}", "# Store\n\nfeed a bee 1234567890\n")
    repository.commit("measure again")
    added = repository.git("rev-parse", "--short=7", "HEAD~1")
    repository.write("kernel_cache/store.cc", "two")
    repository.commit("change")
    (line,) = repository.seen()[1][1:]
    assert f"names no commit, came with {added}): 1 files in 1 commits" in line


def test_a_table_that_nobody_knows_and_one_that_is_not_there_are_errors(
    repository: Repository,
) -> None:
    repository.write("bench/results/2026-01-02-weather.md", "# Weather\n")
    repository.write("docs/more.md", "x3 (`2026-01-03-store.md`)\n")
    repository.commit("more")
    status, lines = repository.seen()
    assert status == 1
    assert [line for line in lines if line.startswith("error")] == [
        "error: 2026-01-02-weather.md: bench/figures_age.py does not say what it measures",
        "error: 2026-01-03-store.md: is named in docs/more.md:1 and is not there",
    ]


def test_the_tables_of_this_repository_are_known() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout


def test_what_tables_measure_is_there() -> None:
    sys.path.append(str(SCRIPT.parent))
    import figures_age

    paths = {path for paths in figures_age.MEASURES.values() for path in paths}
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
