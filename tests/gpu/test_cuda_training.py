"""Kernels of whole modules in training on a real GPU, and of calls without gradients there."""

from __future__ import annotations

import copy

import eagercache
import pytest
import torch
from eagercache.modules.manager import explain_module, manager
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


def three_steps(model: nn.Module, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """What `step` gives three times; the second and third are kernels'."""
    with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
        mine = [step(model, x) for _ in range(3)]
        hits = [row.training_hits for part, row in manager.stats() if part is model]
        if hits != [2]:
            pytest.fail(f"{hits} hits: {explain_module(model)[0][-300:]}", pytrace=False)
    return mine


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_in_either_layout_train_as_the_forward_does(
    layout: torch.memory_format,
) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers).cuda().train()
    model = model.to(torch.bfloat16).to(memory_format=layout)
    x = torch.randn(4, 8, 32, 32, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=layout)
    other, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    for kernels in three_steps(model, x):
        assert_as_close(kernels, step(other, x), step(wide, x.double()))


class Mixed(nn.Module):
    """What follows attention in a transformer: dropout before the residual, under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(64, 64), nn.Dropout(0.1), nn.LayerNorm(64)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.norm(self.drop(self.dense(hidden)) + residual)


class Block(nn.Module):
    """A transformer's block, whose attention drops weights within its own kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        heads = self.into(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=keep, dropout_p=0.1 if self.training else 0.0
        )
        attended = attended.transpose(1, 2).reshape(x.shape)
        x = self.first(self.drop(self.out(attended)) + x)
        return self.second(self.drop(self.narrow(nn.functional.gelu(self.wide(x)))) + x)


class Attending(nn.Module):
    """Blocks in half precision: eager keeps their argument for the backward, as a kernel does."""

    def __init__(self, width: int = 256, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, keep)
        return x


def attending_step(
    model: nn.Module, x: torch.Tensor, keep: torch.Tensor | None, seed: int
) -> dict[str, torch.Tensor]:
    torch.cuda.manual_seed(seed)
    answer = model(model(x, keep), keep)
    after = torch.rand(4, device="cuda")
    # The squares of what a LayerNorm gives add up to a constant: such a loss has no gradients.
    towards = torch.arange(answer.numel(), device="cuda").cos().view_as(answer)
    (answer.float() * towards).mean().backward()
    found = {"answer": answer.detach(), "drawn after it": after}
    found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


class Bags(nn.Module):
    """What a recommender does with its categories: some of each, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(500, 64, mode="sum")
        self.means = nn.EmbeddingBag(300, 64, mode="mean")
        self.dense = nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(self.sums(ids) * 2 + self.means(ids % 300)))


def test_bags_of_embeddings_train_as_the_forward_does() -> None:
    torch.manual_seed(0)
    model = Bags().cuda().train()
    other, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    ids = torch.randint(500, (256, 8), device="cuda")
    for kernels in three_steps(model, ids):
        assert_as_close(kernels, step(other, ids), step(wide, ids))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_draws_what_it_draws_in_eager(masked: bool) -> None:
    torch.manual_seed(0)
    model = Attending().to("cuda", torch.bfloat16).train()
    other = copy.deepcopy(model)
    x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16)
    keep = None
    if masked:
        keep = torch.ones(4, 1, 128, 128, dtype=torch.bool, device="cuda").tril()
    with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
        mine = [attending_step(model, x, keep, seed) for seed in range(4)]
        hits = [row.training_hits for part, row in manager.stats() if part is model]
        # Calls whose argument needs gradients have a kernel of their own; each is made beside one.
        if not hits or hits[0] < 4:
            pytest.fail(f"{hits} hits: {explain_module(model)[0][-300:]}", pytrace=False)
    eager = [attending_step(other, x, keep, seed) for seed in range(5)]
    for seed, found in enumerate(mine):
        for name, theirs in eager[seed].items():
            # Half precision's rounding, which is far less than what other masks make.
            off, apart = (
                float((side[name].double() - theirs.double()).norm() / theirs.double().norm())
                for side in (found, eager[seed + 1])
            )
            far = 0.0 if name == "drawn after it" else min(0.06, apart / 5)
            assert off <= far, (seed, name, off, apart)


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


def test_dropout_drops_what_eager_drops() -> None:
    torch.manual_seed(0)
    model = Mixed().cuda().train()
    other = copy.deepcopy(model)
    hidden = torch.randn(32, 128, 64, device="cuda", dtype=torch.bfloat16)
    with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
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


def step_in_parts(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
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
    expected = step_in_parts(other, *inputs)
    with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
        for _ in range(4):
            for mine, theirs in zip(step_in_parts(model, *inputs), expected, strict=True):
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
