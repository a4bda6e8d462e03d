"""The models of modules.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# hidden, intermediate, layers, heads, vocabulary
CACHED = (64, 128)  # positions in a cache: from there to there, then back
LLAMA = {"cpu": (256, 688, 4, 8, 1000), "cuda": (2048, 5632, 4, 16, 32000)}


def make_llama(device: str) -> Any:
    """A Llama of transformers of the size for ``device``, for inference, where tensors are made."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, vocabulary = LLAMA[device]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
    )
    return LlamaForCausalLM(config).eval()


def make_model(name: str, device: str) -> tuple[Any, Callable[[Any], Any]]:
    """(model, a call of it or of its compiled form).

    A timm model by name and batch, or a Llama by batch x length: without a cache, or (llama_cache)
    with the library's own, which grows with every call. In float32 on CPU, in bfloat16 on a GPU.
    """
    import torch

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kind, _, size = name.partition(":")
    if not kind.startswith("llama"):
        import timm

        images = torch.randn(int(size or 1), 3, 224, 224, device=device, dtype=dtype)
        return timm.create_model(kind).eval().to(device, dtype), lambda model: model(images)
    from transformers import DynamicCache

    batch, length = (int(part) for part in (size or "1x1").split("x"))
    with torch.device(device):
        model = make_llama(device).to(device, dtype)
    vocabulary = LLAMA[device][-1]
    tokens = torch.randint(0, vocabulary, (batch, length), device=device)
    if kind == "llama":
        return model, lambda called: called(tokens, use_cache=False)
    caches: dict[int, Any] = {}

    def decode(called: Any) -> Any:
        cache = caches.get(id(called))
        if cache is None:
            prompt = torch.randint(0, vocabulary, (batch, CACHED[0]), device=device)
            cache = caches[id(called)] = DynamicCache()
            model(prompt, past_key_values=cache, use_cache=True)
        elif cache.get_seq_length() > CACHED[1]:
            cache.crop(CACHED[0])
        return called(tokens, past_key_values=cache, use_cache=True).logits

    return model, decode
