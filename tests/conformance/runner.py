"""A run: child processes that are fed units, and a state that a later run goes on from.

The state is a folder: `results.jsonl` has a line for each unit that was done (the last one counts;
a full file is followed by `results-2.jsonl`), `crashes.jsonl` one for each call that ended a child
or did not return. Kernels and logs lie in the work folder, whose loss costs time alone. A child
that crashes is replaced, and its job is done again without the call that it was at.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import units
from .units import Unit

TESTS = Path(__file__).resolve().parent.parent
# Units and samples of one job, whose kernels are compiled together: at most so many.
UNITS_OF_A_JOB = {"cpu": 4, "cuda": 1}
SAMPLES_OF_A_JOB = 24
# A child that is at one call for so long is taken to hang.
HANG_SECONDS = 120.0
# Processes that count samples, at most.
LISTING = 8
# Of the outcome of a call whose compile did not end.
WORKER_LOST = "the compile worker"
# A file of results grows to so many bytes.
FULL_FILE = 12 << 20
# So long before the end of the time children get no more units and compile no more: they compare
# what there is.
LAST_SECONDS = 20.0
# And so long before it a job is one unit: what is cut short has to be done again.
SMALL_JOBS_SECONDS = 60.0
# A unit that was crashed in so often is left.
MOST_CRASHES = 12


@dataclass
class State:
    """What runs left in folders, and where this one adds to it. Thread-safe.

    Attributes:
        folder: of this run and of those that it goes on from.
        others: of runs elsewhere, which are read and not written.
        again: units that are run after all others, though they were done before.
    """

    folder: Path
    others: Sequence[Path] = ()
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    crashes: list[dict[str, Any]] = field(default_factory=list)
    again: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def ineligible(self) -> dict[str, str]:
        """Why overloads that samples reached are not hooked."""
        return {
            name: why
            for folder in (*self.others, self.folder)
            for line in _lines(folder / "ineligible.jsonl")
            for name, why in line.items()
        }

    def about(self, device: str) -> dict[str, Any]:
        """What the first child said of itself."""
        for folder in (self.folder, *self.others):
            for line in _lines(folder / f"about-{device}.json"):
                return line
        return {}

    @staticmethod
    def open(folder: Path, others: Sequence[Path] = ()) -> State:
        """The state in the folders, the first of which is made where it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        state = State(folder, others)
        for one in (*others, folder):
            for line in itertools.chain(*map(_lines, _results(one))):
                known = state.results.get(line["unit"])
                if known is None or one == folder or not known["complete"] or line["complete"]:
                    state.results[line["unit"]] = line
            state.crashes += _lines(one / "crashes.jsonl")
        return state

    def forget_failures(self) -> None:
        """Units in which something failed count as not run, for whoever mended it.

        That is a disagreement, a crash, or the end of a compile worker.
        """
        crashed = {crash["unit"] for crash in self.crashes if crash["side"] == "ours"}
        self.crashes = [crash for crash in self.crashes if crash["unit"] not in crashed]
        for name, result in list(self.results.items()):
            outcomes = {one for counts in result["outcomes"].values() for one in counts}
            lost = any(WORKER_LOST in outcome for outcome in outcomes)
            if result["disagreements"] or result["dropped"] or lost or name in crashed:
                del self.results[name]

    def run_again(self, names: Iterable[str]) -> None:
        """These units count as not run, after what was run for them has changed.

        But for those that this folder has results of: they were run again already.
        """
        there = {line["unit"] for path in _results(self.folder) for line in _lines(path)}
        self.again = {name for name in names if name not in there}
        for name in self.again:
            self.results.pop(name, None)

    def done(self, unit: Unit) -> bool:
        """Whether there is nothing left to do for the unit."""
        return bool(self.results.get(unit.name, {}).get("complete"))

    def add(self, result: dict[str, Any]) -> None:
        """Keeps a unit's result."""
        with self._lock:
            if reasons := result.pop("reasons", None):
                self._append("ineligible.jsonl", reasons)
            self.results[result["unit"]] = result
            files = _results(self.folder)
            full = bool(files) and files[-1].stat().st_size > FULL_FILE
            last = len(files) + 1 if full else max(len(files), 1)
            self._append(f"results-{last}.jsonl" if last > 1 else "results.jsonl", result)

    def add_crash(self, crash: dict[str, Any]) -> None:
        """Keeps what ended a child."""
        with self._lock:
            self.crashes.append(crash)
            self._append("crashes.jsonl", crash)

    def skipped(self, names: Sequence[str]) -> list[str]:
        """The calls of these units that crashed before."""
        with self._lock:
            return [crash["at"] for crash in self.crashes if crash["unit"] in names]

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _results(folder: Path) -> list[Path]:
    """The files of results, oldest first."""
    files = folder.glob("results*.jsonl")
    return sorted(files, key=lambda path: (len(path.name), path.name))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        for text in file:
            with contextlib.suppress(ValueError):  # the last one, where a run was killed
                yield json.loads(text)


