"""What modules do in training mode: norms that write, numbers that are drawn, answers in parts."""

from __future__ import annotations

import copy

import eagercache
import pytest
import torch
from eagercache.modules.manager import explain_module, manager
from torch import nn


class Normalizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.second, self.last = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.norm(self.first(x)).relu())).sigmoid()


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 64), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, spread = self.encode(x).chunk(2, -1)
        drawn = self.decode(mean + torch.exp(spread / 2) * torch.randn_like(mean))
        return drawn * torch.rand_like(drawn).round(), mean, spread


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.images(x).relu() @ self.texts(y).t()
        return scores, scores.t()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_norms_write_their_statistics_without_gradients(mode: type) -> None:
    """Often enough that the kernel is replayed as a graph where that is faster."""
    torch.manual_seed(0)
    model = Normalizes().cuda().train()
    other = copy.deepcopy(model)
    x = torch.randn(40, 512, 64, device="cuda")
    with mode():
        expected = [other(part) for part in x]
        with eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
            answers = [model(part) for part in x]
            hits = sum(row.hits for part, row in manager.stats() if part is model)
            assert hits >= 38, explain_module(model)
    torch.testing.assert_close(torch.stack(answers), torch.stack(expected), rtol=2e-3, atol=2e-3)
    theirs = dict(other.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, theirs[name], rtol=2e-3, atol=2e-3, msg=name)


def step(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    parts = model(*inputs)
    sum((part.sin() * (i + 1)).sum() for i, part in enumerate(parts)).backward()
    numbers = [*parts, *(p.grad for p in model.parameters()), torch.rand(3, device="cuda")]
    return [number.detach().clone() for number in numbers]


@pytest.mark.parametrize("kind", [Draws, Pairs])
def test_training_draws_and_answers_in_parts_as_eager_does(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().cuda().train()
    other = copy.deepcopy(model)
    inputs = [torch.randn(16, 64, device="cuda") for _ in range(1 + (kind is Pairs))]
    expected = step(other, *inputs)
    with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
        for _ in range(4):
            for mine, theirs in zip(step(model, *inputs), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
        assert [r.training_hits for part, r in manager.stats() if part is model] == [3], (
            explain_module(model)
        )


class Empty(nn.Module):
    """Holds a tensor without elements, which stays on the CPU, and a bank that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.weights = torch.Tensor()
        self.register_buffer("bank", torch.zeros(0, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.cat([self.bank, self.first(x).sin()])).sigmoid()


def test_tensors_without_elements_may_be_on_another_device() -> None:
    torch.manual_seed(0)
    model = Empty().cuda()
    other = copy.deepcopy(model)
    x = torch.randn(16, 64, device="cuda")
    expected = other(x)
    expected.sum().backward()
    with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
        with torch.no_grad():
            answers = [model(x) for _ in range(4)]
        answers += [model(x) for _ in range(4)]
        answers[-1].sum().backward()
        rows = [(row.hits, row.training_hits) for part, row in manager.stats() if part is model]
        assert rows == [(6, 3)] or rows == [(3, 3)], (rows, explain_module(model))
    for answer in answers:
        torch.testing.assert_close(answer, expected, rtol=2e-3, atol=2e-3)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-3, atol=2e-3)
