"""Trains a CLIP of random weights on pairs of made-up images and lines."""

from __future__ import annotations

import loop
import torch

SIZES = {
    "tiny": {"width": 16, "layers": 1, "image": 32, "patch": 16, "length": 8, "batch": 2},
    "cpu": {"width": 96, "layers": 3, "image": 64, "patch": 16, "length": 16, "batch": 16},
    "cuda": {"width": 512, "layers": 12, "image": 224, "patch": 16, "length": 77, "batch": 64},
}
STEPS = {"tiny": 4, "cpu": 250, "cuda": 150}
WORDS = 1000


def main() -> None:
    """Trains and prints the loss and the temperature."""
    program = loop.Program(__doc__, SIZES, STEPS)
    transformers = loop.library("transformers")
    transformers.logging.set_verbosity_error()
    size, device = program.size, program.device
    heads = max(1, size.width // 32)
    shared = {
        "hidden_size": size.width, "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers, "num_attention_heads": heads,
    }  # fmt: skip
    words = {
        **shared, "vocab_size": WORDS, "max_position_embeddings": size.length,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    images = {**shared, "image_size": size.image, "patch_size": size.patch}
    config = transformers.CLIPConfig(
        text_config=words, vision_config=images, projection_dim=size.width
    )
    model = transformers.CLIPModel(config).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.98), weight_decay=0.2)
    # The first words of a line say what its image has on average.
    colours = torch.randn(64, 3, 1, 1)
    for step in program.each_step():
        kind = torch.randint(64, (size.batch,))
        pictures = 0.5 * torch.randn(size.batch, 3, size.image, size.image) + colours[kind]
        lines = torch.randint(100, WORDS, (size.batch, size.length))
        lines[:, 0], lines[:, 1], lines[:, -1] = 1, 3 + kind, 2
        with program.autocast():
            answer = model(
                input_ids=lines.to(device), pixel_values=pictures.to(device), return_loss=True
            )
        optimizer.zero_grad(set_to_none=True)
        answer.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if program.says(step):
            right = answer.logits_per_image.argmax(1).cpu() == torch.arange(size.batch)
            loop.say(step, loss=answer.loss, scale=model.logit_scale, right=right.float().mean())


if __name__ == "__main__":
    main()
