"""Calls that the entries of the fuzzer's store answer: operators in each form, modules, gradients.

Sizes are odd, so that a kernel which is called for other sizes than its own is seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import eagercache
import torch
from torch import nn

OPERATORS = ("var.correction", "_softmax", "add.Tensor", "mul_.Tensor")
DEVICE = os.environ.get("MANIFESTS_DEVICE", "cpu")
FORMS = {
    "cpu": {
        *("bare", "shapes", "scalars", "container", "module", "module_sizes"),
        *("module-training", "module-training-sizes"),
    },
    "cuda": {"cuda", "module", "module-training"},
}[DEVICE]


@eagercache.op("manifests::scaled")
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A function with a library call inside, whose kernel is a container."""
    return torch.relu(x @ w) * 2.0 + 1.0


class Small(nn.Module):
    """Linear layers around what fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 24)
        self.norm = nn.LayerNorm(24)
        self.last = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Another sum for each row."""
        return self.last(self.norm(torch.nn.functional.gelu(self.first(x)))) * 2.0


@dataclass(frozen=True)
class Call:
    """One call, and the same by native alone: both give tensors."""

    name: str
    run: Callable[[], list[torch.Tensor]]


def _data(*sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator).to(DEVICE)


def operator_calls(shift: int = 0) -> list[Call]:
    """Calls with kernels for exact sizes, for all sizes of a class, and for all numbers of one.

    With another ``shift`` the latter two are other calls of their classes.
    """
    x = _data(37, 19)

    def written() -> list[torch.Tensor]:
        y = x.clone()
        return [y.mul_(x)]

    return [
        Call("bare", lambda: [torch.softmax(_data(33, 21), -1)]),
        Call("writes", written),
        Call("function", lambda: [scaled(x, _data(19, 11))]),
        *(
            Call(f"shapes {rows}", lambda rows=rows + shift: [torch.var(_data(rows, 17), -1)])  # type: ignore[misc]
            for rows in (31, 45, 58)
        ),
        *(
            Call(f"scalars {alpha}", lambda alpha=alpha + shift: [torch.add(x, x, alpha=alpha)])  # type: ignore[misc]
            for alpha in (0.25, 0.5, 1.75, 2.5)
        ),
    ]


def module_calls(model: Small, sizes: Sequence[int] = (6, 9, 11)) -> list[Call]:
    """Calls of a module, some of other sizes, without gradients."""

    def forward(rows: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(_data(rows, 13))]

    return [Call(f"module {rows}", lambda rows=rows: forward(rows)) for rows in sizes]  # type: ignore[misc]


def training_calls(model: Small, sizes: Sequence[int] = (7, 15, 22)) -> list[Call]:
    """Calls with their backward, some of other sizes."""

    def run(rows: int) -> list[torch.Tensor]:
        model.zero_grad()
        x = _data(rows, 13).requires_grad_()
        answer = model(x)
        answer.sum().backward()
        gradients: list[Any] = [x.grad, *(parameter.grad for parameter in model.parameters())]
        return [answer.detach(), *gradients]

    return [Call(f"training {rows}", lambda rows=rows: run(rows)) for rows in sizes]  # type: ignore[misc]


def make_model() -> Small:
    """The same every time."""
    torch.manual_seed(3)
    return Small().to(DEVICE)


def same(mine: list[torch.Tensor], native: list[torch.Tensor]) -> bool:
    """Whether two answers are equal but for rounding."""
    return len(mine) == len(native) and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
        for a, b in zip(mine, native, strict=True)
    )
