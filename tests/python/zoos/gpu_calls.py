"""Tensors of a GPU's tests, answers as lists, and how often kernels answered."""

from __future__ import annotations

from typing import Any

import eagercache
import torch


def rand(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(hash(sizes) & 0xFFFF)
    return torch.randn(sizes, generator=generator, device="cuda").to(dtype)


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def hits(name: str) -> int:
    row = eagercache.stats().operators.get(f"{name} @CUDA")
    return row.hits if row is not None else 0
