"""Native's fused attention and encoder layers, which Inductor has no text for: their parts.

`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call them where no gradient is needed. A
row of keys that a mask hides whole gives NaN there, and other numbers on the way that is taken with
gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional


def take_encoder_layers() -> None:
    """Has Inductor decompose what it has no text for."""
    from torch._inductor.decomposition import decompositions

    decompositions[torch.ops.aten._transformer_encoder_layer_fwd.default] = _encoder_layer


@functools.cache
def trace_attention_as_called() -> None:
    """Has traces take the way of `nn.MultiheadAttention` that eager takes.

    Imports TorchDynamo, which goes through the parts: the operator's fake result has weights where
    native has None.
    """
    from torch._dynamo.decorators import substitute_in_graph
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch.nn.modules import activation

    for function, told in (
        (torch._native_multi_head_attention, _attention),
        (activation._is_make_fx_tracing, _is_make_fx_tracing),
    ):
        get_torch_obj_rule_map().pop(function, None)
        substitute_in_graph(function, skip_signature_check=True)(told)


def _is_make_fx_tracing() -> bool:
    """What an eager call is told."""
    return False


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """As aten/src/ATen/native/transformers/attention.cpp says; a mask hides where it is not 0."""
    if query is key and key is value:
        parts = functional.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        given = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        parts = tuple(functional.linear(*each) for each in given)
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)
    weights = None
    if mask is None and not need_weights:
        found = functional.scaled_dot_product_attention(q, k, v)
    else:
        scores = (q * (embed_dim // num_heads) ** -0.5) @ k.transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill(_in_four_dimensions(mask, mask_type).bool(), float("-inf"))
        weights = scores.softmax(-1)
        found = weights @ v
        if not need_weights:
            weights = None
        elif average_attn_weights:
            weights = weights.mean(1)
    return functional.linear(found.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def _in_four_dimensions(mask: torch.Tensor, mask_type: int | None) -> torch.Tensor:
    """A mask as it lies over scores: rows of the batch, heads, queries, keys."""
    return mask[:, None, None, :] if mask_type == 1 else mask


def _encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """As aten/src/ATen/native/transformers/transformer.cpp says. A GPU's GELU is another one."""
    if src.device.type != "cpu":
        return NotImplemented

    def norm_1(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attend(x: torch.Tensor) -> torch.Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        found = _attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)
        return found[0]

    def feed(x: torch.Tensor) -> torch.Tensor:
        inner = functional.linear(x, ffn_weight_1, ffn_bias_1)
        inner = functional.gelu(inner) if use_gelu else functional.relu(inner)
        return functional.linear(inner, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed(x))
