"""`make fuzz`: random operator programs, with and without kernels, compared after every call.

    python -m fuzz [--calls N | --seconds S] [--seed N] [--keys N] [--jobs N] [--json FILE]

First the programs that once failed are replayed (corpus.txt), then the kernels of the keys that
programs are drawn from are compiled, as far as the store lacks them, and then programs run. They
run in a child process: if it dies, the program that it died of is a finding, and another goes on.
Each finding is shrunk and written to a script in --scripts. Exit status 1 when there was one. With
--jobs the first process compiles, and then as many have a part of the calls each, from seeds of
their own that follow the first; findings are printed last, with what repeats them.
"""

from __future__ import annotations

import argparse
import copy
import json
import mmap
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuzz.both_ways import Found

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus.txt"
ROOT = HERE.parent.parent
POOL = "a single call"  # where a finding was that each process on the same keys has
LATEST_FINDINGS = 20  # then the rest of the run says nothing new


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--calls", type=int, default=100_000, help="operator calls to make (100,000)")
    add("--seconds", type=float, default=0.0, help="end after so long; compiling does not count")
    add("--seed", type=int, default=0, help="of the programs; 0: by the time, and printed")
    add("--keys", type=int, default=300, help="kernel keys that calls are drawn from (300)")
    add("--pool-seed", type=int, default=1, help="of the keys")
    add("--json", type=Path, help="write the totals here")
    add("--cache", type=Path, default=ROOT / "build" / "fuzz-cache", help="where kernels are kept")
    add("--scripts", type=Path, default=ROOT / "build" / "fuzz-findings", help="for findings")
    add("--jobs", type=int, default=1, help="processes that run programs (1)")
    add("--workers", type=int, default=0, help="processes that compile (all cores)")
    add("--corpus", type=Path, default=CORPUS, help="programs that once failed")
    add("--only", type=int, help="run one program of the seed: its number")
    add("--quiet", action="store_true", help="no progress")
    add("--child", type=Path, help=argparse.SUPPRESS)
    add("--first", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


class Place:
    """The number of the program that a child is at, in memory that outlives it."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    @property
    def number(self) -> int:
        """The program's number."""
        return int.from_bytes(self._map[:8], "little")

    @number.setter
    def number(self, value: int) -> None:
        self._map[:8] = value.to_bytes(8, "little")


class Child:
    """What runs programs. Everything that it finds out goes to a file, a line of JSON each."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from fuzz.both_ways import Totals

        torch.set_num_threads(1)
        self.options = options
        self.totals = Totals()
        self.findings = 0
        self._lines = options.child.open("a")
        self._place = Place(options.child.with_suffix(".place"))
        self._shown = 0.0

    def say(self, kind: str, **values: Any) -> None:
        """One line."""
        self._lines.write(json.dumps({"kind": kind, **values}) + "\n")
        self._lines.flush()

    def show(self, text: str, *, now: bool = False) -> None:
        """Progress, every few seconds."""
        if not self.options.quiet and (now or time.monotonic() - self._shown > 5):
            self._shown = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def main(self) -> None:
        """Corpus, kernels, programs."""
        import eagercache
        from eagercache import _C

        # All of it now: a finding an hour from here meets the same code.
        from fuzz import pool, shrink  # noqa: F401

        options = self.options
        if options.first == 0:
            self._replay_corpus()
        began = time.monotonic()
        prepared = pool.prepare(
            options.keys, options.pool_seed, options.cache, self._compiling, options.workers
        )
        self.say("pool", templates=len(prepared.pool.templates), seconds=time.monotonic() - began,
                 **prepared.verdicts)  # fmt: skip
        self.show(f"keys: {prepared.verdicts}", now=True)
        for found in prepared.found:
            self._report(found, POOL)
        before = eagercache.stats()
        began = time.monotonic()
        self._programs(prepared.pool, began)
        after = eagercache.stats()
        answered = {n: getattr(after, n) - getattr(before, n)
                    for n in ("hits", "misses", "pending", "native", "aside")}  # fmt: skip
        self.say("totals", seconds=time.monotonic() - began, loaded=after.loaded,
                 totals=asdict(self.totals), answered=answered,
                 asides=_asides(before, after))  # fmt: skip
        _C.set_answering(False)

    def _compiling(self, run: Any) -> None:
        self.show(
            f"kernels: {run.done} of {run.total} compiled, about {run.seconds_left() / 60:.0f} "
            "minutes left"
        )

    def _replay_corpus(self) -> None:
        from eagercache import _C

        from fuzz import both_ways, pool, programs

        texts = _corpus_lines(self.options.corpus)
        if not texts:
            return
        pool.enable(self.options.cache, "wait")
        _C.set_answering(False)
        for text in texts:
            program = programs.read(text)
            both_ways.run_program(program)  # compiles
            found = both_ways.run_program(program)
            if found is not None:
                self._report(found, "from the corpus")
        self.say("corpus", programs=len(texts))

    def _programs(self, drawn_from: Any, began: float) -> None:
        from random import Random

        from fuzz.both_ways import run_drawn
        from fuzz.programs import Drawer

        options = self.options
        number = options.first
        while self.totals.calls < options.calls and self.findings < LATEST_FINDINGS:
            if options.seconds and time.monotonic() - began > options.seconds:
                break
            if options.only is not None:
                number = options.only
            self._place.number = number
            drawer = Drawer(Random(f"{options.seed}:{number}"), drawn_from)
            found = run_drawn(drawer, self.totals)
            if found is not None:
                self._report(found, f"seed {options.seed}, program {number}")
            number += 1
            if number % 256 == 0:
                self._tell(began, number)
            if options.only is not None:
                break

    def _tell(self, began: float, number: int) -> None:
        calls, passed = self.totals.calls, time.monotonic() - began
        left = (self.options.calls - calls) * passed / max(calls, 1)
        if self.options.seconds:
            left = min(left, self.options.seconds - passed)
        self.show(
            f"{calls:,} calls of {number:,} programs, {calls / passed:,.0f} a second, "
            f"{self.findings} disagreements, {left / 60:.1f} minutes left"
        )

    def _report(self, found: Found, where: str) -> None:
        from eagercache import _C

        from fuzz import pool, shrink

        self.findings += 1
        directory = self.options.cache
        _C.set_answering(False)

        def compiling() -> Any:
            enabled = pool.enable(directory, "wait")
            _C.set_answering(False)
            return enabled

        shrinker = shrink.Shrinker(found, compiling=compiling)
        small = shrinker.shrink()
        _C.set_answering(False)
        about = f"{where}\n{small.message}"
        self.options.scripts.mkdir(parents=True, exist_ok=True)
        name = f"{found.kind}-{self.options.seed}-{self._place.number}-{self.findings}.py"
        path = self.options.scripts / name
        path.write_text(shrink.script(small, about))
        self.say(
            "finding", where=where, message=found.message, small=small.message, script=str(path),
            calls=[found.program.calls, small.program.calls], attempts=shrinker.attempts,
            program=repr(small.program),
        )  # fmt: skip
        self.show(f"DISAGREEMENT ({where}): {small.message}\n  {path}", now=True)


def _asides(before: Any, after: Any) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for sign, stats in ((1, after), (-1, before)):
        for row in stats.operators.values():
            for reason, count in row.aside_reasons.items():
                reasons[reason] = reasons.get(reason, 0) + sign * count
    return {reason: count for reason, count in sorted(reasons.items()) if count}


def _corpus_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def _child_command(options: argparse.Namespace, lines: Path, first: int, calls: int) -> list[str]:
    command = [sys.executable, "-m", "fuzz", "--child", str(lines), "--first", str(first)]
    command += ["--calls", str(calls)]
    for name in ("seconds", "seed", "keys", "pool_seed", "cache", "scripts", "workers", "corpus"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.only is not None:
        command += ["--only", str(options.only)]
    return command + (["--quiet"] if options.quiet else [])


def supervise(options: argparse.Namespace) -> dict[str, Any]:
    """Runs children until the calls are made; everything they said."""
    from fuzz.both_ways import Totals

    result: dict[str, Any] = {"findings": [], "crashes": 0, "seconds": 0.0}
    totals, first, corpus = Totals(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(10):
            lines = Path(folder) / f"{turn}.jsonl"
            left = max(options.calls - totals.calls, 1)
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
            }
            done = subprocess.run(
                _child_command(options, lines, first, left), env=environment, check=False
            )
            for row in map(json.loads, lines.read_text().splitlines() if lines.exists() else []):
                kind = row.pop("kind")
                if kind == "finding":
                    result["findings"].append(row)
                elif kind == "pool":
                    result["pool"] = row
                elif kind == "corpus":
                    corpus = row["programs"]
                elif kind == "totals":
                    totals.add(row["totals"])
                    result["seconds"] += row["seconds"]
                    result["loaded"] = row["loaded"]
                    for name in ("answered", "asides"):
                        counts = result.setdefault(name, {})
                        for reason, count in row[name].items():
                            counts[reason] = counts.get(reason, 0) + count
            if done.returncode == 0:
                break
            if done.returncode > 0:
                raise SystemExit(f"the fuzzer itself failed: exit status {done.returncode}")
            at = Place(lines.with_suffix(".place")).number
            died = signal.Signals(-done.returncode).name
            where = f"seed {options.seed}, program {at}"
            print(f"CRASH ({where}): {died}; repeat with --seed {options.seed} --only {at}")
            result["findings"].append({"where": where, "message": f"the process died: {died}"})
            result["crashes"] += 1
            first = at + 1
    return {**result, "totals": asdict(totals), "corpus": corpus}


def supervise_jobs(options: argparse.Namespace) -> dict[str, Any]:
    """As `supervise`, with --jobs processes."""
    if options.jobs == 1:
        return supervise(options)
    alone = copy.copy(options)
    alone.calls = 0
    result = supervise(alone)
    shares = []
    for number in range(options.jobs):
        share = copy.copy(options)
        share.seed, share.workers = options.seed + number, 1
        share.calls = -(-options.calls // options.jobs)
        share.corpus = Path(os.devnull)
        share.quiet = options.quiet or number > 0
        shares.append(share)
    with ThreadPoolExecutor(options.jobs) as pool:
        for one in pool.map(supervise, shares):
            merge(result, one)
    return result


def merge(result: dict[str, Any], other: dict[str, Any]) -> None:
    """Adds another process's result. Seconds are the longest's; a pool's findings count once."""
    from fuzz.both_ways import Totals

    known = {found["message"] for found in result["findings"]}
    result["findings"] += [
        found
        for found in other["findings"]
        if found["where"] != POOL or found["message"] not in known
    ]
    result["crashes"] += other["crashes"]
    result["seconds"] = max(result["seconds"], other["seconds"])
    result["loaded"] = max(result.get("loaded", 0), other.get("loaded", 0))
    totals = Totals(**result["totals"])
    totals.add(other["totals"])
    result["totals"] = asdict(totals)
    for name in ("answered", "asides"):
        counts = result.setdefault(name, {})
        for reason, count in other.get(name, {}).items():
            counts[reason] = counts.get(reason, 0) + count


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What the totals were measured on."""
    import torch

    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "torch": torch.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "seed": options.seed,
        "jobs": options.jobs,
        "pool_seed": options.pool_seed,
    }


def summary(result: dict[str, Any]) -> str:
    """The totals for people."""
    totals, answered, pool = result["totals"], result.get("answered", {}), result.get("pool", {})
    every = sum(answered.values())
    lines = [
        f"torch {result['torch']}, commit {result['commit']}, {result['date']}, {result['cpu']}, "
        f"{result['cores']} cores, {result['jobs']} processes, seed {result['seed']}",
        f"pool: {pool.get('templates', 0)} calls with {pool.get('keys', 0)} keys: "
        f"{pool.get('kernels', 0)} kernels, {pool.get('native', 0)} native, "
        f"{pool.get('failed', 0)} failed, {pool.get('ineligible', 0)} not eligible",
        f"programs: {totals['programs']:,} with {totals['calls']:,} calls in "
        f"{result['seconds']:.0f} s; {totals['inference']:,} calls in inference mode, "
        f"{totals['gradients']:,} gradients, {totals['raised']:,} raised on both sides",
        f"operator calls with kernels on: {every:,}; "
        + ", ".join(f"{name} {count:,}" for name, count in answered.items())
        + (f"; answered by kernels: {answered['hits'] / every:.1%}" if every else ""),
        f"answers that differ within their numerics class: {totals['judged']:,}; of those: "
        f"{totals['how']}",
        f"asides: {result.get('asides', {})}",
        f"corpus: {result['corpus']} programs replayed",
        f"disagreements: {len(result['findings'])}, crashes: {result['crashes']}",
    ]
    return "\n".join(lines)


def main() -> int:
    """The exit status."""
    if "--modules" in sys.argv:
        from fuzz.modules.__main__ import main as of_modules

        return of_modules()
    options = parse()
    if options.child is not None:
        Child(options).main()
        return 0
    options.seed = options.seed or int(time.time())
    options.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    print(f"seed {options.seed}, {options.keys} keys, {options.calls:,} calls", flush=True)
    result = {**facts(options), **supervise_jobs(options)}
    print(summary(result))
    for finding in result["findings"]:
        print(f"- {finding['where']}: {finding.get('small', finding['message'])}")
        print(f"  {finding.get('script', '')}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
