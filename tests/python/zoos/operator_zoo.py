"""Calls of the operators of examples/fused_functions.py.

Imported by tests/gpu; test_custom_operators.py puts both texts before its programs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.append(str(EXAMPLES))  # compile workers find them there too

from fused_functions import lstm_gates, rms_norm_gate, rotary, swiglu, z_loss  # noqa: E402

torch.manual_seed(0)
DEVICE = "cpu"


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
    yield lstm_gates, make((n, 128), (n, 32))
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
