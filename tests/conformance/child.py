"""One process of a conformance run: `python -m conformance.child STORE DEVICE FOLDER`.

Reads jobs as JSON lines (`{"units": [...], "skip": [...], "until": ...}`), writes one line for each
unit and one at the end of a job. What it is at stands in FOLDER/at-PID, so that a crash can be put
down to a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import database, forms, units
from .database import BackendCall, Collected, Collector, UserCall
from .items import Item, backend_item, numbers, observed, short, user_item
from .judge import Observation, compare, observe, repeatable, without_memory
from .ours import Compiled, Ours, general

# A process holds at most 2,000 kernel libraries.
MOST_LIBRARIES = 1_500
FORMED_CALLS = 2  # calls of each overload and dtype that are made in other forms
CALLS_OF_AN_OVERLOAD = 12  # of different metadata, in the first stage of a unit
REPEATS = 6  # of native's answer, to see whether it is the same every time
SECONDS_TO_COMPARE = 12.0  # after the last compile
MOST_KEPT = 20  # disagreements of a unit that are kept in full


@dataclass
class Tally:
    """What a unit's result line holds."""

    unit: str
    samples: int = 0
    calls: int = 0
    comparisons: int = 0
    complete: bool = True
    kernels: int = 0
    compiled: int = 0
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    # Of these, what each step took: "samples", "calls" (of both sides), "compile".
    steps: dict[str, float] = field(default_factory=dict)
    hits: int = 0
    # Per overload, how many calls each outcome was met for: "hit", "aside: overlap", ...
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    forms: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    hit_overloads: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # of compiles
    notes: Counter[str] = field(default_factory=Counter)  # see reference.differences
    unrepeatable: Counter[str] = field(default_factory=Counter)
    not_hooked: Counter[str] = field(default_factory=Counter)
    not_plain: Counter[str] = field(default_factory=Counter)
    no_samples: str = ""
    disagreements: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0  # disagreements beyond MOST_KEPT


@dataclass
class Work:
    """A unit, what it has to do, and what became of it."""

    unit: units.Unit
    tally: Tally
    items: list[Item] = field(default_factory=list)
    formed: list[Item] = field(default_factory=list)
    calls: list[BackendCall] = field(default_factory=list)


