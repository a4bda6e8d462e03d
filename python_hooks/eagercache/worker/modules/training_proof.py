"""A module's answer, its gradients and its buffers, compared with the forward's and autograd's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from eagercache.callables.answers import compare_structure
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_transfer import Transferred
from eagercache.calls.numerics import ProofFailed, same_bits
from eagercache.calls.storage import is_dense
from eagercache.worker.modules.comparison import Moved, compare, equal_answers, tensor_leaves
from eagercache.worker.modules.proof import SEEDS, SPREADS
from eagercache.worker.modules.training_answers import Run, TrainingAnswers
from eagercache.worker.modules.training_watch import Watched, detached


class _Errors:
    """The largest of what the kernels and autograd are off by, over all draws."""

    def __init__(self) -> None:
        self.worst = self.native_worst = 0.0

    def compare(
        self,
        mine: torch.Tensor,
        native: torch.Tensor,
        reference: torch.Tensor,
        length: int,
        where: str,
        moved: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        """One tensor."""
        if same_bits(mine, native):
            return
        errors = compare(mine.detach(), native.detach(), reference.detach(), length, where, moved)
        self.worst = max(self.worst, errors[0])
        self.native_worst = max(self.native_worst, errors[1])


def prove_training(
    answers: TrainingAnswers,
    watched: Watched,
    rebuilt: Transferred,
    draws: Sequence[tuple[int, float]] = tuple(zip(SEEDS, SPREADS, strict=True)),
) -> tuple[str, float, float]:
    """(numerics, kernels' error, autograd's error). Raises ProofFailed."""
    tensors = [slot.tensor for slot in watched.identity.slots]
    tensors += argument_tensors(rebuilt.args, rebuilt.kwargs)
    length = max((tensor.numel() for tensor in tensors), default=2)
    errors = _Errors()
    numerics = "bitwise"
    for seed, spread in draws:
        draw = partial(answers.draw, seed, spread)
        draw()
        alone = answers.alone() if seed == 0 else ()
        for only in (None, *alone):
            where = f"draw {seed}" + ("" if only is None else f", gradient of output {only} alone")
            native, mine = answers.call(False, only), answers.call(True, only)
            _compare_forms(native, mine, where, answers.wanted)
            if _same(native, mine):
                continue
            numerics = "accurate"
            moved = Moved(rebuilt, partial(_moved_tensors, answers, only), draw)
            _compare_values(native, mine, answers.reference(only), length, where, errors, moved)
    return numerics, errors.worst, errors.native_worst


def _compare_forms(native: Run, mine: Run, where: str, wanted: Sequence[torch.Tensor]) -> None:
    compare_structure(native.answer, mine.answer, where)
    if native.versions != mine.versions:
        raise ProofFailed(f"the versions of written buffers differ ({where})")
    if native.drawn != mine.drawn:
        raise ProofFailed(f"other random numbers are drawn ({where})")
    for index, (a, b) in enumerate(zip(mine.gradients, native.gradients, strict=True)):
        if (a is None) != (b is None):
            raise ProofFailed(f"gradient {index} is missing on one side ({where})")
        if a is None or b is None:
            continue
        same = (a.dtype, a.size(), a.device) == (b.dtype, b.size(), b.device)
        if not same or (a.stride() != b.stride() and not _is_laid_out_anew(a, b, wanted[index])):
            raise ProofFailed(f"gradient {index} has other metadata ({where})")


def _is_laid_out_anew(ours: torch.Tensor, eagers: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether autograd lays eager's gradient out as ours when the leaf ``wanted`` takes it.

    One that is a part of another tensor, as `torch.cat` has for what it was given, is copied then
    (torch/csrc/autograd/utils/grad_layout_contract.h).
    """
    layout = wanted.stride() if is_dense(wanted) else torch.empty(wanted.size()).stride()
    return ours.stride() == layout and not is_dense(eagers)


def _same(native: Run, mine: Run) -> bool:
    return (
        equal_answers(detached(native.answer), detached(mine.answer))
        and all(
            a is None or b is None or same_bits(a, b)
            for a, b in zip(native.gradients, mine.gradients, strict=True)
        )
        and all(same_bits(a, b) for a, b in zip(native.buffers, mine.buffers, strict=True))
    )


def _moved_tensors(answers: TrainingAnswers, only: int | None) -> list[torch.Tensor | None]:
    run = answers.call(False, only)
    return [tensor.detach() if tensor is not None else None for _, tensor in _rows(run)]


def _rows(run: Run) -> list[tuple[str, torch.Tensor | None]]:
    """All tensors of a run, and what they are called."""
    return [
        (f"{name} {index}", tensor)
        for name, tensors in (
            ("output", tensor_leaves(run.answer)),
            ("gradient", run.gradients),
            ("buffer", run.buffers),
        )
        for index, tensor in enumerate(tensors)
    ]


def _compare_values(
    native: Run,
    mine: Run,
    reference: Run,
    length: int,
    where: str,
    errors: _Errors,
    moved: Moved,
) -> None:
    for position, ((name, a), (_, b), (_, wider)) in enumerate(
        zip(_rows(mine), _rows(native), _rows(reference), strict=True)
    ):
        if a is None or b is None:
            continue
        if wider is None:
            raise ProofFailed(f"the reference has no {name} ({where})")
        errors.compare(a, b, wider, length, f"{name}, {where}", partial(moved.of, position))
