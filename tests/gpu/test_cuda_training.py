"""Kernels of whole modules for calls that need gradients, on a real GPU."""

from __future__ import annotations

import copy

import eagercache
import pytest
import torch
from eagercache.modules import explain_module, manager
from torch import nn


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(answer, gradients) of one step; the parameters stay."""
    answer = model(x)
    answer.float().square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return answer.detach(), gradients


def assert_alike(mine: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    """Equal but for bfloat16's rounding, which is as large as the largest number makes it."""
    assert mine.stride() == theirs.stride(), name
    scale = float(theirs.abs().max())
    torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05 * scale, msg=name)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_in_either_layout_train_as_the_forward_does(
    layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGERCACHE_MODULE_TRAINING", "1")
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers).cuda().train()
    model = model.to(torch.bfloat16).to(memory_format=layout)
    x = torch.randn(4, 8, 32, 32, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=layout)
    other = copy.deepcopy(model)
    with eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
        mine = [step(model, x) for _ in range(3)]
        rows = [row for part, row in manager.stats() if part is model]
        assert [row.training_hits for row in rows] == [2], explain_module(model)
    theirs = [step(other, x) for _ in range(3)]
    for (answer, gradients), (expected, wanted) in zip(mine, theirs, strict=True):
        assert_alike(answer, expected, "answer")
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            assert_alike(gradient, wanted[name], name)
    for (name, buffer), expected in zip(model.named_buffers(), other.buffers(), strict=True):
        assert_alike(buffer.float(), expected.float(), name)
