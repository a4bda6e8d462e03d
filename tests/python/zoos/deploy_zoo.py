"""Modules that the tests of artifacts deploy, and the folder of their artifacts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from eagercache import DeployedModule, DeployError, load_module
from torch import nn

HERE = str(Path(__file__).parent)


class Steps(nn.Module):
    """Answers with one number that says of which version its weights are.

    With all of them `v`, the answer to ones is 8 v + v + v (folded: 2 v), times `v` once more. Any
    mixture of versions gives another number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) + (self.shift + self.scale)) * self.scale

    @staticmethod
    def state(version: float) -> dict[str, torch.Tensor]:
        return {
            "first.weight": torch.full((4, 8), version),
            "first.bias": torch.full((4,), version),
            "scale": torch.full((4,), version),
            "shift": torch.full((4,), version),
        }

    @staticmethod
    def answer(version: float) -> float:
        return (8 * version + version + 2 * version) * version


class Tied(nn.Module):
    """Two names for one table, indices, a mapping as answer, and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("order", torch.tensor([3, 1, 2, 0]))
        self.register_buffer("table", torch.randn(4, 8))

    def forward(
        self, ids: torch.Tensor, parts: list[torch.Tensor], *, scale: float = 1.0
    ) -> dict[str, Any]:
        hidden = self.norm(self.embed(ids) + torch.nn.functional.embedding(self.order, self.table))
        hidden = hidden * scale + parts[0] * parts[1]
        return {"logits": self.head(hidden), "hidden": (hidden.tanh(), None)}


def tied_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.tensor([[1, 5, 9, 15]]), [torch.randn(1, 4, 8), torch.randn(8)]), {"scale": 0.5}


class Mixed(nn.Module):
    """What autocast casts: its weights are folded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Noisy(nn.Module):
    """Cannot be deployed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.rand(8)


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """What the command line is given."""
    torch.manual_seed(3)
    return Steps().eval(), (torch.randn(2, 8),)


EXPORT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import torch, eagercache, deploy_zoo
from eagercache.ahead import bundle
from eagercache import DeployError, export_module
from eagercache.deploy.export import one_worker
folder = Path({folder!r})
torch.set_num_threads(1)
bundle.keygen(folder / "own")
bundle.keygen(folder / "other")
key = folder / "own.pem"
torch.manual_seed(1)
rows = {{}}

def export(name, model, args, kwargs=None, **options):
    torch.save(model.state_dict(), folder / (name + ".pt"))
    made = export_module(model, args, kwargs, path=folder / name, key=key, **options)
    rows[name] = dict(bytes=made.bytes, constants=made.constants, folded=made.folded,
                      numerics=made.numerics, proved=made.proved_sizes)

with one_worker():
    steps = deploy_zoo.Steps().eval()
    steps.load_state_dict(steps.state(1.0))
    export("steps", steps, (torch.randn(2, 8),), open_sizes={{"x": [0]}})
    args, kwargs = deploy_zoo.tied_call()
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)]
    export("large", torch.nn.Sequential(*layers).eval(), (torch.zeros(1, 1024),))
    export("tied", deploy_zoo.Tied().eval(), args, kwargs)
    with torch.autocast("cpu", torch.bfloat16):
        export("mixed", deploy_zoo.Mixed().eval(), (torch.randn(4, 16),))

    def refused(*args, **kwargs):
        try:
            export_module(*args, path=folder / "refused", key=kwargs.pop("key", key), **kwargs)
        except DeployError as error:
            return [error.code, str(error)]

    rows["refused"] = dict(
        noisy=refused(deploy_zoo.Noisy().eval(), (torch.randn(2, 8),)),
        name=refused(steps, (torch.randn(2, 8),), open_sizes={{"y": [0]}}),
        dimension=refused(steps, (torch.randn(2, 8),), open_sizes={{"x": [1]}}),
        twice=refused(steps, (torch.randn(1, 8),), open_sizes={{"x": [0]}}),
        key=refused(deploy_zoo.Steps().eval(), (torch.randn(2, 8),), key=folder / "own.pub"),
    )
report(rows=rows, left=sorted(p.name for p in folder.iterdir()))
"""


@dataclass(frozen=True)
class Deployed:
    """A folder of artifacts, and what the program that made them reported."""

    folder: Path
    rows: dict[str, Any]
    left: list[str]

    def load(self, name: str, **options: Any) -> DeployedModule:
        return load_module(self.folder / name, keys=[self.folder / "own.pub"], **options)


def export_all(folder: Path, run: Callable[..., dict[str, Any]]) -> Deployed:
    """Artifacts of the modules above in a folder. ``run``: conftest's `run_program`."""
    code = EXPORT.format(here=HERE, folder=str(folder))
    done = run(code, None, timeout=900, fills=True)
    return Deployed(folder, done["rows"], done["left"])


ONES = torch.ones(2, 8)


def answer_of(module: DeployedModule) -> float:
    """The one number that an answer to ones consists of."""
    (value,) = set(module(ONES).flatten().tolist())
    return value


@contextlib.contextmanager
def refusal(code: str, *texts: str) -> Iterator[None]:
    """The block raises a DeployError of one line with these texts."""
    with pytest.raises(DeployError) as caught:
        yield
    assert caught.value.code == code, caught.value
    message = str(caught.value)
    assert "\n" not in message
    for text in texts:
        assert text in message
