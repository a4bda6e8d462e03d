"""Imports worlds, makes changes in them, and compares what their modules answer with eager.

Eager is the same call with eagercache's kernels switched off, made after the call that is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch

from fuzz.modules.crossed import crossed
from fuzz.modules.worlds import Change, Source, World, grouped, make, sources, use_of, write

CALLS = 3  # after a change: one that finds it, one that may get a kernel, one more
SETTLING = 8  # calls until a kernel answers, at most


@dataclass
class Outcome:
    """What came of a call: an exception's type, or values; and the states after it."""

    raised: str
    values: list[torch.Tensor | None]
    states: list[Any]

    def difference(self, other: Outcome) -> str:
        """In what it differs from eager's outcome, "" for nothing."""
        if self.raised != other.raised:
            return f"raised {self.raised or 'nothing'}, eager {other.raised or 'nothing'}"
        if len(self.values) != len(other.values):
            return "another number of values"
        for number, (mine, its) in enumerate(zip(self.values, other.values, strict=True)):
            text = _difference(mine, its)
            if text:
                return text if number == 0 else f"gradient {number}: {text}"
        if self.states != other.states:
            return f"states {self.states}, eager's {other.states}"
        return ""


def _difference(mine: torch.Tensor | None, its: torch.Tensor | None) -> str:
    if mine is None or its is None:
        return "" if mine is its else f"{mine} where eager has {its}"
    if mine.dtype != its.dtype or mine.shape != its.shape:
        return f"{mine.dtype} {tuple(mine.shape)}, eager {its.dtype} {tuple(its.shape)}"
    if mine.requires_grad != its.requires_grad:
        return f"requires_grad {mine.requires_grad}, eager {its.requires_grad}"
    mine, its = mine.detach(), its.detach()
    loose = 2e-2 if its.dtype in (torch.bfloat16, torch.float16) else 1e-3
    # What is summed is rounded by what the largest parts are, as gradients of steep functions are.
    largest = its.double().abs().nan_to_num(0, 0, 0).max().item() if its.numel() else 0.0
    if torch.allclose(mine, its, rtol=loose, atol=loose * max(1.0, largest / 4), equal_nan=True):
        return ""
    return f"off by {(mine.double() - its.double()).abs().max().item():.3g}"


