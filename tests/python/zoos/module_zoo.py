"""Small modules for the tests of modules. Importable, so that other processes know them."""

from __future__ import annotations

import collections
import logging
import warnings

import torch
from torch import nn


class Block(nn.Module):
    """A residual block with a parameter, a buffer, a submodule and a plain attribute."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.full((width,), 0.25))
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.up(self.norm(x))) * 1.5 + 0.5
        return x + self.scale * torch.tanh(self.down(hidden)) + self.shift


class Mixed(nn.Module):
    """Something that autocast changes, in both directions, and a part that it does not."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            scale = torch.sigmoid(x.sum(-1, keepdim=True))
        hidden = torch.nn.functional.gelu(self.norm(self.up(x)))
        return self.down(hidden * scale), scale * 2.0


class Words(nn.Module):
    """An embedding and something to fuse after it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = self.table(ids) * self.weight
        return rows.sin() + 1, {"squares": rows * rows}


class Picks(nn.Module):
    """What stands at indices that a call gives, and an embedding of what was found there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kinds", torch.arange(10)[None] % 3)
        self.table = nn.Embedding(3, 16)
        self.rows = nn.Parameter(torch.linspace(-1, 1, 160).view(10, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        kinds = torch.gather(self.kinds.expand(ids.size(0), -1), 1, ids)
        chosen = torch.index_select(self.rows, 0, ids[0])
        return (self.table(kinds) * chosen).sin() + 1


class Computes(nn.Module):
    """Indices that are computed of those that a call gives, for reading and for adding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.rows = nn.Parameter(torch.linspace(-1, 1, 320).view(20, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = ids * 2 + 1
        found = self.table(places).sin() + self.rows[places - 20]
        counted = torch.zeros(20, 16).index_add(0, places[0], found[0])
        return counted.scatter_add(0, places[1:, :1].expand(-1, 16), found[1:, 0]).cos()


class Views(nn.Module):
    """Its outputs are parts of one tensor, and one is a part of what is not returned."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.dense(x).sin()
        z = torch.cat([y, y.cos() @ y.t()], 1) + 1
        return y, y[:, 2], y.t(), z[:, 5:]


class Prints(nn.Module):
    """Prints on every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("called")
        return (x * self.weight).sin() + x


LOG = logging.getLogger(__name__)
FEATURES: dict[str, torch.Tensor] = {}
SEEN: collections.deque[int] = collections.deque(maxlen=100)


class Logs(Prints):
    """Tells a logger on every call, which may be listened to later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOG.debug("called with %s", x.shape)
        return (x * self.weight).sin() + x


class Warns(Prints):
    """Warns on every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("called", stacklevel=2)
        return (x * self.weight).sin() + x


class Collects(Prints):
    """Keeps an intermediate in a global table."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        FEATURES["scaled"] = x * self.weight
        return FEATURES["scaled"].sin() + x


class Appends(Prints):
    """Counts its calls in a global deque."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(len(SEEN))
        return (x * self.weight).sin() + x


class Draws(nn.Module):
    """Draws random numbers in eval mode too, by its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + torch.bernoulli(x.sigmoid())


class Remembers(nn.Module):
    """Keeps a list of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.sums: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sums.append(len(self.sums))
        return (x * self.weight).sin() + x


class CountsInBuffer(nn.Module):
    """Writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.sin() + x.cos() * self.calls


class ReturnsInput(nn.Module):
    """Hands its argument back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)


class Chatty(nn.Module):
    """A model that cannot be one kernel, around blocks that can."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward")
        return self.second(self.first(x))


class Setting:
    """What hangs off a module: a configuration."""

    kind: str | None = None


class Settles(nn.Module):
    """Its first call writes into an object, as transformers' do into their configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.setting = Setting()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.setting.kind is None:
            self.setting.kind = "plain"
        return self.block(x) * 2


class TakesObject(nn.Module):
    """Takes an object that is neither a tensor nor a plain value, as a cache is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor, seen: object) -> torch.Tensor:
        return self.inner(x) + 1


class Positions(nn.Module):
    """Words and their positions, of which there are 40; positions as indices in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 16)
        self.places = nn.Embedding(50, 16)
        self.slopes = nn.Parameter(torch.linspace(0.5, 1.5, 42))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(ids.size(1))
        rows = self.words(ids) + self.places(steps)
        rows = rows * self.slopes[steps[None, :] + 2].unsqueeze(-1)
        return rows.sin() + rows[:, steps].mean(1, keepdim=True)


def waves(rows: torch.Tensor) -> torch.Tensor:
    """A function that a forward calls."""
    return rows.sin()


class Branches(nn.Module):
    """Another function above a batch of 20."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(0) > 20:
            return (x * self.weight).cos() - 1
        return waves(x * self.weight) + 1


class Unrolled(nn.Module):
    """A step for each row: another program for each number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(self.weight)
        for row in x:
            state = torch.tanh(state * self.weight + row)
        return state


class Conditional(nn.Module):
    """Branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x * self.weight
        return torch.cond(rows.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos() - 1, (rows,))


class Loops(nn.Module):
    """Goes on until its data says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.while_loop import while_loop

        rows = x * self.weight
        return while_loop(lambda y: y.abs().max() > 0.5, lambda y: (y * 0.5,), (rows,))[0] + 1


def make(name: str) -> nn.Module:
    """An instance with reproducible values, in eval mode."""
    torch.manual_seed(1)
    return {
        kind.__name__: kind
        for kind in (
            Block,
            Words,
            Picks,
            Computes,
            Views,
            Prints,
            Logs,
            Warns,
            Collects,
            Appends,
            Draws,
            Remembers,
            CountsInBuffer,
            ReturnsInput,
            Chatty,
            Settles,
            TakesObject,
            Positions,
            Branches,
            Unrolled,
            Conditional,
            Loops,
        )
    }[name]().eval()


def example(name: str) -> torch.Tensor:
    """An argument for it."""
    generator = torch.Generator().manual_seed(2)
    if name in ("Words", "Picks", "Computes"):
        return torch.randint(0, 10, (4, 6), generator=generator)
    width = 48 if name in ("Block", "Chatty", "Settles") else 8
    return torch.randn(4, width, generator=generator)
