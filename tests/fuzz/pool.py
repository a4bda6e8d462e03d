"""The keys that programs are drawn from, and their kernels.

Templates are drawn one after the other and made once, natively, while eagercache records which keys
that meets, gradients included; enough have been drawn when so many keys are known. So a pool of 300
keys is the beginning of one of 3,000. `eagercache.warm_up` compiles what the store lacks: what a
killed run has finished stays.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import eagercache
import torch
from eagercache import _C

from fuzz.both_ways import Found, Run, Totals, surroundings
from fuzz.families import draw
from fuzz.judge import Disagreement
from fuzz.programs import Data, Gradient, Make, Op, Pool, Program
from fuzz.templates import Template

# Of templates whose calls kernels answer, and of the others: native is right there by definition,
# but what lies around the call is compared too.
ANSWERED, UNANSWERED = 5.0, 1.0
# Templates whose call raises: at most one in so many is kept.
RAISING = 40


def enable(directory: Path | None, on_miss: str) -> eagercache.Enabled:
    """Hooks every operator that can be; a kernel answers wherever there is one."""
    return eagercache.enable(
        "all", devices=["cpu"], on_miss=on_miss, choose="always", cache_dir=directory
    )


class DisagreementIn(Exception):
    """A template's call disagrees by itself."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.message)
        self.found = found


def make_once(template: Template) -> bool:
    """Makes the template's call, with gradients where it has any; whether it went without error.

    Raises DisagreementIn.
    """
    run = Run("plain", Totals())
    try:
        with surroundings("plain"):
            return _make_once(run, template)
    except Disagreement as found:
        program = Program("plain", tuple(run.steps))
        raise DisagreementIn(Found(program, found.kind, str(found))) from found


def _make_once(run: Run, template: Template) -> bool:
    for number, spec in enumerate(template.specs):
        leaf = template.differentiable and getattr(torch, spec.dtype).is_floating_point
        run.do(Make(spec, Data(64 * number), leaf=leaf))
    run.do(Op(template, tuple(range(len(template.specs)))))
    if run.totals.raised:
        return False
    if template.differentiable:
        for value in [v for v in run.with_gradient() if v >= len(template.specs)]:
            run.do(Make(run.spec_of(value), Data(0)))
            run.do(Gradient(value, run.count() - 1, tuple(run.leaves())))
    return True


def collect(keys: int, seed: int, folder: Path) -> tuple[list[Template], Path]:
    """Templates that meet at most `keys` keys together, and a trace of those, made in `folder`.

    On a store of its own that is empty: native answers all.
    """
    templates: list[Template] = []
    raising = 0
    drawn: set[str] = set()
    path = folder / "calls.jsonl"
    empty = folder / "empty"
    empty.mkdir(mode=0o700)
    _C.forget_recorded_calls()
    with enable(empty, "native"), eagercache.record(path):
        for number in itertools.count():
            # Every so often: counting costs something, and a template has a few keys.
            if number % 16 == 0 and len(_C.recorded_calls()) >= keys - min(48, keys // 4):
                break
            template = draw(Random(f"{seed}:{number}"))
            if repr(template) in drawn:
                continue
            drawn.add(repr(template))
            fine = make_once(template)
            if not fine and raising * RAISING > len(templates):
                continue
            raising += not fine
            templates.append(template)
    return templates, path


def warm(path: Path, directory: Path, progress: Callable[[Any], None], workers: int) -> Any:
    """Compiles what the trace needs and the store lacks."""
    return eagercache.warm_up(
        path, device="cpu", ops="all", choose="always", cache_dir=directory, workers=workers,
        progress=progress,
    )  # fmt: skip


def weigh(templates: Sequence[Template]) -> tuple[Pool, list[Found]]:
    """The pool, by what answers each template's call now; and the calls that disagree at once."""
    weights = []
    found: list[Found] = []
    for template in templates:
        try:
            make_once(template)  # loads
            before = _counts()
            make_once(template)
        except DisagreementIn as disagreement:
            found.append(disagreement.found)
            weights.append(0.0)
            continue
        hits, others = (after - b for after, b in zip(_counts(), before, strict=True))
        weights.append(ANSWERED if hits and hits >= others else UNANSWERED)
    themes: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for index, template in enumerate(templates):
        if weights[index]:
            first = template.specs[0]
            themes.setdefault((first.dtype, first.sizes), []).append(index)
    return Pool(templates, weights, themes), found


def _counts() -> tuple[int, int]:
    stats = eagercache.stats()
    return stats.hits, stats.misses + stats.pending + stats.native + stats.aside


@dataclass
class Prepared:
    """A pool whose kernels are there, its keys' verdicts, and what disagreed on the first call."""

    pool: Pool
    verdicts: dict[str, int]
    found: list[Found]


def prepare(
    keys: int, seed: int, directory: Path, progress: Callable[[Any], None], workers: int
) -> Prepared:
    """Leaves this process enabled, and not answering until `Run` says so."""
    with tempfile.TemporaryDirectory() as folder:
        templates, path = collect(keys, seed, Path(folder))
        report = warm(path, directory, progress, workers)
    verdicts = {
        "keys": len(report.entries),
        "kernels": report.count(verdict="kernel"),
        "native": report.count(verdict="native"),
        "failed": report.count(verdict="failed"),
        "ineligible": report.count(state="ineligible"),
    }
    enable(directory, "native")
    _C.set_answering(False)
    pool, found = weigh(templates)
    return Prepared(pool, verdicts, found)
