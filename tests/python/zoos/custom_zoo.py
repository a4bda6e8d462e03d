"""Modules around operators of a program's own. Importable, as module_zoo.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CALLS: list[tuple[int, ...]] = []
FACTOR = [2.0]
KEPT: list[torch.Tensor] = []
LIMIT = [1e9]


@torch.library.custom_op("custom_zoo::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float, sizes: list[int]) -> torch.Tensor:
    """Counts its calls, and reads a global number."""
    CALLS.append(tuple(x.shape))
    return x * by * FACTOR[0] + float(len(sizes))


@scaled.register_fake
def _(x: torch.Tensor, by: float, sizes: list[int]) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("custom_zoo::halved", mutates_args=())
def halved(x: torch.Tensor, by: float, sizes: list[int]) -> torch.Tensor:
    """Another one that can stand in its place."""
    return x * by * 0.5


@halved.register_fake
def _(x: torch.Tensor, by: float, sizes: list[int]) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("custom_zoo::two", mutates_args=())
def two(
    xs: list[torch.Tensor], dtype: torch.dtype, more: torch.Tensor | None = None, text: str = "+"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes a list and what may be None; raises by what it is given."""
    if xs[0].abs().max().item() > LIMIT[0]:
        raise ValueError("too large")
    total = xs[0] + xs[1] if text == "+" else xs[0]
    return total if more is None else total + more, (xs[0] * 2).to(dtype)


@two.register_fake
def _(
    xs: list[torch.Tensor], dtype: torch.dtype, more: torch.Tensor | None = None, text: str = "+"
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(xs[0]), torch.empty_like(xs[0], dtype=dtype)


@torch.library.custom_op("custom_zoo::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    """Keeps what it is given, which a kernel writes over."""
    KEPT.append(x)
    return x + 1


@keeps.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("custom_zoo::lies", mutates_args=())
def lies(x: torch.Tensor) -> torch.Tensor:
    """Returns other strides than it says."""
    return (x + 1).t().contiguous().t()


@lies.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("custom_zoo::writes", mutates_args=("x",))
def writes(x: torch.Tensor) -> None:
    """Writes its argument."""
    x.add_(1)


LIBRARY = torch.library.Library("custom_zoo", "FRAGMENT")
LIBRARY.define("composite(Tensor x) -> Tensor")
LIBRARY.impl("composite", lambda x: x.sin() * FACTOR[0], "CompositeImplicitAutograd")
OPERATOR = torch.ops.custom_zoo.scaled


class Base(nn.Module):
    """Something worth a kernel on both sides of `middle`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(torch.tanh(self.up(x)) * 0.5 + 1)
        return self.down(nn.functional.gelu(y) + y.sin() * y).tanh() + 1

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        """What a case calls."""
        raise NotImplementedError


class Calls(Base):
    """By the function, and by the name."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.custom_zoo.scaled(scaled(y, 0.5, [1, 2]).sigmoid() + y, 1, [])


class Lists(Base):
    """Lists, None, a dtype, several answers, and raising."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        one, other = two([y * 2, y.relu()], torch.float64, text="+")
        more, _ = torch.ops.custom_zoo.two([one, y], torch.float32, other.float().sin())
        return more * 0.5 + other.float()


class ByAlias(Base):
    """By a global name of the operator."""

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return OPERATOR(y * 2, 1.0, [1])


class Keeps(Base):
    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return keeps(y * 2).sin()


class Lies(Base):
    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return lies(y * 2).sin()


class Writes(Base):
    def middle(self, y: torch.Tensor) -> torch.Tensor:
        z = y * 2
        writes(z)
        return z.sin()


class Composite(Base):
    def middle(self, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.custom_zoo.composite(y * 2)


class Unused(Base):
    def middle(self, y: torch.Tensor) -> torch.Tensor:
        scaled(y, 1.0, [])
        return y.cos()


TAKEN: dict[str, type[Base]] = {kind.__name__: kind for kind in (Calls, Lists, ByAlias, Composite)}
LEFT: dict[str, tuple[type[Base], str]] = {
    "Keeps": (Keeps, "did not answer"),
    "Lies": (Lies, "did not answer"),
    "Writes": (Writes, "writes"),
    "Unused": (Unused, "calls custom operators otherwise than eager"),
}


def make(kind: type[Base], device: str = "cpu") -> Any:
    """An instance with reproducible values."""
    torch.manual_seed(1)
    return kind().eval().to(device)


def example(device: str = "cpu") -> torch.Tensor:
    """Four rows."""
    torch.manual_seed(2)
    return torch.randn(4, 8).to(device)
