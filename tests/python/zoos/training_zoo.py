"""Modules that are trained, for the tests of kernels with gradients; imported by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class ConvNorm(nn.Module):
    """Writes buffers: batch norm's statistics and counter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)  # whose gradient would be rounding alone
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Attention(nn.Module):
    """A transformer's block, one of whose parameters has no gradient in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 8)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two answers with parameters of their own, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 32)
        self.left = nn.Linear(32, 6)
        self.right = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.gelu(self.up(x)) * torch.sigmoid(self.up(x))
        return {"left": torch.tanh(self.left(hidden)), "right": self.right(hidden)}


class Labelled(nn.Module):
    """A loss of the next token, as language models have it; -100 is none.

    Under autocast it reads only a cast of the first that it gets in a list, and one of a part of
    the second.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.first = nn.Linear(16, 64)

    def forward(self, labels: torch.Tensor, hidden: list[torch.Tensor]) -> torch.Tensor:
        first = self.first(hidden[1][:, 0]).unsqueeze(1)
        scores = nn.functional.gelu(self.up(hidden[0]) + first).float()
        following = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return nn.functional.cross_entropy(scores.view(-1, 64), following.view(-1))


class Noisy(nn.Module):
    """Draws random numbers that are no mask, around a part that draws none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answers = self.inner(x)
        return (answers["left"] * torch.multinomial(torch.ones(6), 6)).sum() + answers[
            "right"
        ].square().sum()


class Dropped(nn.Module):
    """Drops in the ways that models do: elements, and a row's whole path.

    ``native_dropout`` is what dropout is on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 12)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(nn.functional.gelu(self.up(x)))
        hidden, _ = torch.native_dropout(hidden * 2, 0.25, True)
        path = x.new_empty((x.size(0), 1)).bernoulli_(0.75).div_(0.75)
        return torch.tanh(self.down(hidden)) * path + x


class Wrapper(nn.Module):
    """What has hooks in the tests, those of a library too; the module below it has none."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


class Checkpointed(nn.Module):
    """Keeps nothing of its first part and, in the other way that torch has, of its second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Attention()
        self.second = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=True)
        return torch.tanh(checkpoint(self.second, x, use_reentrant=False))


class Held:
    """What a call makes: a list of tensors and how many there are."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.count = 0

    def add(self, keys: torch.Tensor) -> torch.Tensor:
        """What it holds of them."""
        self.keys.append(torch.cat([torch.tensor([]), keys], -1))
        self.count += 1
        return self.keys[-1]


class Caching(nn.Module):
    """Answers with an object that it made, whose tensors have gradients, as a cache has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        held = Held()
        y = held.add(self.first(x).sin()).tanh()
        y = held.add(self.second(y)) * y
        return {"loss": y.square().mean(), "held": held}


def make(name: str) -> nn.Module:
    """An instance with reproducible values, in training mode."""
    torch.manual_seed(1)
    kinds = (ConvNorm, Attention, Mlp, Labelled, Noisy, Dropped, Checkpointed, Caching)
    return {kind.__name__: kind for kind in kinds}[name]().train()


def example(name: str) -> torch.Tensor:
    """An argument for it, whose gradient is wanted too."""
    sizes = {"ConvNorm": (2, 3, 10, 10)}
    sizes |= dict.fromkeys(("Attention", "Checkpointed", "Labelled"), (2, 6, 16))
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sizes.get(name, (4, 12)), generator=generator).requires_grad_()


def labels() -> torch.Tensor:
    """For two rows of six tokens, some of which have none."""
    return torch.tensor([[3, 9, -100, 63, 0, 1], [5, -100, 2, 7, 7, 40]])


def loss_under_autocast(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A call of `Labelled`."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(labels, hidden=[x, x.flip(1)])


def loss_of(answer: Any) -> torch.Tensor:
    """A number that depends on all of an answer, not in the same way."""
    leaves = torch.utils._pytree.tree_leaves(answer)
    return torch.stack([(leaf * (leaf + 0.5)).float().sum() for leaf in leaves]).sum()
