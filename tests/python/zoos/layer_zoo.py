"""Modules around layers of torch that keep more than parameters. Importable, as module_zoo.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


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
    """Arguments of a `Tagger`: two steps, each of which is compiled."""
    return (torch.randint(0, 20, (3, 2)),)


def rows() -> tuple[Any, ...]:
    """Three steps of two rows."""
    return (torch.randn(3, 2, 8),)


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


class Between(nn.Module):
    """A layer that is given computed tensors, between others."""

    def __init__(self, layer: nn.Module, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(8)
        self.out = nn.Linear(8, 8)
        change(self.layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.layer(x).tanh() + 0.5)).sin()


class Scaled(nn.Module):
    """A parametrization with a parameter and a plain value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.shift = 2.0, nn.Parameter(torch.tensor(0.5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor + self.shift


class Symmetric(nn.Module):
    """A parametrization that values can be assigned through."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        """What becomes of a value that is assigned."""
        return weight.triu()


def _twice(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "weight", Scaled())
    parametrize.register_parametrization(layer, "bias", Scaled())


def images() -> tuple[Any, ...]:
    """Of a convolution over 8 places."""
    return (torch.randn(2, 4, 8),)


def _doubled(layer: nn.Module, given: object, answer: torch.Tensor) -> torch.Tensor:
    return answer * 2


def _hooked(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(layer)


PARAMETRIZED: dict[str, Case] = {
    "weight_norm": (lambda: Between(nn.Linear(8, 8), parametrizations.weight_norm), rows),
    "weight_norm of a convolution": (
        lambda: Between(nn.Conv1d(4, 4, 3, padding=1), parametrizations.weight_norm),
        images,
    ),
    "spectral_norm": (lambda: Between(nn.Linear(8, 8), parametrizations.spectral_norm), rows),
    "a class of the program": (
        lambda: Between(
            nn.Linear(8, 8),
            lambda layer: parametrize.register_parametrization(layer, "weight", Scaled()),
        ),
        rows,
    ),
    "several": (lambda: Between(nn.Linear(8, 8), _twice), rows),
    "weight_norm by hooks": (lambda: Between(nn.Linear(8, 8), _hooked), rows),
}


@torch.library.custom_op("layer_zoo::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An operator of the program's own, with a gradient."""
    return x * 2.0


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda _, gradient: gradient * 2.0)


class Twice(nn.Linear):
    """A layer that calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(super().forward(x))


# These keep their forwards, for the reasons.
LEFT: dict[str, Case] = {
    "orthogonal": (lambda: Between(nn.Linear(8, 8), parametrizations.orthogonal), rows),
    "hooks": (
        lambda: Between(nn.Linear(8, 8), lambda layer: layer.register_forward_hook(_doubled)),
        rows,
    ),
    "a custom operator": (lambda: Between(Twice(8, 8), lambda _: None), rows),
}
REASONS = {
    "orthogonal": "proxy executor for aten.linalg_",
    "hooks": "hooks",
    "a custom operator": "the custom operator layer_zoo.twice",
}


class Picks(nn.Module):
    """Rows that a call chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.dense(x)[index]) + 0.5).sin()


class Selects(Picks):
    """The same, by an operator that counts nothing from the end."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.dense(x)).index_select(0, index) + 0.5).sin()


class Sends(Picks):
    """What the nodes of a graph send along its edges is added up."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        sent = torch.relu(self.dense(x))[source]
        return (self.out(torch.zeros_like(x).index_add(0, target, sent)) + x).tanh()


class Averages(Picks):
    """The mean of what is sent to each node."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        sent = self.dense(x).index_select(0, source)
        places = target.unsqueeze(-1).expand_as(sent)
        added = torch.zeros_like(x).scatter_add_(0, places, sent)
        degree = torch.zeros(x.size(0)).index_add_(0, target, torch.ones(target.size(0)))
        return (self.out(added) / degree.clamp(min=1).unsqueeze(-1)).tanh()


class Attends(Picks):
    """Attention along the edges of a graph."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        h = self.dense(x)
        weight = (self.out(h)[source] * h[target]).sum(-1, keepdim=True).sigmoid()
        total = torch.zeros(x.size(0), 1).index_add(0, target, weight)
        return torch.zeros_like(h).index_add(0, target, h[source] * (weight / total[target])).sin()


def chosen() -> tuple[Any, ...]:
    """Rows and which of them."""
    return torch.randn(6, 8), torch.randint(0, 6, (10,))


def graph() -> tuple[Any, ...]:
    """Nodes and edges."""
    return torch.randn(6, 8), torch.randint(0, 6, (2, 20))


GRAPHS: dict[str, Case] = {
    "picks": (Picks, chosen),
    "selects": (Selects, chosen),
    "sends": (Sends, graph),
    "averages": (Averages, graph),
    "attends": (Attends, graph),
}


class Freed(nn.Module):
    """Reads the data of its parameter, of what it is given, and of what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x).tanh()
        return h * self.scale.data + x.data.sigmoid() * h.data.mean()


class Follows(nn.Module):
    """Moves its buffers by their data, as codebooks and teachers follow what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("rows", torch.rand(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x).tanh()
        with torch.no_grad():
            self.mean.data.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
            self.rows.data[0].copy_(self.mean)
        return (h + self.mean).sin()


class Clamps(nn.Module):
    """Changes the values of what it made, whose gradient stays that of the values before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        h.data.clamp_(-0.1, 0.1)
        return (h * 2.0).sin()


class Overtakes(Follows):
    """Writes what the backward reads: eager's goes on with the new values, without an error."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).tanh() * self.mean
        self.mean.data.add_(1.0)
        return y.sin()


# Modules that take the `data` of tensors.
DATA: dict[str, Case] = {
    "reads": (Freed, rows),
    "follows": (Follows, rows),
    "clamps": (Clamps, rows),
    "overtakes": (Overtakes, rows),
}