@dataclass(frozen=True)
class Options:
    """How to run: see `python -m conformance --help`. ``until`` is a time.time()."""

    device: str
    jobs: int
    until: float | None
    most_kernels: int | None
    samples: int | None = None
    work: Path | None = None  # for kernels and logs; None: the state's folder
    python: str = sys.executable


class _ChildLost(Exception):
    pass


class _Child:
    """One child process; belongs to one thread."""

    def __init__(self, state: State, options: Options, number: int) -> None:
        self._folder = options.work or state.folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self.log = (self._folder / f"child-{options.device}-{number}.log").open("ab")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EAGERCACHE_")}
        paths = [str(TESTS), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment.setdefault("OMP_NUM_THREADS", "1")
        devices = _gpus(options.device)
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        self.process = subprocess.Popen(
            [
                options.python,
                "-m",
                "conformance.child",
                str(self._folder / "store"),
                options.device,
                str(self._folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            start_new_session=True,
        )
        self._pending = b""

    @property
    def at(self) -> Path:
        return self._folder / f"at-{self.process.pid}"

    def send(self, job: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def read(self, until: float) -> dict[str, Any]:
        """The next line. Raises _ChildLost at the process's end, after a hang and at ``until``."""
        assert self.process.stdout is not None
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self.process.stdout.fileno()], [], [], 2.0)
            if ready:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                if not data:
                    self.process.wait()
                    raise _ChildLost(_how_it_ended(self.process.returncode))
                self._pending += data
                continue
            if time.time() > until:
                self.kill()
                raise _ChildLost("")
            with contextlib.suppress(OSError):
                if time.time() - self.at.stat().st_mtime > HANG_SECONDS:
                    self.kill()
                    raise _ChildLost(f"no answer within {HANG_SECONDS:.0f} s")
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def where(self) -> list[str]:
        """Unit, phase, call and side that the child is or was at."""
        with contextlib.suppress(OSError, ValueError):
            place: list[str] = json.loads(self.at.read_text())
            return place
        return ["", "start", "", "native"]

    def last_words(self) -> str:
        """The end of what the child printed."""
        with contextlib.suppress(OSError):
            return Path(self.log.name).read_bytes()[-600:].decode(errors="replace")
        return ""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()
        self.at.unlink(missing_ok=True)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with {code}"


def _gpus(device: str) -> list[str]:
    if device != "cuda":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return named.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(number) for number in range(len(listed.stdout.splitlines()))] or ["0"]


class Run:
    """A run of units. What has no underscore may be read while it goes on."""

    def __init__(self, state: State, chosen: Sequence[Unit], options: Options) -> None:
        self._state = state
        self._options = options
        self.todo = [unit for unit in chosen if not state.done(unit)]
        self.todo.sort(key=lambda unit: unit.name in state.again)
        self.total = len(chosen)
        self.done = len(chosen) - len(self.todo)
        self.kernels = 0
        self.disagreements = 0
        self.stage = ""  # of the last unit done
        self.problem = ""
        self._lock = threading.Lock()
        self._began = time.time()
        self._until = options.until or time.time() + 1e9
        self._finished_here = 0

    @property
    def over(self) -> bool:
        """Whether the time or the kernels are used up."""
        most = self._options.most_kernels
        return time.time() > self._until or (most is not None and self.kernels >= most)

    def seconds_left(self) -> float | None:
        """Until the end, as far as can be told."""
        limit = self._until - time.time() if self._options.until else None
        if not self._finished_here:
            return limit
        pace = (time.time() - self._began) / self._finished_here
        left = pace * (self.total - self.done)
        return left if limit is None else min(left, limit)

    def run(self, progress: Callable[[Run], None]) -> None:
        """Runs until all is done or `over`. Ctrl-C ends the children and passes."""
        threads = [
            threading.Thread(target=self._serve, args=(number,), daemon=True)
            for number in range(self._options.jobs)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                progress(self)
                time.sleep(0.5)
        except KeyboardInterrupt:
            self._until = 0.0
            for thread in threads:
                thread.join(30)
            raise
        progress(self)

    def _take(self) -> list[Unit]:
        with self._lock:
            if self.over or time.time() > self._until - LAST_SECONDS:
                return []
            taken: list[Unit] = []
            samples = 0
            most = UNITS_OF_A_JOB[self._options.device]
            if time.time() > self._until - SMALL_JOBS_SECONDS:
                most = 1
            while self.todo and len(taken) < most:
                first, last = self.todo[0].samples()
                samples += last - first
                if taken and samples > SAMPLES_OF_A_JOB:
                    break
                taken.append(self.todo.pop(0))
            return taken

    def _serve(self, number: int) -> None:
        child: _Child | None = None
        starts = 0
        try:
            while taken := self._take():
                while taken and not self.over:
                    if child is None:
                        child = _Child(self._state, self._options, number)
                        starts += 1
                    try:
                        retire = self._job(child, taken)
                        taken = []
                    except _ChildLost as lost:
                        if not str(lost):
                            return
                        taken = self._lost(child, taken, str(lost))
                        retire = True
                        if starts > 200:
                            self.problem = "children do not stay alive; see their logs"
                            return
                    if retire:
                        child.kill()
                        child = None
        finally:
            if child is not None:
                child.kill()

    def _job(self, child: _Child, taken: list[Unit]) -> bool:
        names = [unit.name for unit in taken]
        child.send(
            {
                "units": names,
                "skip": self._state.skipped(names),
                "until": self._until - LAST_SECONDS,
                "samples": self._options.samples,
            }
        )
        while True:
            line = child.read(self._until)
            if "ready" in line:
                _write_once(self._state.folder / f"about-{self._options.device}.json", line)
            elif "result" in line:
                self._take_result(line["result"])
            elif "done" in line:
                return bool(line["retire"])

    def _take_result(self, result: dict[str, Any]) -> None:
        self._state.add(result)
        with self._lock:
            self.done += bool(result["complete"])
            self._finished_here += 1
            unit = Unit.parse(result["unit"])
            self.stage = f"{unit.stage} {unit.dtype}"
            self.kernels += result["compiled"]
            self.disagreements += len(result["disagreements"]) + result["dropped"]

    def _lost(self, child: _Child, taken: list[Unit], reason: str) -> list[Unit]:
        """Notes the crash; the units to do again, without the one that crashes all the time."""
        unit, phase, label, side = child.where()
        crash = {
            "unit": unit,
            "at": f"{unit}|{phase}|{label}",
            "phase": phase,
            "label": label,
            "side": side,
            "reason": reason,
            "log": child.last_words(),
        }
        self._state.add_crash(crash)
        again = []
        for one in taken:
            if self._state.done(one):
                continue
            crashes = sum(crash["unit"] == one.name for crash in self._state.crashes)
            if one.name == unit and (not label or crashes >= MOST_CRASHES):
                continue  # it would crash again
            again.append(one)
        return again


def _write_once(path: Path, line: Mapping[str, Any]) -> None:
    if not path.exists():
        path.write_text(json.dumps(line), encoding="utf-8")


def list_units(state: State, options: Options, ops: Sequence[str]) -> list[Unit]:
    """Every unit of the named operators of the device (none: of all), and those asked for before.

    A child counts their samples; that is kept with the state.
    """
    asked, counts = _counted(state, options.device)
    if "*" not in asked and not asked.issuperset(ops or ["*"]):
        counts.update(_count_samples(options, ops))
        asked.update(ops or ["*"])
        line = {"asked": sorted(asked), "counts": counts}
        path = state.folder / _counts_file(options.device)
        path.write_text(json.dumps(line, separators=(",", ":")) + "\n", encoding="utf-8")
    return units.all_units(options.device, counts)


def counted_units(state: State, device: str) -> list[Unit]:
    """Every unit of the operators whose samples were counted for the state."""
    return units.all_units(device, _counted(state, device)[1])


def _counts_file(device: str) -> str:
    return f"units-{device}.json"


def _counted(state: State, device: str) -> tuple[set[str], dict[str, dict[str, int]]]:
    """The operators whose samples were asked for ("*": all), and their counts by dtype."""
    asked: set[str] = set()
    counts: dict[str, dict[str, int]] = {}
    for folder in (*state.others, state.folder):
        for line in _lines(folder / _counts_file(device)):
            asked.update(line["asked"])
            for op, known in line["counts"].items():
                counts[op] = {**counts.get(op, {}), **known}
    return asked, counts


def _count_samples(options: Options, ops: Sequence[str]) -> dict[str, dict[str, int]]:
    count = 1 if ops else min(max(options.jobs // 4, 1), LISTING)
    parts = [_start_counting(options, ops, index, count) for index in range(count)]
    counts: dict[str, dict[str, int]] = {}
    for part in parts:
        said, errors = part.communicate()
        if part.returncode != 0:
            raise RuntimeError(f"the operator database cannot be read: {errors[-600:]}")
        counts.update(json.loads(said.splitlines()[-1]))
    return counts


def _start_counting(
    options: Options, ops: Sequence[str], index: int, count: int
) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(TESTS), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    arguments = ("--list", options.device, ",".join(ops), str(index), str(count))
    return subprocess.Popen(
        [options.python, "-m", "conformance.child", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
