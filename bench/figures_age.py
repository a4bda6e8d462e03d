"""Lists the figures of README and docs whose tables are older than what they measure.

    .venv/bin/python bench/figures_age.py [--root FOLDER]

A table of bench/results names the commits that it was measured at; of several the oldest counts,
since some rows may be of it. A table that names none counts as of the commit that brought it. What
each one measures is below, by its name without the date. A figure is a place in README.md or docs
that names a table. It is listed where a commit after the table's has changed a file that the table
measures: whether the figure would be another one, only a measurement says. Ends with 1 where a
table is not known here, or a place names a table that is not there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

# What a call costs that is hooked, whoever answers it.
CALLS = ("dispatcher", "guards", "python_hooks/bindings")
# The code of kernels, their proofs and timings, and so what is decided.
KERNELS = ("python_hooks/eagercache/worker", "python_hooks/eagercache/calls")
# When what is compiled, and what that costs the program.
SERVICE = ("python_hooks/eagercache/service", "dispatcher/runtime")
STORE = ("kernel_cache",)
MODULES = (
    "python_hooks/nn_modules",
    "python_hooks/eagercache/modules",
    "python_hooks/eagercache/callables",
)
REMOTES = ("python_hooks/eagercache/remote",)
AHEAD = ("python_hooks/eagercache/ahead",)
DEPLOY = ("cpp_api", "python_hooks/eagercache/deploy")
OPERATORS = (*CALLS, *KERNELS)
WHOLE = (*OPERATORS, *MODULES)

MEASURES: dict[str, tuple[str, ...]] = {
    "bandwidth": ("bench/operators/bandwidth.py", *KERNELS),
    "beside-cpu": ("bench/compiling/beside.py", *SERVICE),
    "beside-programs-h100": ("bench/compiling/beside_programs.py", *SERVICE, *WHOLE),
    "beside-programs-h200": ("bench/programs", *SERVICE, *WHOLE),
    "changing-modules-cpu": ("bench/modules/changing.py", *WHOLE),
    "checkpoints": ("bench/modules/modules_training.py", *WHOLE),
    "cluster": ("bench/compiling/cluster.py", *AHEAD),
    "compile-cpu": ("bench/compiling/compile.py", *SERVICE, *KERNELS),
    "compiling-modules-h200": ("bench/programs", *SERVICE, *WHOLE),
    "conformance-h200": ("bench/overhead/cuda_lists.py", *OPERATORS),
    "decisions-on-a-busy-machine": ("bench/compiling/busy_decisions.py", *KERNELS),
    "decode": ("bench/modules/decode.py", *WHOLE),
    "default-set-cpu": ("bench/operators/default_set.py", *OPERATORS),
    "demo-cpu": ("examples", *WHOLE),
    "deploy-cpu": ("bench/modules/deploy.py", *DEPLOY, *KERNELS),
    "drift-cpu": ("bench/modules/drift.py", *OPERATORS),
    "first-ten-minutes-cpu": ("scripts/parts/first_ten_minutes.py", *WHOLE),
    "fleet": ("bench/store/fleet.py", "bench/store/fleet_simulation.py", *REMOTES),
    "fuzz-and-models-cpu": ("tests/fuzz", "tests/models", *WHOLE),
    "generate-cpu": ("bench/modules/generate.py", *WHOLE),
    "generate-cuda": ("bench/modules/generate.py", *WHOLE),
    "misses-cpu": ("bench/compiling/misses.py", *CALLS),
    "models-h200": ("bench/modules/models.py", *OPERATORS),
    "modules-varying-training-cpu": ("bench/modules/modules_varying.py", *WHOLE),
    "modules-varying-training-h200": ("bench/modules/modules_varying.py", *WHOLE),
    "modules-cpu": ("bench/modules/modules.py", *WHOLE),
    "modules-h200": ("bench/modules/modules.py", *WHOLE),
    "new-keys-cpu": ("bench/compiling/new_keys.py", *SERVICE, *WHOLE),
    "operators-cpu": ("bench/operators/custom_operators.py", *OPERATORS),
    "overhead-cpu": ("bench/overhead/overhead.py", *CALLS),
    "profile-cpu": ("python_hooks/eagercache/frontend", *CALLS),
    "pythons": ("scripts/setup", "tests/matrix", *WHOLE),
    "real-programs-cpu": ("bench/real_programs.py", "bench/programs", *SERVICE, *WHOLE),
    "real-programs-cuda": ("bench/real_programs.py", "bench/programs", *SERVICE, *WHOLE),
    "release": ("scripts/release", "cmake", "tests/matrix"),
    "remotes": ("bench/store/remotes.py", *REMOTES),
    "replay": ("bench/modules/replay.py", *MODULES),
    "store": ("bench/store/store.py", *STORE),
    "store-soak": ("scripts/soak_store", *STORE),
    "training-cpu": ("bench/modules/modules_training.py", *WHOLE),
    "training-h100": ("bench/modules/modules_training.py", *WHOLE),
    "training-h200": ("bench/modules/modules_training.py", *WHOLE),
    "training-steps-cpu": ("tests/models", *WHOLE),
    "varying-shapes-cpu": ("bench/operators/varying_shapes.py", *SERVICE, *CALLS),
    "varying-shapes-cuda": ("bench/operators/varying_shapes.py", *SERVICE, *OPERATORS),
    "vector-products": KERNELS,
    "warm-budgets-cpu": ("bench/compiling/warm_budgets.py", *AHEAD),
}

_PAGE = re.compile(r"\b\d{4}-\d\d-\d\d-([\w-]+)\.md\b")
_COMMIT = re.compile(r"\b[0-9a-f]{7,40}\b")


@dataclass
class Table:
    """A table of bench/results, and what became of what it measures.

    Attributes:
        commit: that it counts as of; "" where none is known.
        named: whether the table names it itself.
        commits: that changed what it measures since.
        files: that they changed.
        places: that name it, as "docs/figures.md:12".
    """

    name: str
    commit: str = ""
    named: bool = True
    commits: int = 0
    files: int = 0
    places: list[str] = field(default_factory=list)

    def line(self) -> str:
        """For people."""
        whose = f"at {self.commit}" if self.named else f"names no commit, came with {self.commit}"
        return (
            f"{self.name} ({whose}): {self.files} files in {self.commits} commits since; "
            f"figures: {', '.join(self.places)}"
        )


class Sources:
    """The repository below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def git(self, *words: str) -> str:
        """Its output; "" where it fails."""
        done = subprocess.run(
            ["git", "-C", str(self.root), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def has_history(self) -> bool:
        """Whether there is a git repository with more than its last commits."""
        return self.git("rev-parse", "--is-shallow-repository") == "false"

    def places(self) -> dict[str, list[str]]:
        """Where README and docs name tables, by the table's file name."""
        found: dict[str, list[str]] = defaultdict(list)
        pages = [self.root / "README.md", *sorted((self.root / "docs").rglob("*.md"))]
        for page in pages:
            if not page.exists():
                continue
            for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
                for match in _PAGE.finditer(line):
                    found[match[0]].append(f"{page.relative_to(self.root)}:{number}")
        return found

    def table(self, name: str) -> Table:
        """A table with its commit."""
        path = self.root / "bench" / "results" / name
        words = sorted(set(_COMMIT.findall(path.read_text(encoding="utf-8"))))
        named = [commit for word in words if (commit := self._commit(word))]
        if named:
            # Of several that are each other's ancestors the oldest has the fewest before it.
            ages = {commit: int(self.git("rev-list", "--count", commit)) for commit in named}
            return Table(name, min(named, key=lambda commit: ages[commit]))
        added = self.git("log", "--diff-filter=A", "--format=%h", "-1", "--", str(path))
        return Table(name, added, named=False)

    def _commit(self, word: str) -> str:
        return self.git("rev-parse", "--short=7", "--verify", "-q", f"{word}^{{commit}}")

    def count_changes(self, table: Table, measured: tuple[str, ...]) -> None:
        """Fills in what changed since the table's commit."""
        since = f"{table.commit}..HEAD"
        commits = self.git("log", "--format=%h", since, "--", *measured).splitlines()
        changed = self.git("diff", "--name-only", table.commit, "HEAD", "--", *measured)
        table.commits, table.files = len(commits), len(changed.splitlines())


def tables_of(sources: Sources) -> tuple[list[Table], list[str]]:
    """The tables that README and docs name, and what is wrong with any table."""
    wrong, found = [], []
    results = {path.name for path in (sources.root / "bench" / "results").glob("*.md")}
    kinds = {name: match[1] for name in results if (match := _PAGE.fullmatch(name))}
    for name in sorted(results):
        if kinds.get(name) not in MEASURES:
            wrong.append(f"{name}: bench/figures_age.py does not say what it measures")
    for name, places in sorted(sources.places().items()):
        if name not in results:
            wrong.append(f"{name}: is named in {', '.join(places)} and is not there")
        elif kinds.get(name) in MEASURES:
            table = sources.table(name)
            table.places = places
            if table.commit:
                sources.count_changes(table, MEASURES[kinds[name]])
                found.append(table)
    return found, wrong


def main() -> int:
    """Prints the list; 1 where something is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", type=Path, default=Path(__file__).absolute().parent.parent)
    sources = Sources(parser.parse_args().root)
    if not sources.has_history():
        print("figures: no history here, so nothing says how old they are")
        return 0
    tables, wrong = tables_of(sources)
    old = [table for table in tables if table.files]
    count = sum(len(table.places) for table in tables)
    older = sum(len(table.places) for table in old)
    print(f"{older} of {count} figures are of tables whose files have changed since:")
    for table in old:
        print(f"  {table.line()}")
    for line in wrong:
        print(f"error: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
