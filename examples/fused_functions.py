"""Functions of several operators, as people write them, made operators with a kernel each.

``bench/operators/custom_operators.py`` measures them.
"""

from __future__ import annotations

import eagercache
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody names it

EPS = 1e-6


def normalised(x: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@eagercache.op("demo::rms_norm_gate")
def rms_norm_gate(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float = EPS) -> Tensor:
    """A normalisation, gated."""
    return normalised(x, eps) * weight * F.silu(gate)


@eagercache.op("demo::rotary")
def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding."""
    a, b = q.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@eagercache.op("demo::swiglu")
def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """The gate of a Llama's MLP."""
    return F.silu(x) * y


@eagercache.op("demo::lstm_gates")
def lstm_gates(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """A step of an LSTM behind its matrix products."""
    i, f, g, o = gates.chunk(4, dim=-1)
    cell = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


@eagercache.op("demo::z_loss")
def z_loss(logits: Tensor, target: Tensor, z: float = 1e-4) -> Tensor:
    """A cross-entropy with z-loss."""
    total = torch.logsumexp(logits, -1)
    picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (total - picked + z * total * total).mean()
