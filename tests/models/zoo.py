"""The models: unmodified classes of their libraries, few and narrow layers, random weights."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """How a model is made, and what it is called with."""

    make: Callable[[], Any]
    inputs: Callable[[], Inputs]


def _images(size: int) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return {"": torch.randn(2, 3, size, size, generator=generator)}


def _tokens(length: int = 12, vocabulary: int = 100) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(5, vocabulary, (2, length), generator=generator)}


def _vision(name: str, size: int = 64, **options: Any) -> Entry:
    def make() -> Any:
        import torchvision

        return getattr(torchvision.models, name)(num_classes=10, **options)

    return Entry(make, functools.partial(_images, size))


def _small_transformer() -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 64, 128, num_classes=10)


def _timm(name: str, size: int = 64) -> Entry:
    def make() -> Any:
        import timm

        return timm.create_model(name, num_classes=10)

    return Entry(make, functools.partial(_images, size))


_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


_LAYERS = {name: value for name, value in _SIZES.items() if name != "vocab_size"}


def _language(kind: str, head: str, **sizes: Any) -> Entry:
    def make() -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**(sizes or _SIZES))
        config.use_cache = False
        # Dropout draws random numbers, which no two runs share.
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop",
                     "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout",
                     "dropout_rate"):  # fmt: skip
            if hasattr(config, name):
                setattr(config, name, 0.0)
        return getattr(transformers, f"{kind}{head}")(config)

    return Entry(make, _tokens)


def _pictures(kind: str, size: int, **sizes: Any) -> Entry:
    def make() -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(num_labels=10, **sizes)
        return getattr(transformers, f"{kind}ForImageClassification")(config)

    return Entry(make, lambda: {"pixel_values": _images(size)[""]})


MODELS: dict[str, Entry] = {
    "torchvision resnet18": _vision("resnet18"),
    "torchvision mobilenet_v3_small": _vision("mobilenet_v3_small", dropout=0.0),
    "torchvision shufflenet_v2_x0_5": _vision("shufflenet_v2_x0_5"),
    "torchvision squeezenet1_1": _vision("squeezenet1_1", dropout=0.0),
    "torchvision VisionTransformer": Entry(_small_transformer, functools.partial(_images, 32)),
    "timm test_resnet": _timm("test_resnet"),
    "timm test_efficientnet": _timm("test_efficientnet"),
    "timm test_convnext": _timm("test_convnext"),
    "timm test_vit": _timm("test_vit", 160),
    "timm test_byobnet": _timm("test_byobnet"),
    "transformers Llama": _language("Llama", "ForCausalLM"),
    "transformers Qwen2": _language("Qwen2", "ForCausalLM", **_SIZES, num_key_value_heads=2),
    "transformers GPT2": _language(
        "GPT2", "LMHeadModel", n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64
    ),
    "transformers Bert": _language("Bert", "ForMaskedLM", **_SIZES, max_position_embeddings=64),
    "transformers DistilBert": _language(
        "DistilBert", "ForMaskedLM", dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=100,
        max_position_embeddings=64,
    ),
    "transformers OPT": _language(
        "OPT", "ForCausalLM", hidden_size=64, ffn_dim=128, num_hidden_layers=2,
        num_attention_heads=4, vocab_size=100, max_position_embeddings=64, word_embed_proj_dim=64,
    ),
    "transformers Electra": _language(
        "Electra", "ForPreTraining", **_SIZES, embedding_size=64, max_position_embeddings=64
    ),
    "transformers Mistral": _language("Mistral", "ForCausalLM", **_SIZES, num_key_value_heads=2),
    "transformers GPTNeoX": _language("GPTNeoX", "ForCausalLM", **_SIZES),
    "transformers Phi": _language("Phi", "ForCausalLM", **_SIZES),
    "transformers Gemma": _language(
        "Gemma", "ForCausalLM", **_SIZES, num_key_value_heads=2, head_dim=16
    ),
    "transformers Olmo": _language("Olmo", "ForCausalLM", **_SIZES),
    "transformers StableLm": _language("StableLm", "ForCausalLM", **_SIZES, num_key_value_heads=2),
    "transformers Roberta": _language(
        "Roberta", "ForMaskedLM", **_SIZES, max_position_embeddings=64
    ),
    "transformers Albert": _language(
        "Albert", "ForMaskedLM", **_SIZES, embedding_size=32, max_position_embeddings=64
    ),
    "transformers ViT": _pictures("ViT", 32, **_LAYERS, image_size=32, patch_size=8),
    "transformers DeiT": _pictures("DeiT", 32, **_LAYERS, image_size=32, patch_size=8),
    "transformers ResNet": _pictures(
        "ResNet", 64, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"
    ),
    "transformers ConvNext": _pictures(
        "ConvNext", 64, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2
    ),
}  # fmt: skip
CHEAP = ("timm test_resnet", "transformers Llama")


def available() -> list[str]:
    """The models whose libraries are installed."""
    return [name for name in MODELS if importlib.util.find_spec(name.partition(" ")[0])]


def build(name: str) -> tuple[Any, Inputs]:
    """(the model, its inputs), the same in every process."""
    torch.manual_seed(0)
    entry = MODELS[name]
    return entry.make(), entry.inputs()


def call(model: Any, inputs: Inputs) -> torch.Tensor:
    """The model's first answer."""
    answer = model(inputs[""]) if "" in inputs else model(**inputs)
    return answer if isinstance(answer, torch.Tensor) else answer[0]