class Session:
    """A world that was imported, its module, and calls of it."""

    def __init__(self, world: World) -> None:
        self.world, gradients = world, world.gradients
        self.gradients = gradients
        self.file: ModuleType = importlib.import_module(world.name)
        torch.manual_seed(0)
        self.module: Any = self.file.World().eval()
        self.input = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_(gradients)

    def run(self, statements: str) -> None:
        """Statements of a change, in the file's namespace. Raises what they raise."""
        names = vars(self.file)
        names["self"] = self.module
        try:
            exec(statements, names)
        finally:
            names.pop("self", None)

    def call(self, around: str = "") -> Outcome:
        """One call, and its gradients."""
        states = self._states()
        values: list[torch.Tensor | None] = []
        raised = ""
        try:
            with torch.set_grad_enabled(self.gradients):
                with self._context(around):
                    answer = self.module(self.input)
                values.append(answer)
                if self.gradients and answer.requires_grad:
                    wanted = [self.input, *self.module.parameters()]
                    wanted = [tensor for tensor in wanted if tensor.requires_grad]
                    values += torch.autograd.grad(answer.sum(), wanted, allow_unused=True)
        except Exception as error:
            raised = type(error).__name__
        pairs = zip(states, self._states(), strict=True)
        return Outcome(raised, values, [_moved(before, after) for before, after in pairs])

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A block in training mode, after a call in it."""
        self.module.train()
        try:
            self.call()
            yield
        finally:
            self.module.eval()

    @contextlib.contextmanager
    def _context(self, around: str) -> Iterator[None]:
        if not around:
            yield
            return
        with eval(around, vars(self.file)):
            yield

    def eager(self, around: str = "") -> Outcome:
        """The same without kernels."""
        from eagercache.base.load import core

        assert core is not None
        core.set_answering(False)
        try:
            return self.call(around)
        finally:
            core.set_answering(True)

    def hits(self) -> int:
        """Calls of the module that kernels answered."""
        from eagercache.modules.manager import manager

        return sum(row.hits for part, row in manager.stats() if part is self.module)

    def settle(self) -> bool:
        """Whether a kernel answers, after as many calls as it takes."""
        for _ in range(SETTLING):
            before = self.hits()
            self.call()
            if self.hits() > before:
                return True
        return False

    def why(self) -> str:
        """What eagercache says of the module."""
        from eagercache.modules.manager import explain_module

        lines = explain_module(self.module)
        return lines[0] if lines else "it was not met"

    def _states(self) -> list[Any]:
        names = {**vars(self.file), "self": self.module}
        return [eval(state, names) for state in self.world.states]


def _moved(before: Any, after: Any) -> Any:
    if isinstance(before, int) and isinstance(after, int):
        return after - before
    return None if after is None else round(after, 2)


def forget(world: World) -> None:
    """The next session imports the file, and what it imports of ours, anew."""
    sys.modules.pop(world.name, None)
    sys.modules.pop("world_help", None)


class Judge:
    """Makes changes and writes down what came of them, a line of JSON each."""

    def __init__(self, out: Path) -> None:
        self._out = out.open("a")
        self.counts = dict.fromkeys(("changes", "seen", "answered_after", "not_made", "lost"), 0)
        self.stale = 0

    def say(self, kind: str, **values: Any) -> None:
        """One line."""
        self._out.write(json.dumps({"kind": kind, **values}) + "\n")
        self._out.flush()

    def change(
        self,
        session: Session,
        change: Change,
        *,
        had: bool,
        before: Outcome,
        trains: bool = False,
    ) -> None:
        """Makes one change, judges the next calls, takes it back, and judges again.

        ``trains``: while the module is in training mode, which it leaves before the next call.
        """
        around = "" if change.undo else change.do
        try:
            if not around:
                with session.training() if trains else contextlib.nullcontext():
                    session.run(change.do)
        except Exception:
            self.counts["not_made"] += 1  # of no value that this place can have
            with contextlib.suppress(Exception):
                session.run(change.undo)
            return
        hits = session.hits()
        mine = [session.call(around) for _ in range(CALLS)]
        answered = session.hits() > hits
        eager = session.eager(around)
        self.counts["changes"] += had
        self.counts["seen"] += had and eager.difference(before) != ""
        self.counts["answered_after"] += answered
        self._judge(session, change, mine, eager, "after")
        if around:
            return
        try:
            session.run(change.undo)
        except Exception as error:
            self.say("broken", world=session.world.about, change=change.undo, error=repr(error))
            return
        self._judge(session, change, [session.call()], session.eager(), "when taken back, after")

    def _judge(
        self, session: Session, change: Change, mine: list[Outcome], eager: Outcome, when: str
    ) -> None:
        for number, outcome in enumerate(mine, 1):
            difference = outcome.difference(eager)
            if difference:
                self.stale += 1
                self.say(
                    "stale", world=session.world.about, file=session.world.name, do=change.do,
                    when=f"call {number} {when}", difference=difference, source=change.source,
                    gradients=session.gradients, why=session.why(),
                )  # fmt: skip
                return

    def end(self, phase: str, seconds: float) -> None:
        """The totals."""
        self.say("totals", phase=phase, seconds=seconds, stale=self.stale, **self.counts)


def enable(cache: Path, on_miss: str) -> Any:
    """Kernels of whole modules and no others, at once forgotten what was known of modules."""
    import eagercache
    from eagercache.modules import look_budget, looks

    # A program whose values change as often is left alone; here each change is one of its own.
    looks.MAX_LOOKS = looks.MAX_LOOKS_WITHOUT_HITS = looks.MAX_WAITS_WITHOUT_HITS = 1 << 40
    look_budget.SHARE = 1e9
    torch.set_num_threads(1)
    return eagercache.enable(
        (), modules="auto", training=True, on_miss=on_miss, choose="always", cache_dir=cache
    )


def compile_all(judge: Judge, _: list[World], options: argparse.Namespace) -> None:
    """Fills the store: finds for each source whether a module that reads it has a kernel.

    Sources are tried by the dozen, since a compile takes seconds and a change milliseconds. Of a
    module that is refused the source that the reason names is taken out, or it is halved.
    """
    random = Random(f"{options.seed}:groups")
    known = [source for source in sources() if re.search(options.only, source.name)]
    known += crossed(options.seed, options.crossed, options.only)
    random.shuffle(known)
    waiting = grouped(known, options.size)
    done = 0
    with enable(options.cache, "wait"):
        for number in range(1 << 30):
            if not waiting:
                break
            group = waiting.pop()
            uses = [(source, use_of(random, source)) for source in group]
            world = make(uses, gradients=not options.no_gradients and number % 3 == 2)
            write([world], options.folder)
            importlib.invalidate_caches()
            session = Session(world)
            answers = session.settle()
            why = "" if answers else session.why()
            judge.say(
                "compiled", world=world.as_json(), answers=answers, why=why, sources=len(group)
            )
            if not answers:
                waiting += _parts(group, why)
            done += len(group) if answers or len(group) == 1 else 0
            _show(options, f"{number + 1} modules, {done} of {len(known)} sources")


def _parts(group: list[Source], why: str) -> list[list[Source]]:
    """A refused module's sources, in smaller modules."""
    if len(group) == 1:
        return []
    named = {int(number) for number in re.findall(r"(?<=[A-Za-z]_)(\d+)\b", why)}
    blamed = [index for index in range(len(group)) if index in named]
    if not blamed:
        half = len(group) // 2
        return [group[:half], group[half:]]
    rest = [source for index, source in enumerate(group) if index not in blamed]
    return [*([group[index]] for index in blamed), *([rest] if rest else [])]


