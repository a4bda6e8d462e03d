"""Training runs with kernels of whole modules beside runs of eager, same seed and same data.

Eager repeats itself bit for bit here, and kernels round otherwise. So five more eager runs start
from weights that differ in their last places, as roundings do, and say how far apart runs of eager
are that a rounding sets apart. A run with kernels starts from the very weights of the first eager
run and may end as far from that as the farthest of the five: in all losses, all answers, the
parameters and the buffers; less than a float32's last place is no distance. Distances are root mean
squares of differences, each tensor's divided by its own root mean square. Counters must be equal.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from eagercache.calls.numerics import move_last_places

from models import zoo

STEPS = 200
EAGER_RUNS = 5
BATCHES = 8  # of made-up data, seen again and again, so that there is something to learn
LAST_PLACE = torch.finfo(torch.float32).eps
QUANTITIES = ("losses", "answers", "parameters", "buffers")
# Runs of a few steps before the one that is looked at: every level of the model is asked meanwhile.
FILLS = 3
FILL_STEPS = 6


@dataclass
class Result:
    """What became of one model.

    Attributes:
        problems: what is past the measure.
        spread: the largest distance of the five eager runs from the first one, by quantity.
        distance: that of the run with kernels.
        farther: how many of the eager runs are as far from the nearest other one as the run with
            kernels is from its nearest: where more than five are asked for. One of six is past the
            other five by chance, and where a rectified unit switches or not, runs end in groups.
        runs: eager runs beside the first; the spread is that of the first five.
        losses: the first loss of the first eager run, its last, and that of the run with kernels.
        answered: calls with gradients by kernels, modules that had one, steps.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    spread: Mapping[str, float] = field(default_factory=dict)
    distance: Mapping[str, float] = field(default_factory=dict)
    losses: tuple[float, float, float] = (0.0, 0.0, 0.0)
    answered: Mapping[str, int] = field(default_factory=dict)
    farther: Mapping[str, int] = field(default_factory=dict)
    runs: int = EAGER_RUNS

    @property
    def ratio(self) -> float:
        """The largest distance in units of what is allowed."""
        return max(
            (self.distance[name] / self.allowed(name) for name in self.distance), default=0.0
        )

    def allowed(self, quantity: str) -> float:
        """How far a run with kernels may be away."""
        return max(self.spread[quantity], LAST_PLACE)


Run = Mapping[str, list[torch.Tensor]]


