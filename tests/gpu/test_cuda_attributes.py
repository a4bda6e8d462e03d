"""What forwards leave in attributes of modules, and weights that hooks compute, on a real GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import eagercache
import pytest
import torch
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm

warnings.filterwarnings("ignore", category=FutureWarning)  # of the norms by hooks


@pytest.fixture(autouse=True)
def modules_enabled() -> Iterator[None]:
    options: dict[str, Any] = {"ops": (), "modules": "auto", "choose": "always", "training": True}
    with eagercache.enable(on_miss="wait", **options):
        yield


class State(nn.Module):
    """A recurrent layer that keeps its state, and an average of it in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)
        self.state: torch.Tensor | None = None
        self.register_buffer("average", torch.zeros(8, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The state after ``x``, twice."""
        if self.state is None:
            self.state = torch.zeros_like(x)
        self.state = torch.tanh(self.inner(x) + self.outer(self.state))
        self.average = self.average * 0.9 + self.state.detach()
        return self.state * 2


class Attention(nn.Module):
    """Keeps its weights and what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)
        self.weights: torch.Tensor | None = None
        self.given: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention of ``x`` to itself."""
        self.given = x
        self.weights = torch.softmax(self.query(x) @ self.key(x).mT / 8, -1)
        return self.weights @ x


class Waves(nn.Module):
    """Convolutions with norms by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Conv1d(8, 8, 3, padding=1))
        self.last = spectral_norm(nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both, with a shortcut around the first."""
        return self.last(torch.relu(self.first(x)) + x).tanh()


KINDS = (State, Attention, Waves)


def given(number: int) -> torch.Tensor:
    """What a call gets."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 8, 64, generator=generator).cuda()


def left(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all tensors that are attributes or buffers."""
    found = [value for part in model.modules() for value in vars(part).values()]
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*tensors, *model.buffers())]


def argument(model: nn.Module, number: int) -> torch.Tensor:
    """What this kind of module is called with."""
    return given(number)[0] if isinstance(model, State) else given(number)


def calls(model: nn.Module) -> list[list[torch.Tensor]]:
    """Answers and what is left, of calls without gradients; enough for a replay of a graph."""
    seen = []
    with torch.no_grad():
        for number in range(40):
            seen.append([model(argument(model, number)).clone(), *left(model)])
    return seen


def steps(model: nn.Module) -> list[list[torch.Tensor]]:
    """The same and gradients, of steps of training."""
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for number in range(6):
        if isinstance(model, State):
            model.state = torch.zeros(8, 64, device="cuda")
        loss = model(argument(model, number)).square().mean()
        if isinstance(model, Attention):
            assert model.weights is not None
            loss = loss + model.weights.var()
        optimizer.zero_grad()
        loss.backward()
        slopes = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen.append([loss.detach(), *slopes, *left(model)])
        optimizer.step()
    return seen


@pytest.mark.parametrize("use", [calls, steps])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_leave_what_forwards_do(
    kind: type[nn.Module], use: Callable[[nn.Module], list[list[torch.Tensor]]]
) -> None:
    assert core is not None
    torch.manual_seed(0)
    its = kind().cuda()
    torch.manual_seed(0)
    mine = kind().cuda()
    core.set_answering(False)
    expected = use(its)
    core.set_answering(True)
    seen = use(mine)
    for number, both in enumerate(zip(seen, expected, strict=True)):
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=f"call {number}")
    (row,) = [row for part, row in manager.stats() if part is mine]
    assert row.hits >= len(seen) - 3, explain_module(mine)


def test_a_state_that_a_replay_left_is_nobodys_else() -> None:
    model = State().cuda().eval()
    with torch.no_grad():
        kept = []
        for number in range(60):
            model(argument(model, number))
            state = model.state
            assert state is not None
            kept.append((state, state.clone()))
    assert all(torch.equal(state, then) for state, then in kept)
