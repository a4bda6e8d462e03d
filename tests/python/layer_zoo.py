"""Modules around layers of torch that keep more than parameters. Importable, as module_zoo.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Tagger(nn.Module):
    """A recurrent layer between others; the answer has its last states, too."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layer = kind(8, 6, batch_first=True, **settings)
        self.norm = nn.LayerNorm(self.layer(torch.zeros(1, 1, 8))[0].size(-1))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, last = self.layer(self.table(ids))
        last = last[0] if isinstance(last, tuple) else last
        return self.norm(rows.sin() + 0.5).tanh(), (last * 2.0).sin()


class WithStates(nn.Module):
    """An LSTM that is given its states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
        y, (h, c) = self.layer(x, state)
        return self.out(y.tanh()).sin(), (h + 1.0, c * 2.0)


class Tied(nn.Module):
    """Its recurrent layer shares a weight with another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.RNN(8, 8, nonlinearity="relu"), nn.Linear(8, 8)
        self.out.weight = self.layer.weight_ih_l0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.layer(x)[0]).sin()


def ids() -> tuple[Any, ...]:
    """Arguments of a `Tagger`."""
    return (torch.randint(0, 20, (3, 4)),)


def rows() -> tuple[Any, ...]:
    """Five steps of two rows."""
    return (torch.randn(5, 2, 8),)


def rows_and_states() -> tuple[Any, ...]:
    """The same, with states."""
    return *rows(), (torch.randn(1, 2, 8), torch.randn(1, 2, 8))


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]

RECURRENT: dict[str, Case] = {
    "gru": (lambda: Tagger(nn.GRU), ids),
    "gru of two layers": (lambda: Tagger(nn.GRU, num_layers=2, dropout=0.5), ids),
    "lstm in both directions": (lambda: Tagger(nn.LSTM, bidirectional=True), ids),
    "lstm with projections": (lambda: Tagger(nn.LSTM, proj_size=4), ids),
    "lstm with states": (WithStates, rows_and_states),
    "tied": (Tied, rows),
}
# What of it has no kernel under training, with a part of the reason.
REFUSED_IN_TRAINING = {"gru of two layers": "a recurrent layer drops elements"}
