"""A Llama of transformers whose norms, rotary embeddings and gates are operators of a kernel each.

``bench/operators/llama_operators.py`` measures it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import eagercache
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody names it


@eagercache.op("llama::rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``LlamaRMSNorm``: computed in float32, returned in the dtype of ``x``."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


@eagercache.op("llama::rotary")
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As ``apply_rotary_pos_emb``: of queries and keys (batch, heads, length, width)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = q.size(-1) // 2
    turned_q = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
    turned_k = torch.cat((-k[..., half:], k[..., :half]), dim=-1)
    return q * cos + turned_q * sin, k * cos + turned_k * sin


@eagercache.op("llama::swiglu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of ``LlamaMLP``."""
    return F.silu(gate) * up


@contextlib.contextmanager
def as_operators() -> Iterator[None]:
    """Every Llama of the process calls the operators, in the block."""
    from transformers.models.llama import modeling_llama as llama

    def norm(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def embed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return rotary(q, k, cos, sin)

    def mlp(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    with (
        mock.patch.object(llama.LlamaRMSNorm, "forward", norm),
        mock.patch.object(llama, "apply_rotary_pos_emb", embed),
        mock.patch.object(llama.LlamaMLP, "forward", mlp),
    ):
        yield
