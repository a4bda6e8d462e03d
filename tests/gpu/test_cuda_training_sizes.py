"""Training on a GPU whose sizes change from step to step: two kernels for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import eagercache
import pytest
import torch
from eagercache.modules.manager import explain_module, manager
from torch import nn

SIZES = ((3, 5), (3, 5), (4, 7), (2, 9), (2, 2), (3, 17), (16, 33), (5, 64), (3, 5), (2, 100))
Example = tuple[torch.Tensor, ...]


class Layers(nn.Module):
    """An argument with a gradient, and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(nn.functional.silu(self.first(x)))))

    @staticmethod
    def example(rows: int, length: int) -> Example:
        return (torch.randn(rows, length, 8, device="cuda", requires_grad=True),)


class Language(nn.Module):
    """Rows that indices choose, attention, a loss beside its logits."""

    dropped = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 64), nn.LayerNorm(64)
        self.mix, self.out, self.head = nn.Linear(64, 192), nn.Linear(64, 64), nn.Linear(64, 50)
        self.places = nn.Embedding(128, 64)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, length = words.shape
        x = self.words(words) + self.places(torch.arange(length, device=words.device))
        query, key, value = self.mix(x).view(rows, length, 3, 2, 32).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropped, is_causal=True
        )
        seen = self.out(seen.transpose(1, 2).reshape(rows, length, 64))
        x = self.norm(x + nn.functional.dropout(seen, self.dropped))
        logits = self.head(nn.functional.gelu(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    @staticmethod
    def example(rows: int, length: int) -> Example:
        words, labels = torch.randint(0, 50, (2, rows, length), device="cuda")
        return words.clone(), labels.clone()


class Copied(Language):
    """Labels that are the words themselves, under autocast; attention draws its masks itself."""

    dropped = 0.1

    @staticmethod
    def example(rows: int, length: int) -> Example:
        words = torch.randint(0, 50, (rows, length), device="cuda")
        return words, words


class Pictures(nn.Module):
    """Buffers that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.filters(x))).mean((2, 3)))

    @staticmethod
    def example(rows: int, length: int) -> Example:
        return (torch.randn(rows, 3, 12, 4 + length, device="cuda"),)


def step(
    module: nn.Module, forward: Callable[..., Any], given: Example, seed: int
) -> tuple[list[Any], torch.Tensor]:
    """Answers, gradients and buffers of one step; the generator's state after its forward."""
    made = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in given}
    given = tuple(made[id(x)] for x in given)
    module.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cuda", torch.bfloat16, enabled=isinstance(module, Copied)):
        answers = forward(*given)
    answers = answers if isinstance(answers, tuple) else (answers,)
    drawn = torch.cuda.get_rng_state()
    answers[0].square().mean().backward()
    gradients = [p.grad for p in module.parameters()] + [x.grad for x in given if x.requires_grad]
    return [*answers, *gradients, *module.buffers()], drawn


@pytest.mark.parametrize("kind", [Layers, Language, Copied, Pictures])
def test_steps_of_many_sizes_share_two_kernels_and_equal_the_forward(kind: Any) -> None:
    torch.manual_seed(0)
    module = kind().cuda()
    other = copy.deepcopy(module)
    with eagercache.enable((), modules=[kind], training=True, on_miss="wait", choose="always"):
        before = eagercache.stats().compiles
        for seed, sizes in enumerate(SIZES):
            given = kind.example(*sizes)
            mine, drawn = step(module, module, given, seed)
            theirs, expected = step(other, other.forward, given, seed)
            assert torch.equal(drawn, expected), sizes
            for own, native in zip(mine, theirs, strict=True):
                assert own.stride() == native.stride(), sizes
                scale = max(1.0, float(native.abs().max())) if kind is Copied else 0.0
                torch.testing.assert_close(own, native, rtol=1e-3, atol=max(1e-4, 0.03 * scale))
        (hits,) = [row.training_hits for part, row in manager.stats() if part is module]
        assert hits >= len(SIZES) - 3, explain_module(module)
        assert eagercache.stats().compiles - before <= 2, explain_module(module)
        _check_second_gradients(module, other)


def _check_second_gradients(module: nn.Module, other: nn.Module) -> None:
    """Of a call with sizes that were not met before."""
    if not isinstance(module, Layers):
        return

    def penalty(own: nn.Module, forward: Callable[..., Any], x: torch.Tensor) -> Any:
        torch.manual_seed(1)
        x = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(forward(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), own.parameters(), allow_unused=True)

    (x,) = module.example(6, 13)
    pairs = list(zip(penalty(module, module, x), penalty(other, other.forward, x), strict=True))
    assert any(mine is not None for mine, _ in pairs)
    for mine, native in pairs:
        assert (mine is None) == (native is None)
        if mine is not None:
            torch.testing.assert_close(mine, native, rtol=1e-3, atol=1e-4)
