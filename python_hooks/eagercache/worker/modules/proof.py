"""A module's kernel, compared with its forward in calls with drawn values.

Errors of both are measured beside what the forward gives in float64.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from eagercache.callables.answer_structure import outcome_of
from eagercache.callables.answers import compare_structure
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Identity, identify
from eagercache.callables.module_tensors import own_tensors
from eagercache.callables.module_transfer import Transferred
from eagercache.callables.objects import map_tensors
from eagercache.callables.surroundings import drawing_from
from eagercache.calls.numerics import ProofFailed, is_out_of_memory
from eagercache.calls.replay import Replayed
from eagercache.calls.texts import named_line
from eagercache.worker.graphs.dropout_masks import Draw
from eagercache.worker.modules.answers import Answers
from eagercache.worker.modules.comparison import Moved, compare, equal_answers, tensor_leaves

SEEDS = (0, 1, 2)
SPREADS = (1.0, 1.0, 2.0)

_NARROW = (torch.float16, torch.bfloat16, torch.float32)

Answer = TypeVar("Answer")


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
            objects = rebuilt.objects_of(module, args, kwargs)
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


# ---- in float64 ----------------------------------------------------------------------------------


def wide_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose numbers are float64, in the same tensors wherever it keeps these."""
    with _disable_current_modes():  # as in a block of `_Widened`, whose copy would be half of one
        copied = copy.deepcopy(module)
        for tensor in own_tensors(copied).values():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float64)
    return copied


def in_float64(run: Callable[[], Answer]) -> Answer:
    """What ``run`` gives, which calls a float64 copy of a module. Raises ProofFailed.

    A forward that casts to a dtype by its name (`t.float()`) mixes that with its weights, which may
    raise. So may one that makes a tensor of the least number of its weights' dtype, which the
    default dtype does not hold. It is run again with each such cast made one to float64, and that
    for the default.
    """
    try:
        return run()
    except Exception as error:
        if isinstance(error, ProofFailed) or is_out_of_memory(error):
            raise
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            with _Widened():
                return run()
        except Exception as again:
            if isinstance(again, ProofFailed) or is_out_of_memory(again):
                raise
            raise ProofFailed(
                f"not equal bit for bit, and there is no wider reference: {named_line(again)}"
            ) from again
        finally:
            torch.set_default_dtype(default)


class _Widened(TorchDispatchMode):
    """A block in which operators take and give float64 in the place of narrower floats."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        if func._schema.is_mutable and any(map(_is_narrow, pytree.tree_leaves(given))):
            raise ProofFailed(
                "not equal bit for bit, and its wider reference writes narrow numbers"
            )
        args, kwargs = pytree.tree_map(_widened, given)
        return pytree.tree_map(_widened, func(*args, **kwargs))


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _NARROW


def _widened(value: Any) -> Any:
    if _is_narrow(value):
        return value.to(torch.float64)
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
