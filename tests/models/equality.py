"""Whether a model does what it does without kernels.

The measure is a copy of the model in float64, which takes the same steps natively: what kernels
gave may be off by twice what native is off by, or by log2 of the longest dimension in units in the
last place of the tensor's largest number. A whole module may be off by four times what native is
off by when parameters, buffers and inputs move by their last places, as in its proof. Integers must
be equal.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import eagercache
import torch
from eagercache.calls.numerics import move_last_places

from models import zoo

STEPS = 2
MOVED = 4.0
MOVES = 3


@dataclass
class Result:
    """What became of one model.

    Attributes:
        tensors: how many were compared.
        problems: those that are past the measure, with how far.
        ratio: the largest of (kernels' error) / (native's error), of tensors where both are known.
        answered: hits and all other calls of hooked operators, or of modules.
    """

    name: str
    tensors: int = 0
    problems: list[str] = field(default_factory=list)
    ratio: float = 0.0
    answered: Mapping[str, int] = field(default_factory=dict)


def _wide(inputs: zoo.Inputs) -> zoo.Inputs:
    return {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}


def train(model: Any, inputs: zoo.Inputs) -> dict[str, torch.Tensor]:
    """A forward in eval mode and some steps of training; every tensor that this leaves."""
    found: dict[str, torch.Tensor] = {}
    model.eval()
    with torch.no_grad():
        found["eval"] = zoo.call(model, inputs).clone()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        answer = zoo.call(model, inputs)
        loss = answer.square().mean()
        loss.backward()
        found[f"output {step}"] = answer.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and step == 0:
                found[f"gradient {name}"] = parameter.grad.clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"after {name}"] = tensor.detach().clone()
    return found


def infer(model: Any, inputs: zoo.Inputs) -> dict[str, torch.Tensor]:
    """A forward in eval mode."""
    with torch.no_grad():
        return {"eval": zoo.call(model.eval(), inputs).clone()}


def compare(
    result: Result,
    native: Mapping[str, torch.Tensor],
    mine: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    moved: Sequence[Mapping[str, torch.Tensor]] = (),
) -> None:
    """Adds what is past the measure to the result. ``moved``: native where all is a bit off."""
    for name, expected in native.items():
        actual, exact = mine[name], reference[name]
        result.tensors += 1
        if (expected.size(), expected.dtype, expected.stride()) != (
            actual.size(), actual.dtype, actual.stride()
        ):  # fmt: skip
            result.problems.append(f"{name}: other sizes, dtype or strides")
            continue
        if not expected.is_floating_point():
            if not torch.equal(expected, actual):
                result.problems.append(f"{name}: integers differ")
            continue
        if torch.equal(expected, actual):
            continue
        if not bool((torch.isfinite(expected) == torch.isfinite(actual)).all()):
            result.problems.append(f"{name}: finite on one side alone")
            continue
        error, natives = (float((t.double() - exact).abs().max()) for t in (actual, expected))
        largest = max(float(exact.abs().max()), torch.finfo(expected.dtype).tiny)
        unit = torch.finfo(expected.dtype).eps * 2.0 ** math.floor(math.log2(largest))
        longest = max([*expected.size(), *(n for t in native.values() for n in t.size()), 2])
        if natives > 0:
            result.ratio = max(result.ratio, error / natives)
        others = [float((other[name].double() - exact).abs().max()) for other in moved]
        allowed = max(2 * natives, MOVED * max(others, default=0.0), math.log2(longest) * unit)
        if error > allowed:
            result.problems.append(f"{name}: off by {error:.3g}, native {natives:.3g}")


def _counts() -> dict[str, int]:
    stats = eagercache.stats()
    return {n: getattr(stats, n) for n in ("hits", "misses", "pending", "native", "aside")}


def operators(name: str) -> Result:
    """Training with the default operators' kernels, whether they are faster or not."""
    result = Result(name)
    model, inputs = zoo.build(name)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "calls.jsonl"
        with (
            eagercache.enable(devices=["cpu"], on_miss="native", choose="always"),
            eagercache.record(trace),
        ):
            train(copy.deepcopy(model), inputs)
        eagercache.warm_up(trace, device="cpu", choose="always")
    with eagercache.enable(devices=["cpu"], on_miss="native", choose="always"):
        train(copy.deepcopy(model), inputs)  # loads
        before = _counts()
        mine = train(copy.deepcopy(model), inputs)
        result.answered = {n: count - before[n] for n, count in _counts().items()}
    native = train(copy.deepcopy(model), inputs)
    reference = train(copy.deepcopy(model).double(), _wide(inputs))
    compare(result, native, mine, reference)
    return result


def modules(name: str) -> Result:
    """Inference with the kernels of whole modules, or of the largest parts that have one."""
    result = Result(name)
    model, inputs = zoo.build(name)
    model.eval()
    native = infer(model, inputs)
    reference = infer(copy.deepcopy(model).double(), _wide(inputs))
    with eagercache.enable((), devices=["cpu"], on_miss="wait", choose="always", modules="auto"):
        for _ in range(8):
            infer(model, inputs)
            eagercache.wait(600)
        before = _module_hits()
        mine = infer(model, inputs)
        result.answered = {"hits": _module_hits() - before}
    moved = [_infer_moved(model, inputs, seed) for seed in range(MOVES)]
    compare(result, native, mine, reference, moved)
    return result


def _infer_moved(model: Any, inputs: zoo.Inputs, seed: int) -> dict[str, torch.Tensor]:
    """`infer` of a copy that is a last place off everywhere."""
    model, inputs = copy.deepcopy(model), {name: t.clone() for name, t in inputs.items()}
    move_last_places([*model.parameters(), *model.buffers(), *inputs.values()], seed)
    return infer(model, inputs)


def _module_hits() -> int:
    from eagercache.base.load import core

    assert core is not None
    return sum(int(row["hits"]) for row in core.module_stats())


def run(kind: str, names: list[str]) -> Iterator[Result]:
    """One result for each model; one that raises is a problem."""
    for name in names:
        try:
            yield operators(name) if kind == "operators" else modules(name)
        except Exception as error:
            text = str(error).splitlines() or [""]
            yield Result(name, problems=[f"{type(error).__name__}: {text[0][:200]}"])