class Child:
    """Runs units, in groups whose kernels are compiled together."""

    def __init__(self, ours: Ours, folder: Path) -> None:
        self._ours = ours
        self._folder = folder
        self._claims = folder / "claims"
        self._claims.mkdir(exist_ok=True)
        self._at = os.open(folder / f"at-{os.getpid()}", os.O_RDWR | os.O_CREAT, 0o600)
        self._skip: set[str] = set()
        self._samples: int | None = None  # of a unit, at most
        self._explained: set[str] = set()
        self._compiling = 0.0  # seconds that the job has waited for kernels
        # time.time() until which kernels are compiled, and what there is then is compared.
        self._compile_until = self._until = float("inf")

    def run(
        self, names: Sequence[str], skip: Sequence[str], until: float, samples: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """A result line for each unit."""
        self._skip = set(skip)
        self._samples = samples
        self._compile_until, self._until = until, until + SECONDS_TO_COMPARE
        began = time.monotonic()
        works = []
        self._compiling = 0.0
        for name in names:
            self._note(name, "samples", "", "native")
            works.append(self._prepare(units.Unit.parse(name)))
        sampled = time.monotonic()
        self._pass(works, "items", "cold")
        self._pass(works, "items", "compiled")
        for work in works:
            if time.time() > self._compile_until:
                work.tally.complete = False
            elif work.unit.stage == "forms":
                self._note(work.unit.name, "forms", "", "native")
                self._form(work)
        self._pass(works, "formed", "neighbour")
        self._pass(works, "formed", "compiled")
        for work in works:
            if not work.tally.complete and not work.tally.comparisons:
                continue  # the time was over
            now, share = time.monotonic(), len(works)
            work.tally.seconds = round((now - began) / share, 2)
            work.tally.steps = {
                "samples": round((sampled - began) / share, 2),
                "compile": round(self._compiling / share, 2),
                "calls": round((now - sampled - self._compiling) / share, 2),
            }
            yield {**vars(work.tally), "reasons": self._reasons(work.tally)}

    def _reasons(self, tally: Tally) -> dict[str, str]:
        """Why what was met is not hooked; each overload once a process."""
        new = tally.not_hooked.keys() - self._explained
        self._explained |= new
        return {name: self._ours.why_not_hooked(name) for name in new}

    def check(self, calls: Sequence[BackendCall]) -> dict[str, Any]:
        """The result of these calls: cold, then with the kernels of all of them there."""
        work = Work(units.Unit(self._ours.device, "calls", "any", "first"), Tally("calls"))
        work.items = [backend_item(call, index) for index, call in enumerate(calls)]
        self._pass([work], "items", "cold")
        self._pass([work], "items", "compiled")
        return vars(work.tally)

    def _prepare(self, unit: units.Unit) -> Work:
        work = Work(unit, Tally(unit.name))
        op = database.operators()[unit.op]
        try:
            if unit.stage == "errors":
                self._add_errors(work, op)
            else:
                self._add_samples(work, op)
        except Exception as error:  # the database cannot make samples of this dtype here
            work.tally.no_samples = f"{type(error).__name__}: {str(error)[:200]}"
        work.tally.samples = sum(not item.overload for item in work.items)
        work.tally.calls = len(work.items) - work.tally.samples
        return work

    def _add_samples(self, work: Work, op: Any) -> None:
        unit = work.unit
        dtype = getattr(torch, unit.dtype)
        first, last = unit.samples()
        limit = None if unit.stage == "rest" else CALLS_OF_AN_OVERLOAD
        if self._samples is not None:
            last, limit = min(last, first + self._samples), self._samples
        made = database.samples(op, unit.device, dtype, first, last)
        collected = Collected()
        collector = Collector(self._ours.hooked, limit, collected)
        grad = bool((dtype.is_floating_point or dtype.is_complex) and op.supports_autograd)
        for call in database.user_calls(op, made):
            item = replace(user_item(call, grad), values="empty" not in op.name)
            observe(item.make, item.arguments(), backward=item.backward, around=collector)
            if unit.stage != "forms":
                work.items.append(item)
        work.calls = collected.calls
        if unit.stage == "forms":
            work.calls = self._claimed(unit, collected.calls)
        work.items += [backend_item(call, index) for index, call in enumerate(work.calls)]
        work.tally.not_hooked += collected.not_hooked
        work.tally.not_plain += collected.not_plain

    def _add_errors(self, work: Work, op: Any) -> None:
        """The database's erroneous calls, after good ones whose kernels are then there."""
        device = work.unit.device
        if "float32" in map(short, op.supported_dtypes(device)):
            made = database.samples(op, device, torch.float32, 0, 2)
            work.items += [user_item(call, False) for call in database.user_calls(op, made)]
        if op.error_inputs_func is None:
            return
        for index, erroneous in enumerate(op.error_inputs(device)):
            call = UserCall(op, erroneous.sample_input, f"error {index}")
            work.items.append(user_item(call, False))

    def _claimed(self, unit: units.Unit, calls: Sequence[BackendCall]) -> list[BackendCall]:
        """A few calls of each overload that no other unit takes care of."""
        count: Counter[str] = Counter()
        chosen = []
        for call in calls:
            if count[call.name] < FORMED_CALLS and self._claim(unit, call.name):
                count[call.name] += 1
                chosen.append(call)
        return chosen

    def _form(self, work: Work) -> None:
        """Other forms of the unit's calls."""
        for call in work.calls:
            for other in forms.forms(call, self._ours.hooked):
                work.formed.append(backend_item(other, len(work.formed)))

    def _claim(self, unit: units.Unit, overload: str) -> bool:
        path = self._claims / f"{overload.replace('::', '-')}@{unit.dtype}@{unit.device}"
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            os.write(descriptor, unit.name.encode())
            os.close(descriptor)
        return path.read_text() == unit.name

    def _pass(self, works: Sequence[Work], which: str, phase: str) -> None:
        """One round of comparisons; cold ones end with the kernels of all that was called."""
        if phase == "compiled":
            self._ours.forget()
            self._each(works, which, phase)
            return
        with self._ours.recording() as rows:
            self._each(works, which, phase)
        missing = self._ours.without_verdict(rows)
        if not missing:
            return
        self._note(works[0].unit.name, "compile", "", "native")
        began = time.monotonic()
        compiled = self._ours.compile(missing, self._compile_until, self._still_there)
        self._compiling += time.monotonic() - began
        _share(works, compiled)

    def _each(self, works: Sequence[Work], which: str, phase: str) -> None:
        for work in works:
            before = self._ours.hits()
            for item in getattr(work, which):
                if time.time() > self._until:
                    work.tally.complete = False
                    break
                if f"{work.unit.name}|{phase}|{item.label}" not in self._skip:
                    self._check(work, item, phase)
            after = self._ours.hits()
            made = {op: hits - before.get(op, 0) for op, hits in after.items()}
            work.tally.hits += sum(made.values())
            work.tally.hit_overloads.update({op: n for op, n in made.items() if n})

    def _check(self, work: Work, item: Item, phase: str) -> None:
        tally = work.tally
        self._compare(work, item, phase)
        if phase != "compiled":
            return
        if item.form == "sample" and item.label.endswith(("#0", "#1")):
            with torch.inference_mode():
                self._compare(work, item, "inference")
        if not item.overload:
            return
        arguments = item.arguments()
        answer = self._ours.what_answers(partial(item.make, arguments), item.overload)
        outcome = answer.outcome
        if outcome != "hit":
            outcome = f"{outcome}: {general(answer.reason)}"
        tally.outcomes[item.overload][outcome] += 1
        tally.forms[item.form][answer.outcome] += 1

    def _compare(self, work: Work, item: Item, phase: str) -> None:
        name = work.unit.name
        self._note(name, phase, item.label, "native")
        expected = observed(item)
        _end_with_broken_context(expected)
        self._note(name, phase, item.label, "ours")
        actual = observed(item, self._ours.answering())
        _end_with_broken_context(actual)
        self._note(name, phase, item.label, "native")
        work.tally.comparisons += 1
        notes: list[str] = []
        problems = compare(expected, actual, item.wider, notes, values=item.values)
        for note in notes:
            work.tally.notes[f"{item.overload or work.unit.op}: {note.partition(':')[0]}"] += 1
        if not problems:
            return
        if not expected.error:
            again = [observed(item) for _ in range(REPEATS)]
            if not all(repeatable(expected, one) for one in again):
                work.tally.unrepeatable[item.overload or work.unit.op] += 1
                problems = without_memory(expected, actual, again, item.wider)
                if not problems:
                    return
        if len(work.tally.disagreements) >= MOST_KEPT:
            work.tally.dropped += 1
            return
        work.tally.disagreements.append(
            {
                "op": item.overload or work.unit.op,
                "dtype": work.unit.dtype,
                "form": item.form,
                "phase": phase,
                "label": item.label,
                "call": item.text()[:600],
                "problems": [problem[:400] for problem in problems[:4]],
                # For whoever has no such device.
                "numbers": numbers(item.arguments(), expected, actual),
                "entries": self._entries(item) if phase in ("compiled", "inference") else [],
            }
        )

    def _entries(self, item: Item) -> list[dict[str, str]]:
        """What is known of a call's kernels; not while calls are recorded for another purpose."""
        return self._ours.facts_of(partial(item.make, item.arguments()))

    def _note(self, unit: str, phase: str, label: str, side: str) -> None:
        text = json.dumps([unit, phase, label[:300], side]).encode()
        os.pwrite(self._at, text.ljust(1000), 0)

    def _still_there(self) -> None:
        os.utime(self._at)


def _share(works: Sequence[Work], compiled: Compiled) -> None:
    """Puts the kernels down to the group's units, and says whose work is not complete."""
    for index, work in enumerate(works):
        share = len(range(index, compiled.asked, len(works)))
        work.tally.kernels += share
        verdicts = list(compiled.verdicts.values())[index :: len(works)]
        work.tally.compiled += sum(verdict == "kernel" for verdict in verdicts)
        if index == 0:
            work.tally.failures += compiled.failures
        work.tally.cpu_seconds += round(compiled.seconds / len(works), 2)
        if compiled.cut:
            work.tally.complete = False


def _end_with_broken_context(made: Observation) -> None:
    """After an error on the device every later call of the process fails; another one goes on."""
    if made.error and ("CUDA error" in made.error[1] or "device-side assert" in made.error[1]):
        print(made.error[1], file=sys.stderr, flush=True)
        os._exit(77)


def _die_with_parent() -> None:
    """What is left of a killed run would go on compiling."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _count(device: str, ops: str, index: str, count: str) -> dict[str, dict[str, int]]:
    """The samples of every count-th operator that matches one of ``ops`` ("": all), by dtype."""
    patterns = [pattern for pattern in ops.split(",") if pattern]
    names = [
        op
        for op in database.operators()
        if not patterns or any(units.matches(op, pattern) for pattern in patterns)
    ]
    dtypes = (*units.WHOLE_DTYPES, *units.SAMPLED_DTYPES)
    return database.sample_counts(device, dtypes, names[int(index) :: int(count)])


def main(arguments: Sequence[str]) -> int:
    """Serves jobs until the end of the input."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    if arguments[0] == "--list":
        say(_count(*arguments[1:]))
        return 0
    store, device, folder = Path(arguments[0]), arguments[1], Path(arguments[2])
    database.operators()
    ours = Ours(store, device)
    child = Child(ours, folder)
    about = {"ready": os.getpid(), "hooked": len(ours.hooked), "torch": torch.__version__}
    say({**about, "gpu": torch.cuda.get_device_name()} if device == "cuda" else about)
    for line in sys.stdin:
        job = json.loads(line)
        for result in child.run(job["units"], job["skip"], job["until"], job.get("samples")):
            say({"result": result})
        retire = ours.loaded_kernels() > MOST_LIBRARIES
        say({"done": True, "retire": retire})
        if retire:
            break
    ours.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
