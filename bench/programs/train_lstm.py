"""Trains a language model of two LSTM layers by truncated steps through time."""

from __future__ import annotations

import loop
import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {
    "tiny": {"words": 50, "width": 16, "length": 8, "batch": 2},
    "cpu": {"words": 2000, "width": 128, "length": 24, "batch": 16},
    "cuda": {"words": 10_000, "width": 1024, "length": 64, "batch": 64},
}
STEPS = {"tiny": 6, "cpu": 450, "cuda": 600}

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Words in, the next words' logits out; both ends share their weights."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.recurrent = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, words)
        self.head.weight = self.words.weight
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def forward(self, ids: Tensor, state: State | None) -> tuple[Tensor, State]:
        y, state = self.recurrent(self.drop(self.words(ids)), state)
        return self.head(self.drop(y)), state


def main() -> None:
    """Trains, evaluates, prints."""
    program = loop.Program(__doc__, SIZES, STEPS)
    size, device = program.size, program.device
    # Words that follow from the one before, by a rule with exceptions.
    follows = torch.randperm(size.words)
    streams = [torch.randint(size.words, (size.batch,))]
    for _ in range(2000):
        other = torch.randint(size.words, (size.batch,))
        keep = torch.rand(size.batch) < 0.8
        streams.append(torch.where(keep, follows[streams[-1]], other))
    data = torch.stack(streams, dim=1).to(device)
    model = LanguageModel(size.words, size.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    state: State | None = None
    for step in program.each_step():
        at = step * size.length % (data.shape[1] - size.length - 1)
        if state is not None:
            state = (state[0].detach(), state[1].detach())
        logits, state = model(data[:, at : at + size.length], state)
        wanted = data[:, at + 1 : at + size.length + 1]
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if program.says(step):
            loop.say(step, loss=loss, perplexity=loss.exp())
    model.eval()
    with torch.inference_mode():
        logits, _ = model(data[:, : size.length], None)
    loop.say(program.steps, mean=logits.mean(), spread=logits.std())


if __name__ == "__main__":
    main()
