"""Transcribes made-up sound with a Whisper of random weights: an encoder, then words one by one."""

from __future__ import annotations

import loop
import torch

SIZES = {
    "tiny": {"width": 16, "layers": 1, "frames": 40, "batch": 1, "words": 4},
    "cpu": {"width": 192, "layers": 3, "frames": 600, "batch": 2, "words": 24},
    "cuda": {"width": 768, "layers": 12, "frames": 3000, "batch": 8, "words": 64},
}
STEPS = {"tiny": 2, "cpu": 70, "cuda": 25}


def main() -> None:
    """Transcribes batch after batch, the last words of each are printed."""
    program = loop.Program(__doc__, SIZES, STEPS)
    transformers = loop.library("transformers")
    transformers.logging.set_verbosity_error()
    size, device = program.size, program.device
    heads = max(1, size.width // 64)
    config = transformers.WhisperConfig(
        vocab_size=2000, d_model=size.width, encoder_layers=size.layers,
        decoder_layers=size.layers, encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * size.width, decoder_ffn_dim=4 * size.width,
        max_source_positions=size.frames // 2, num_mel_bins=80, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval().to(device)
    if device.type == "cuda":
        model = model.to(torch.bfloat16)
    for step in program.each_step():
        features = torch.randn(size.batch, 80, size.frames, device=device, dtype=model.dtype)
        prompt = torch.full((size.batch, 1 + step % 4), 1, device=device)
        with torch.inference_mode():
            # The model's own way to decode, without what Whisper's adds for timestamps.
            heard = model.get_encoder()(features)
            words = transformers.GenerationMixin.generate(
                model, encoder_outputs=heard, decoder_input_ids=prompt,
                max_new_tokens=size.words, do_sample=False,
            )  # fmt: skip
        if program.says(step):
            mean = heard.last_hidden_state.float().abs().mean()
            loop.say(step, mean=mean, words=words.shape[1])
            print("words", *words[0, -4:].tolist())


if __name__ == "__main__":
    main()
