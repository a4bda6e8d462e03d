"""transformers' Trainer over tokens that are made up: `with_trainer.py RESULT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def examples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of 12 tokens, whose label is whether the first token is in the lower half."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 100, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": (row[0] < 52).long()} for row in tokens]


def main() -> None:
    """Trains, evaluates, and writes what was found."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=16,
    )
    arguments = TrainingArguments(
        output_dir=str(Path(sys.argv[1]).parent / "trainer"),
        max_steps=8,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        warmup_steps=2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(model, arguments, train_dataset=examples(64, 1), eval_dataset=examples(16, 2))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    found = {
        "losses": losses,
        "evaluated": trainer.evaluate()["eval_loss"],
        "parameters": [p.detach().norm().item() for p in model.parameters()],
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
