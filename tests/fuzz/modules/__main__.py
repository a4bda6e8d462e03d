"""`make fuzz FUZZ_ARGS=--modules`: changes of what whole modules read, against eager.

    python -m fuzz --modules [--seed N] [--only WORD] [--recompiles N] [--json FILE]

First kernels are compiled for worlds (worlds.py), as far as the store lacks them. Then, in a
process of its own, every change of each world is made while a kernel answers; in another process,
before the module's first call; and for some of them, a kernel is compiled afterwards. A module
without a kernel is refused, and counts as that alone. Exit status 1 when an answer was not eager's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.modules.worlds import World

TESTS = Path(__file__).resolve().parent.parent.parent
ROOT = TESTS.parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="make fuzz FUZZ_ARGS=--modules", description=__doc__.split("\n", 1)[0]
    )
    add = parser.add_argument
    add("--modules", action="store_true", help="this fuzzer, not that of operators")
    add("--seed", type=int, default=0, help="of the worlds; 0: by the time, and printed")
    add("--size", type=int, default=12, help="sources that one module reads, at most (12)")
    add("--crossed", type=int, default=150, help="kinds of objects in kinds of places (150)")
    add("--only", default="", help="only sources whose names match this")
    add("--recompiles", type=int, default=60, help="kernels to compile after a change (60)")
    add("--no-gradients", action="store_true", help="no calls with gradients")
    add("--json", type=Path, help="write the totals here")
    add("--cache", type=Path, default=ROOT / "build" / "fuzz-cache", help="where kernels are kept")
    add("--folder", type=Path, default=ROOT / "build" / "fuzz-worlds", help="for worlds' files")
    add("--quiet", action="store_true", help="no progress")
    add("--phase", help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    add("--worlds", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


class Run:
    """All phases, each in a process of its own."""

    def __init__(self, options: argparse.Namespace, environment: dict[str, str]) -> None:
        self.options, self.environment = options, environment
        self.rows: list[dict[str, Any]] = []

    def phase(self, name: str) -> None:
        """One phase, of all worlds that have a kernel."""
        options = self.options
        with tempfile.TemporaryDirectory() as folder:
            out, listed = Path(folder) / "out.jsonl", Path(folder) / "worlds.json"
            chosen = [row["world"] for row in self.of("compiled") if row["answers"]]
            listed.write_text(json.dumps(chosen))
            out.touch()
            command = [sys.executable, "-m", "fuzz", "--modules", "--phase", name]
            command += ["--out", str(out), "--worlds", str(listed)]
            for option in ("seed", "cache", "folder", "recompiles", "only", "size", "crossed"):
                command += [f"--{option}", str(getattr(options, option))]
            command += ["--quiet"] * options.quiet + ["--no-gradients"] * options.no_gradients
            if name == "again":
                # Its kernels are not those of the worlds as they were.
                command[command.index("--cache") + 1] = str(Path(folder) / "cache")
                (Path(folder) / "cache").mkdir(mode=0o700)
            done = subprocess.run(command, env=self.environment, check=False, cwd=folder)
            self.rows += map(json.loads, out.read_text().splitlines())
            if done.returncode:
                self.rows.append({"kind": "died", "phase": name, "status": done.returncode})

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [row for row in self.rows if row["kind"] == kind]


def fuzz(options: argparse.Namespace, environment: dict[str, str]) -> Run:
    """All of it."""
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True, mode=0o700)
    run = Run(options, environment)
    run.phase("compile")
    for phase in ("changes", "first", "again"):
        if phase != "again" or options.recompiles:
            run.phase(phase)
    return run


def summary(run: Run) -> str:
    """The totals for people."""
    compiled = run.of("compiled")
    with_kernels = [row["sources"] for row in compiled if row["answers"]]
    refused = sum(row["sources"] == 1 and not row["answers"] for row in compiled)
    lines = [
        f"sources: {sum(with_kernels)} in {len(with_kernels)} modules with kernels; "
        f"{refused} refused"
    ]
    for row in run.of("totals"):
        if row["phase"] == "changes":
            lines.append(
                f"changes with kernels answering before: {row['changes']:,}, of which eager's "
                f"answer saw {row['seen']:,}; kernels answered after {row['answered_after']:,}; "
                f"not possible: {row['not_made']:,}; kernels lost: {row['lost']:,}; "
                f"{row['seconds']:.0f} s"
            )
        elif row["phase"] in ("first", "again"):
            what = "before the first call" if row["phase"] == "first" else "before compiling"
            lines.append(
                f"changes {what}: kernels answered after {row['answered_after']:,}; "
                f"{row['seconds']:.0f} s"
            )
    lines += [f"DIED: {row['phase']}, status {row['status']}" for row in run.of("died")]
    lines.append(f"stale answers: {len(run.of('stale'))}")
    return "\n".join(lines)


def reasons(run: Run) -> Counter[str]:
    """Why modules are refused, and how often."""
    compiled = run.of("compiled")
    refused = (row["why"] for row in compiled if row["sources"] == 1 and not row["answers"])
    return Counter(why.partition("; ")[2] for why in refused)


def prepared() -> dict[str, str]:
    """The environment of the phases: quick compile workers, no settings but ours."""
    sys.path.insert(0, str(TESTS / "python"))
    import atexit

    from prepared_worker import Preparer, with_workers

    names = (name for name in os.environ if not name.startswith("EAGERCACHE_"))
    environment = {name: os.environ[name] for name in names}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS), *filter(None, [environment.get("PYTHONPATH")])]
    )
    preparer = Preparer(environment)
    atexit.register(preparer.close)
    return with_workers(preparer.address, environment)


def main() -> int:
    """The exit status."""
    options = parse()
    if options.phase:
        from fuzz.modules.changes import run as run_phase

        listed = json.loads(options.worlds.read_text())
        run_phase(list(map(World.from_json, listed)), options)
        return 0
    options.seed = options.seed or int(time.time())
    options.cache = options.cache / "modules"
    options.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    print(f"seed {options.seed}", flush=True)
    run = fuzz(options, prepared())
    print(summary(run))
    for why, count in reasons(run).most_common():
        print(f"refused {count}: {why}")
    for row in run.of("stale"):
        print(
            f"STALE {row['file']}: {row['do']!r}, {row['when']}: {row['difference']}"
            f"{', with gradients' if row['gradients'] else ''}; {row['world']}\n"
            f'  repeat: make fuzz FUZZ_ARGS="--modules --seed {options.seed} '
            f"--only '{re.escape(row['source'])}'\""
        )
    for row in run.of("broken"):
        print(f"cannot be taken back: {row['change']!r}: {row['error']}; {row['world']}")
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, "rows": run.rows}) + "\n")
    return 1 if run.of("stale") or run.of("died") else 0


if __name__ == "__main__":
    sys.exit(main())
