"""A module's kernel, compared with its forward in calls with drawn values."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from eagercache.callables.answer_structure import outcome_of
from eagercache.callables.answers import compare_structure
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Identity, identify
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.objects import CallObjects, map_tensors
from eagercache.callables.replay import Replayed
from eagercache.callables.surroundings import drawing_from
from eagercache.calls.numerics import ProofFailed
from eagercache.worker.graphs.dropout_masks import Draw
from eagercache.worker.modules.answers import Answers
from eagercache.worker.modules.comparison import Moved, compare, equal_answers, tensor_leaves
from eagercache.worker.modules.wide_reference import in_float64, wide_copy

SEEDS = (0, 1, 2)
SPREADS = (1.0, 1.0, 2.0)


def prove_calls(
    rebuilt: Transferred,
    answers: Answers,
    identity: Identity,
    draws: Sequence[tuple[int, float]] = tuple(zip(SEEDS, SPREADS, strict=True)),
) -> tuple[str, float, float]:
    """(numerics, kernel's error, forward's error). Raises ProofFailed."""
    numerics = "bitwise"
    worst = native_worst = 0.0
    for seed, spread in draws:
        draw = partial(rebuilt.draw, seed, spread)
        draw()
        native, drawn = answers.by_forward(), answers.drawn
        answer, where = answers.by_kernel(), f"draw {seed}"
        if answers.drawn != drawn:
            raise ProofFailed("native draws other numbers than the kernel's calls do")
        compare_structure(native, answer, where)
        if equal_answers(native, answer):
            continue
        numerics = "accurate"
        reference = _reference(rebuilt, answers.noise)
        length = _longest_sum(rebuilt, identity)
        moved = Moved(rebuilt, lambda: tensor_leaves(answers.by_forward()), draw)
        for index, (mine, natives, wide) in enumerate(
            zip(tensor_leaves(answer), tensor_leaves(native), reference, strict=True)
        ):
            errors = compare(
                mine, natives, wide, length, f"output {index}, {where}", partial(moved.of, index)
            )
            worst, native_worst = max(worst, errors[0]), max(native_worst, errors[1])
    with torch.inference_mode():
        compare_structure(answers.by_forward(), answers.by_kernel(), "inference mode")
    return numerics, worst, native_worst


def _longest_sum(rebuilt: Transferred, identity: Identity) -> int:
    """How many numbers are added up, at most: by a product, by statistics over all of an input."""
    longest = max((max(s.tensor.size(), default=1) for s in identity.slots), default=2)
    if any(write.of_module for write in rebuilt.writes):
        given = argument_tensors(rebuilt.args, rebuilt.kwargs)
        longest = max([longest, *(tensor.numel() for tensor in given)])
    return longest


def wide(value: Any) -> Any:
    """A tensor of floating-point numbers in float64, detached; anything else itself."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().to(torch.float64)
    return value


def _reference(rebuilt: Transferred, noise: Sequence[Draw]) -> list[torch.Tensor]:
    """The answer of a float64 copy of the module to a call that draws that ``noise``."""

    def run() -> list[torch.Tensor]:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            module = wide_copy(rebuilt.module)
            # Copies, as the forward may write.
            args, kwargs = map_tensors((rebuilt.args, rebuilt.kwargs), lambda t: wide(t).clone())
            objects = CallObjects(args, kwargs)
            with drawing_from(0):  # as `Answers`
                drawn = [one.draw() for one in noise]
            with Replayed(drawn) if drawn else contextlib.nullcontext():
                outcome = outcome_of(module(*args, **kwargs), objects)
            tensors = argument_tensors(args, kwargs)
            slots = identify(module).slots if rebuilt.buffers else ()
            written = (
                slots[write.index].tensor if write.of_module else tensors[write.index]
                for write in rebuilt.writes
            )
            return [*tensor_leaves(outcome), *written]

    return in_float64(run)
