"""A module whose operators have no exact answer unless they are made as native makes them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Functions(nn.Module):
    """Each answer is of one operator."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.floor_divide(x, 0.1),
            torch.remainder(x, 2 * math.pi),
            torch.remainder(x, math.inf),
            torch.expm1(x),
            F.elu(x),
            F.selu(x),
            F.celu(x),
            torch.atanh(x),
            torch.erf(x),
            torch.asinh(x),
            torch.acosh(x),
            F.relu6(x),
            x**-0.5,
        )


class Scaled(nn.Module):
    """One that reads a plain attribute, which may be a dual tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((64,), 2.0)
        self.register_buffer("shift", torch.full((64,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * self.scale) + torch.cos(x + self.shift).exp()


# Near 0, far from it, and zeros of both signs, more of them than vectors hold and not a multiple.
VALUES = torch.tensor([
    0.5, 1e-6, -1e-6, 1e-10, -1e-10, 1e-30, 0.0, -0.0, 1e10, -1e10, 1e20, 3.4e38, -3.4e38,
    math.inf, -math.inf, 0.3, -0.3, 2.0, -7.0,
]).repeat(7)  # fmt: skip
