"""Calls as a unit of conformance tries them, with what native answered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from eagercache.worker.validation.written import STATISTICS_ON_CUDA

from . import database
from .database import BackendCall, UserCall
from .judge import Observation, observe
from .wider import Wider

# Of what is kept of a disagreement: the elements of a tensor, and their text.
FEW_NUMBERS = 128
MOST_TEXT = 4000


@dataclass
class Item:
    """One call to make on both sides.

    Attributes:
        make: the call, of a copy of its arguments.
        arguments: gives that copy.
        overload: the backend operator, or "" for a call as users make it.
        wider: how to compute floating-point answers with more digits.
        values: the answer holds some; what "empty" makes is nobody's.
    """

    label: str
    form: str
    make: Callable[[Any], Any]
    arguments: Callable[[], Any]
    text: Callable[[], str]
    overload: str = ""
    backward: bool = False
    wider: Wider | None = None
    values: bool = True


def numbers(arguments: Any, expected: Observation, actual: Observation) -> dict[str, str]:
    """What small tensors hold: those that were given, native's answers and the others.

    What was given, as it was left, follows the answers.
    """
    given = filter(database.is_plain, database.tensors_in(arguments))
    sides = {"given": given, "native": expected.all_values(), "here": actual.all_values()}
    return {
        name: str([t.tolist() for t in tensors if t.numel() <= FEW_NUMBERS])[:MOST_TEXT]
        for name, tensors in sides.items()
    }


def observed(item: Item, around: AbstractContextManager[Any] | None = None) -> Observation:
    torch.manual_seed(database.SEED)
    return observe(item.make, item.arguments(), backward=item.backward, around=around)


def user_item(call: UserCall, grad: bool) -> Item:
    def make(arguments: Any) -> Any:
        given, args, kwargs = arguments
        return call.function(given, *args, **kwargs)

    def compute(arguments: Any) -> list[torch.Tensor]:
        made = observe(make, database.copy(arguments), backward=grad)
        raise_again(made)
        return made.all_values()

    return Item(
        label=f"user {call.label}",
        form="user",
        make=make,
        arguments=call.arguments,
        text=lambda: f"{call.function} {call.sample}",
        backward=grad,
        wider=Wider(compute, call.arguments(), pointwise=False, composed=True),
    )


def backend_item(call: BackendCall, index: int) -> Item:
    def make(arguments: Any) -> Any:
        args, kwargs = arguments
        return call.func(*args, **kwargs)

    def compute(arguments: Any) -> list[torch.Tensor]:
        made = observe(make, database.copy(arguments))
        raise_again(made)
        return made.all_values() if statistics else made.values

    def compute_terms(arguments: Any) -> list[torch.Tensor]:
        unreduced = replace(call, args=arguments[0], kwargs=arguments[1]).unreduced()
        return compute((unreduced.args, unreduced.kwargs)) if unreduced is not None else []

    given = database.tensors_in((call.args, dict(call.kwargs)))
    statistics = call.name in STATISTICS_ON_CUDA and any(t.is_cuda for t in given)
    wider = None
    channels = 0
    if "batch_norm" in call.name and isinstance(call.args[0], torch.Tensor):
        channels = call.args[0].size(1) if call.args[0].dim() > 1 else 0
    if not call.func._schema.is_mutable:
        wider = Wider(
            compute,
            (call.args, dict(call.kwargs)),
            pointwise=torch.Tag.pointwise in call.func.tags,
            channels=channels,
            terms=compute_terms if call.unreduced() is not None else None,
            statistics=statistics,
        )
    return Item(
        label=f"{call.name} {call.form} #{index}",
        form=call.form,
        make=make,
        arguments=lambda: database.copy((call.args, dict(call.kwargs))),
        text=call.describe,
        overload=call.name,
        wider=wider,
    )


def raise_again(made: Observation) -> None:
    if made.error:
        raise RuntimeError(made.error[1])


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