def train(model: Any, inputs: Sequence[zoo.Inputs], steps: int) -> Run:
    """Some steps of training in place, and what they leave."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses, answers = [], []
    for step in range(steps):
        optimizer.zero_grad()
        answer = zoo.call(model, inputs[step % len(inputs)])
        generator = torch.Generator().manual_seed(step % len(inputs))
        target = torch.randn(answer.size(), generator=generator)
        loss = (answer - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        answers.append(answer.detach())
    return {
        "losses": [torch.stack(losses)],
        "answers": [torch.stack(answers)],
        "parameters": [p.detach() for p in model.parameters()],
        "buffers": [b.detach() for b in model.buffers()],
    }


def _batches(inputs: zoo.Inputs) -> list[zoo.Inputs]:
    """Other values of the same kind: pictures anew, token by token in another order."""
    rows = []
    for seed in range(BATCHES):
        generator = torch.Generator().manual_seed(seed)
        row = {}
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                row[name] = torch.randn(tensor.size(), generator=generator)
            else:
                order = torch.randperm(tensor.numel(), generator=generator)
                row[name] = tensor.flatten()[order].view(tensor.size())
        rows.append(row)
    return rows


def distances(first: Run, other: Run) -> dict[str, float]:
    """How far two runs are apart, by quantity."""
    found = {}
    for name in QUANTITIES:
        total, count = 0.0, 0
        for a, b in zip(first[name], other[name], strict=True):
            if not a.is_floating_point():
                continue
            scale = float(a.double().square().mean().sqrt()) or 1.0
            total += float(((b.double() - a.double()) / scale).square().sum())
            count += a.numel()
        found[name] = math.sqrt(total / count) if count else 0.0
    return found


def _counters_differ(first: Run, other: Run) -> bool:
    return any(
        not torch.equal(a, b)
        for a, b in zip(first["buffers"], other["buffers"], strict=True)
        if not a.is_floating_point()
    )


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """Kernels of whole modules answer calls with gradients, whether they are faster or not."""
    import eagercache

    with eagercache.enable(
        (), devices=["cpu"], on_miss="wait", choose="always", modules="auto", training=True
    ):
        yield


def training(name: str, steps: int = STEPS, runs: int = EAGER_RUNS) -> Result:
    """One model. ``runs`` of more than five say where the run with kernels is among so many."""
    result = Result(name, runs=runs)
    model, inputs = zoo.build(name)
    batches = _batches(inputs)
    native = train(copy.deepcopy(model), batches, steps)
    if any(distances(native, train(copy.deepcopy(model), batches, steps)).values()):
        result.problems.append("eager does not repeat itself")
    spread = {}
    others = []
    for seed in range(runs):
        moved = copy.deepcopy(model)
        move_last_places([*moved.parameters()], seed)
        others.append(train(moved, batches, steps))
    apart = [distances(native, other) for other in others[:EAGER_RUNS]]
    for quantity in QUANTITIES:
        spread[quantity] = max(row[quantity] for row in apart)
    with _kernels():
        for _ in range(FILLS):
            train(copy.deepcopy(model), batches, FILL_STEPS)
        trained = copy.deepcopy(model)
        mine = train(trained, batches, steps)
        result.answered = {**_answered(trained), "steps": steps}
    result.spread, result.distance = spread, distances(native, mine)
    if runs > EAGER_RUNS:
        result.farther = _farther(mine, [native, *others])
    result.losses = (
        float(native["losses"][0][0]),
        float(native["losses"][0][-1]),
        float(mine["losses"][0][-1]),
    )
    if _counters_differ(native, mine):
        result.problems.append("counters differ")
    for quantity, value in result.distance.items():
        if not value <= result.allowed(quantity):
            result.problems.append(
                f"{quantity}: {value:.3g}, eager's spread {spread[quantity]:.3g}"
            )
    return result


def _farther(mine: Run, eager: Sequence[Run]) -> dict[str, int]:
    """How many of the eager runs are as far from the nearest other one as ``mine`` is from one."""

    def nearest(run: Run) -> dict[str, float]:
        rows = [distances(other, run) for other in eager if other is not run]
        return {quantity: min(row[quantity] for row in rows) for quantity in QUANTITIES}

    own, theirs = nearest(mine), [nearest(run) for run in eager]
    return {
        quantity: sum(row[quantity] >= own[quantity] for row in theirs) for quantity in QUANTITIES
    }


def _answered(model: Any) -> dict[str, int]:
    from eagercache.modules.manager import manager

    parts = set(model.modules())
    rows = [row for part, row in manager.stats() if part in parts and row.training_hits]
    return {"hits": sum(row.training_hits for row in rows), "modules": len(rows)}


def table(results: Sequence[Result], steps: int) -> list[str]:
    """The lines of a Markdown table."""
    columns = ["model", "loss: first, last (eager, kernels)", "calls by kernels a step (modules)"]
    columns += [f"{quantity}: kernels / spread" for quantity in QUANTITIES]
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for row in results:
        first, last, mine = row.losses
        cells = [row.name, f"{first:.4f}, {last:.6f}, {mine:.6f}"]
        cells += [f"{row.answered['hits'] / steps:.1f} ({row.answered['modules']})"]
        cells += [
            f"{row.distance[q]:.1e} / {row.spread[q]:.1e}"
            + (f" ({row.farther[q]} of {row.runs + 1} as far)" if row.farther else "")
            for q in QUANTITIES
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
