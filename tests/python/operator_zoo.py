"""Functions as people write them, made operators, and calls of each.

Imported by tests/gpu; tests/python/test_custom_operators.py puts the text before its programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import eagercache
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody names it

torch.manual_seed(0)
EPS = 1e-6
DEVICE = "cpu"


def normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@eagercache.op("demo::rms_norm_gate")
def rms_norm_gate(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float = EPS) -> Tensor:
    return normalised(x, eps) * weight * F.silu(gate)


@eagercache.op("demo::rotary")
def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = q.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@eagercache.op("demo::swiglu")
def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


@eagercache.op("demo::gates")
def gates(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, dim=-1)
    cell = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


@eagercache.op("demo::z_loss")
def z_loss(logits: Tensor, target: Tensor, z: float = 1e-4) -> Tensor:
    total = torch.logsumexp(logits, -1)
    picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (total - picked + z * total * total).mean()


def tensors(*shapes: Any, dtype: torch.dtype = torch.float32, needs: bool = True) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, device=DEVICE).requires_grad_(needs) for s in shapes]


def calls(
    dtype: torch.dtype = torch.float32, needs: bool = True, n: int = 16
) -> Iterator[tuple[Any, list[Tensor]]]:
    def make(*shapes: Any) -> list[Tensor]:
        return tensors(*shapes, dtype=dtype, needs=needs)

    yield rms_norm_gate, make((n, 32), (n, 32), (32,))
    angles = torch.randn(n, 16, dtype=dtype, device=DEVICE)
    yield rotary, [*make((2, n, 32)), angles.cos(), angles.sin()]
    yield swiglu, make((n, 32), (n, 32))
    yield gates, make((n, 128), (n, 32))
    yield z_loss, [*make((n, 32)), torch.randint(32, (n,), device=DEVICE)]


def outputs(answer: Any) -> list[Tensor]:
    return list(answer) if isinstance(answer, tuple) else [answer]


def gradients(function: Callable[..., Any], args: list[Tensor]) -> Any:
    made = outputs(function(*args))
    wanted = [a for a in args if a.requires_grad]
    return torch.autograd.grad(made, wanted, [torch.ones_like(t) for t in made])


def close(left: Any, right: Any) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-5) and a.stride() == b.stride()
        for a, b in zip(left, right, strict=True)
    )