def change_all(judge: Judge, worlds: list[World], options: argparse.Namespace) -> None:
    """All changes of all worlds, each while a kernel answers."""
    with enable(options.cache, "native"):
        for number, world in enumerate(worlds):
            session = Session(world)
            random = Random(f"{options.seed}:{world.name}")
            before = session.eager()
            for change in random.sample(world.changes, len(world.changes)):
                if not session.settle():
                    judge.counts["lost"] += 1
                    # Its kernels may be gone for good: a new module has them.
                    session.module = None
                    forget(world)
                    session = Session(world)
                    if not session.settle():
                        judge.say("refused", world=world.about, why=session.why())
                        break
                trains = random.random() < 0.5
                judge.change(session, change, had=True, before=before, trains=trains)
            _show(options, f"change {number + 1} of {len(worlds)}: {judge.counts}")


def change_first(judge: Judge, worlds: list[World], options: argparse.Namespace) -> None:
    """Changes that are made before the first call, with kernels that the store has of others."""
    wait = options.phase == "again"
    random = Random(f"{options.seed}:{options.phase}")
    every = [(number, change) for number, world in enumerate(worlds) for change in world.changes]
    chosen = random.sample(every, min(len(every), options.recompiles)) if wait else every
    with enable(options.cache, "wait" if wait else "native"):
        for done, (number, change) in enumerate(chosen):
            world = worlds[number]
            forget(world)
            session = Session(world)
            before = session.eager()
            judge.change(session, change, had=False, before=before)
            _show(options, f"{options.phase} {done + 1} of {len(chosen)}: {judge.counts}")


PHASES = {
    "compile": compile_all,
    "changes": change_all,
    "first": change_first,
    "again": change_first,
}
_shown = [0.0]


def _show(options: argparse.Namespace, text: str) -> None:
    if not options.quiet and time.monotonic() - _shown[0] > 10:
        _shown[0] = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def run(worlds: list[World], options: argparse.Namespace) -> None:
    """One phase, in this process."""
    sys.path.insert(0, str(options.folder))
    judge = Judge(options.out)
    began = time.monotonic()
    PHASES[options.phase](judge, worlds, options)
    judge.end(options.phase, time.monotonic() - began)
