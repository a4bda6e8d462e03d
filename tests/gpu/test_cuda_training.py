"""Kernels of whole modules for calls that need gradients, on a real GPU."""

from __future__ import annotations

import copy

import eagercache
import pytest
import torch
from eagercache.modules import explain_module, manager
from torch import nn


def step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The answer of one step, its gradients and the buffers after it; the parameters stay."""
    answer = model(x)
    answer.square().mean().backward()
    found = {"answer": answer.detach()}
    found |= {
        f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    return found


def assert_as_close(
    mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], wide: dict[str, torch.Tensor]
) -> None:
    """At most three times as far from float64's as eager is, or 2 % of the largest number."""
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.stride() == theirs[name].stride(), name
        scale = float(wide[name].abs().max()) or 1.0
        far, native = (
            float((side[name].double() - wide[name]).abs().max()) / scale for side in (mine, theirs)
        )
        if far > max(3 * native, 0.02):
            pytest.fail(
                f"{name}: {far:.3g} of the largest number off, eager {native:.3g}", pytrace=False
            )


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
    other, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    with eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
        mine = [step(model, x) for _ in range(3)]
        hits = [row.training_hits for part, row in manager.stats() if part is model]
        if hits != [2]:
            pytest.fail(f"{hits} hits: {explain_module(model)[0][-300:]}", pytrace=False)
    for kernels in mine:
        assert_as_close(kernels, step(other, x), step(wide, x.double()))


class Mixed(nn.Module):
    """What follows attention in a transformer: dropout before the residual, under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(64, 64), nn.Dropout(0.1), nn.LayerNorm(64)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.norm(self.drop(self.dense(hidden)) + residual)


def mixed_step(model: nn.Module, hidden: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    torch.cuda.manual_seed(seed)
    with torch.autocast("cuda", torch.bfloat16):
        answer = model(hidden, hidden * 2)
    after = torch.rand(4, device="cuda")
    answer.float().square().mean().backward()
    found = {"answer": answer.detach().float(), "drawn after it": after}
    found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def test_dropout_drops_what_eager_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGERCACHE_MODULE_TRAINING", "1")
    torch.manual_seed(0)
    model = Mixed().cuda().train()
    other = copy.deepcopy(model)
    hidden = torch.randn(32, 128, 64, device="cuda", dtype=torch.bfloat16)
    with eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
        mine = [mixed_step(model, hidden, seed) for seed in range(4)]
        hits = [row.training_hits for part, row in manager.stats() if part is model]
        if hits != [3]:
            pytest.fail(f"{hits} hits: {explain_module(model)[0][-300:]}", pytrace=False)
        graph = torch.cuda.CUDAGraph()
        with torch.autocast("cuda", torch.bfloat16), torch.cuda.graph(graph):
            replayed = model(hidden, hidden * 2)
        assert [row.training_hits for part, row in manager.stats() if part is model] == [3]
        again = []
        for _ in range(2):
            graph.replay()
            again.append(replayed.detach().clone())
    for seed, found in enumerate(mine):
        for name, theirs in mixed_step(other, hidden, seed).items():
            far = 0.0 if name == "drawn after it" else 0.02
            torch.testing.assert_close(found[name], theirs, rtol=far, atol=far, msg=name)
    assert not torch.equal(*again)
