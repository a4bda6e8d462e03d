"""Trains a small GPT on letters that a Markov chain draws, then lets it write."""

from __future__ import annotations

import math

import loop
import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {
    "tiny": {"layers": 2, "heads": 2, "width": 32, "length": 16, "batch": 2},
    "cpu": {"layers": 4, "heads": 4, "width": 128, "length": 64, "batch": 8},
    "cuda": {"layers": 12, "heads": 12, "width": 768, "length": 512, "batch": 16},
}
STEPS = {"tiny": 6, "cpu": 700, "cuda": 300}
LETTERS = 65


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.enter = nn.Linear(width, 3 * width, bias=False)
        self.leave = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.enter(x).split(width, dim=2)
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.leave(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.shrink(functional.gelu(self.grow(self.norm_2(x))))


class Gpt(nn.Module):
    """The whole model; the first and last weights are the same."""

    def __init__(self, layers: int, heads: int, width: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS, bias=False)
        self.head.weight = self.letters.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.letters(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, ids: Tensor, count: int) -> Tensor:
        """Appends so many letters, the likeliest each time."""
        for _ in range(count):
            logits = self(ids[:, -self.length :])
            ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return ids


def text(count: int) -> Tensor:
    """Letters of a chain in which each has a few likely followers."""
    table = torch.softmax(4.0 * torch.randn(LETTERS, LETTERS), dim=1)
    lines = torch.randint(LETTERS, (64,))
    columns = [lines]
    for _ in range(count // 64):
        lines = torch.multinomial(table[lines], 1).squeeze(1)
        columns.append(lines)
    return torch.stack(columns, dim=1).flatten()


def rate(step: int, steps: int) -> float:
    """A warm-up, then a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def main() -> None:
    """Trains, writes, prints."""
    program = loop.Program(__doc__, SIZES, STEPS)
    size = program.size
    data = text(100_000)
    model = Gpt(size.layers, size.heads, size.width, size.length).to(program.device)
    plain = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate(s, program.steps))
    for step in program.each_step():
        starts = torch.randint(len(data) - size.length - 1, (size.batch, 1))
        rows = data[starts + torch.arange(size.length + 1)].to(program.device)
        with program.autocast():
            logits = model(rows[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if program.says(step):
            loop.say(step, loss=loss, norm=norm)
    model.eval()
    written = model.write(data[: size.length // 2].view(1, -1).to(program.device), size.length)
    print("written", *written[0, -16:].tolist())


if __name__ == "__main__":
    main()
