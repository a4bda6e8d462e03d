"""The models of the GPU benchmarks: random weights, made-up data, nothing of a model changed.

Training is ResNet-50 (batch 64, 224x224) in either layout, ViT-B (32), BERT (32x256) and GPT-2
(8x512, 12 layers), all under autocast to bfloat16, and a Llama (4x1024) in bfloat16; inference is a
prefill and a decode of that Llama. `tiny` models of the same kinds and on CPU are for trying a
benchmark out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TRAINING = ("resnet50", "resnet50_channels_last", "vit", "bert", "gpt2", "llama_training")
INFERENCE = ("llama_prefill", "llama_decode")

Step = Callable[[], Any]


@dataclass(frozen=True)
class Training:
    """A model to be trained.

    Attributes:
        loss_of: the loss of the model, or of its compiled form.
        optimizer: "sgd" or "adamw".
    """

    model: Any
    loss_of: Callable[[Any], Any]
    optimizer: str

    def step_of(self, network: Any) -> Step:
        """A training step of the model through ``network``, which gives the loss."""
        import torch

        parameters = list(self.model.parameters())
        if self.optimizer == "sgd":
            update: Any = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        else:
            update = torch.optim.AdamW(parameters, lr=1e-4)

        def step() -> Any:
            update.zero_grad(set_to_none=True)
            loss = self.loss_of(network)
            loss.backward()
            update.step()
            return loss

        return step


def training(name: str, device: str = "cuda", *, tiny: bool = False) -> Training:
    """One of `TRAINING`, the same numbers in every process."""
    import torch

    torch.manual_seed(0)
    if name == "llama_training":
        batch, length = (2, 8) if tiny else (4, 1024)
        model, tokens = _llama(batch, length, 2, device, tiny)
        labels = tokens.clone()  # as a collator gives them
        return Training(
            model.train(), lambda called: called(input_ids=tokens, labels=labels).loss, "adamw"
        )
    language = {"bert": _bert, "gpt2": _gpt2}.get(name)
    model, loss_of = language(device, tiny) if language else _vision(name, device, tiny)

    def under_autocast(called: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return loss_of(called)

    optimizer = "sgd" if name.startswith("resnet") else "adamw"
    return Training(model.train(), under_autocast, optimizer)


def make(name: str) -> tuple[Any, Callable[[Any], Step]]:
    """(model, what makes a step of it or of its compiled form), on the GPU."""
    import torch

    if name in TRAINING:
        made = training(name)
        return made.model, made.step_of
    torch.manual_seed(0)
    model, tokens = _llama(*((1, 2048) if name == "llama_prefill" else (4, 1)), 4, "cuda", False)
    model.eval()

    def inference(network: Any) -> Step:
        def step() -> Any:
            with torch.no_grad():
                return network(input_ids=tokens).logits

        return step

    return model, inference


def _vision(name: str, device: str, tiny: bool) -> tuple[Any, Callable[[Any], Any]]:
    import torch
    import torchvision

    batch, size, classes = (2, 32, 10) if tiny else (32 if name == "vit" else 64, 224, 1000)
    if name != "vit":
        made: Any = torchvision.models.resnet18 if tiny else torchvision.models.resnet50
        model = made(num_classes=classes)
    elif tiny:
        model = torchvision.models.VisionTransformer(size, 8, 2, 2, 64, 128, num_classes=classes)
    else:
        model = torchvision.models.vit_b_16()
    images = torch.randn(batch, 3, size, size, device=device)
    model = model.to(device)
    if name.endswith("channels_last"):
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, (batch,), device=device)
    return model, lambda called: torch.nn.functional.cross_entropy(called(images), labels)


def _bert(device: str, tiny: bool) -> tuple[Any, Callable[[Any], Any]]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, int] = {"num_hidden_layers": 6}
    if tiny:
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
        sizes["intermediate_size"] = 64
    model = BertForSequenceClassification(BertConfig(**sizes)).to(device)
    rows, length = (2, 16) if tiny else (32, 256)
    tokens = torch.randint(0, 30000, (rows, length), device=device)
    labels = torch.randint(0, 2, (rows,), device=device)
    return model, lambda called: called(input_ids=tokens, labels=labels).loss


def _gpt2(device: str, tiny: bool) -> tuple[Any, Callable[[Any], Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100} if tiny else {}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)).to(device)
    rows, length = (2, 16) if tiny else (8, 512)
    tokens = torch.randint(0, model.config.vocab_size, (rows, length), device=device)
    labels = tokens.clone()  # as a collator gives them
    return model, lambda called: called(input_ids=tokens, labels=labels).loss


def _llama(batch: int, length: int, layers: int, device: str, tiny: bool) -> tuple[Any, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, heads, vocabulary = (32, 2, 100) if tiny else (2048, 16, 32000)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=64 if tiny else 5632,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    return model, torch.randint(0, vocabulary, (batch, length), device=device)
