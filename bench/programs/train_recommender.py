"""Trains a recommender in the way of DLRM: bags of ids, numbers, and products of all pairs."""

from __future__ import annotations

import itertools

import loop
import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {
    "tiny": {"tables": 3, "rows": 50, "width": 8, "batch": 8},
    "cpu": {"tables": 8, "rows": 20_000, "width": 16, "batch": 512},
    "cuda": {"tables": 26, "rows": 200_000, "width": 64, "batch": 8192},
}
STEPS = {"tiny": 6, "cpu": 500, "cuda": 1000}
NUMBERS = 13
BAG = 4


def layers(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them and after the last."""
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts)


class Recommender(nn.Module):
    """The logit that somebody clicks."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.bottom = layers(NUMBERS, 4 * width, width)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            layers(width + pairs, 8 * width, 4 * width), nn.Linear(4 * width, 1)
        )
        places = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("places", places, persistent=False)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [table(rows) for table, rows in zip(self.tables, ids, strict=True)]
        all_of_them = torch.stack([dense, *found], dim=1)
        products = torch.bmm(all_of_them, all_of_them.transpose(1, 2))
        pairs = products[:, self.places[0], self.places[1]]
        return self.top(torch.cat((dense, pairs), dim=1)).squeeze(1)


def main() -> None:
    """Trains and prints losses."""
    program = loop.Program(__doc__, SIZES, STEPS)
    size, device = program.size, program.device
    model = Recommender(size.tables, size.rows, size.width).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    taste = torch.randn(size.tables, size.rows, device=device)
    weights = torch.randn(NUMBERS, device=device)
    total = torch.zeros((), device=device)
    for step in program.each_step():
        numbers = torch.randn(size.batch, NUMBERS, device=device)
        # Few ids are frequent.
        ids = torch.rand(size.tables, size.batch, BAG, device=device) ** 4 * size.rows
        ids = ids.long()
        liked = torch.stack([taste[t][ids[t]].sum(1) for t in range(size.tables)]).mean(0)
        clicked = torch.sigmoid(liked + numbers @ weights / 4) > torch.rand_like(liked)
        logits = model(numbers.abs().log1p(), ids)
        loss = functional.binary_cross_entropy_with_logits(logits, clicked.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if program.says(step):
            loop.say(step, loss=loss, mean=total / (step + 1))


if __name__ == "__main__":
    main()
