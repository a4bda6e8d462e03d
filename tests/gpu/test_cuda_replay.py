"""Calls of modules that are replayed as CUDA graphs, against the forward."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import eagercache
import pytest
import torch
from eagercache.base.load import core
from eagercache.modules import replay
from eagercache.modules.manager import explain_module, manager
from torch import nn

OPTIONS: dict[str, Any] = {"ops": (), "modules": "auto", "choose": "always", "on_miss": "wait"}
WIDTH = 64
# Until a call is captured, and then until both kinds of it have been timed.
UNTIL_REPLAYED = 120


class Deep(nn.Module):
    """Many small launches, so that a replay is faster on any machine."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x))) + x
        return x if y is None else x * y


class Memory:
    """A cache of fixed size, which a forward writes into."""

    def __init__(self) -> None:
        self.rows = torch.zeros(16, WIDTH, device="cuda")
        self.length = torch.tensor(0, device="cuda")
        torch._dynamo.mark_static_address(self.length)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """All of it, with the rows put behind the last ones."""
        places = torch.arange(x.shape[0], device=x.device) + self.length
        self.length.add_(x.shape[0])
        self.rows.index_copy_(0, places, x)
        return self.rows


class Remembering(Deep):
    """`Deep`, and a sum over what was seen."""

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x)
        return x + memory.add(x).sum(0)


@pytest.fixture(autouse=True)
def modules_enabled() -> Iterator[None]:
    """With no graph of an earlier test, whose memory would count."""
    with torch.no_grad(), eagercache.enable(**OPTIONS):
        torch.cuda.synchronize()
        replay.give_back()
        assert replay.pool_bytes() == 0
        yield


def by_forward(model: nn.Module, *args: Any) -> Any:
    assert core is not None
    core.set_answering(False)
    try:
        return model(*args)
    finally:
        core.set_answering(True)


def replayed(model: nn.Module) -> int:
    return sum(row.replayed for part, row in manager.stats() if part is model)


def is_right(model: nn.Module, *args: Any) -> None:
    torch.testing.assert_close(model(*args), by_forward(model, *args), rtol=1e-3, atol=1e-4)


def rows(count: int = 3) -> torch.Tensor:
    return torch.randn(count, WIDTH, device="cuda")


def warmed(model: nn.Module, *args: Any) -> nn.Module:
    """The model, when calls like ``model(*args)`` are replayed."""
    for _ in range(UNTIL_REPLAYED):
        model(*args)
        torch.cuda.synchronize()
    before = replayed(model)
    model(*args)
    assert replayed(model) == before + 1, explain_module(model)
    return model


@pytest.fixture
def deep() -> nn.Module:
    torch.manual_seed(0)
    return warmed(Deep().cuda().eval(), rows())


def test_new_inputs_are_answered_and_said(deep: nn.Module) -> None:
    for _ in range(50):
        is_right(deep, rows())
    assert "replayed as a CUDA graph" in explain_module(deep)[0]
    assert 0 < replay.pool_bytes() <= 64 << 20


def test_an_answer_stays_what_it_was(deep: nn.Module) -> None:
    x = rows()
    first = deep(x)
    kept = first.clone()
    for _ in range(1000):
        deep(rows())
    assert torch.equal(first, kept)


def test_weights_that_change_in_place_are_read(deep: nn.Module) -> None:
    before = replayed(deep)
    for _ in range(5):
        for parameter in deep.parameters():
            parameter.mul_(1.1)
        is_right(deep, rows())
    assert replayed(deep) == before + 5


def test_weights_that_are_replaced_are_read(deep: nn.Module) -> None:
    old = copy.deepcopy(deep.state_dict())
    for step in range(60):
        if step % 20 == 0:
            for parameter in deep.parameters():
                parameter.data = torch.randn_like(parameter) / 8
        is_right(deep, rows())
    deep.load_state_dict(old, assign=True)
    is_right(deep, rows())


def test_inputs_anywhere_in_memory(deep: nn.Module) -> None:
    store = torch.randn(200, 8, WIDTH, device="cuda")
    for index in range(200):
        is_right(deep, store[index, :3])


def test_large_inputs_that_stay_and_then_move() -> None:
    model = Deep(6).cuda().eval()
    x = rows(4096)
    warmed(model, x)
    is_right(model, x)
    x.mul_(2)
    is_right(model, x)
    for _ in range(80):
        is_right(model, rows(4096))


def test_two_arguments_that_are_one_tensor() -> None:
    model = Deep(6).cuda().eval()
    x = rows()
    warmed(model, x, x)
    is_right(model, x, x)
    is_right(model, x, rows())


def test_sizes_that_take_turns() -> None:
    model = Deep(6).cuda().eval()
    for step in range(400):
        is_right(model, rows((3, 5, 8)[step % 3]))
    assert replayed(model) > 0, explain_module(model)


def test_a_call_that_is_too_large_costs_no_other_its_graph(deep: nn.Module) -> None:
    cached = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    large = Deep(6).cuda().eval()
    x = rows(1 << 18)
    for _ in range(4):
        large(x)
    del cached  # this stays the allocator's
    before = torch.cuda.memory_reserved()
    for _ in range(20):
        large(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() >= before
    assert "more of the GPU's memory" in explain_module(large)[0]
    torch.cuda.synchronize()
    assert 0 < replay.pool_bytes() <= 64 << 20
    before = replayed(deep)
    is_right(deep, rows())
    assert replayed(deep) == before + 1
    del large, x
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved


def test_memory_that_is_given_back_comes_again_and_leaves_nothing_behind(deep: nn.Module) -> None:
    held = replay.workspace_bytes()
    pools = replay.pool_bytes()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        replay.give_back()
        assert replay.pool_bytes() == 0
        assert torch.cuda.memory_reserved() == reserved - pools
        is_right(deep, rows())
        model = warmed(Deep(12).cuda().eval(), rows())
        is_right(model, rows())
        del model
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        pools = replay.pool_bytes()
        reserved = torch.cuda.memory_reserved()
    assert replay.workspace_bytes() == held


def test_a_stream_whose_graphs_do_not_fit_rests_and_is_tried_again(
    deep: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool can be larger than any of its graphs needs: that is what `_bytes_of` is told here."""
    measured = replay._bytes_of
    pools = [lane.pool for lane in replay._captures._lanes.values()]
    monkeypatch.setattr(replay, "SHORTEST_REST", 1000.0)
    monkeypatch.setattr(
        replay, "_bytes_of", lambda pool: measured(pool) + ((1 << 30) if pool in pools else 0)
    )
    other = Deep(12).cuda().eval()
    for _ in range(60):
        is_right(other, rows())
        is_right(deep, rows())
    assert replay.pool_bytes() == 0  # it was given back, and rests
    assert replayed(other) == 0
    monkeypatch.undo()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2000)
    monkeypatch.setattr(replay, "time", later)
    warmed(other, rows())
    warmed(deep, rows())


def test_a_limit_on_memory() -> None:
    replay.set_limit(1 << 20)
    try:
        model = Deep(6).cuda().eval()
        for _ in range(60):
            is_right(model, rows())
        assert replayed(model) == 0
        assert "more of the GPU's memory" in explain_module(model)[0]
        assert replay.pool_bytes() == 0
    finally:
        replay.set_limit(64 << 20)


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.relu(x @ x.T) @ x + torch.rand_like(x)
        return x


def test_a_cache_that_is_written_has_what_the_forward_writes() -> None:
    torch.manual_seed(0)
    model = Remembering().cuda().eval()
    mine, its, other = Memory(), Memory(), Memory()
    for step in range(2 * UNTIL_REPLAYED):
        if step % 16 == 0:
            mine.length.zero_()
            its.length.zero_()
        x = rows(1)
        answer, expected = model(x, mine), by_forward(model, x, its)
        torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(mine.rows, its.rows, rtol=1e-3, atol=1e-4)
        assert int(mine.length) == int(its.length)
    assert replayed(model) > 0, explain_module(model)
    its = Memory()
    for _ in range(16):  # of another place in memory
        x = rows(1)
        torch.testing.assert_close(model(x, other), by_forward(model, x, its), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(other.rows, its.rows, rtol=1e-3, atol=1e-4)


def test_random_numbers_are_not_replayed() -> None:
    model = Random().cuda()
    x = rows(WIDTH)
    seen = {float(model(x).sum()) for _ in range(60)}
    assert len(seen) == 60
    assert replayed(model) == 0


@pytest.mark.parametrize("seed", range(2))
def test_any_calls_agree_with_the_forward(seed: int) -> None:
    """By chance: sizes, addresses, streams, lifetimes of answers, aliasing, memory given back."""
    draw = random.Random(seed)
    models = [Deep(4 + index).cuda().eval() for index in range(3)]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    store = torch.randn(64, 16, WIDTH, device="cuda")
    torch.cuda.synchronize()
    for _ in range(2500):
        model = draw.choice(models)
        stream = streams[0] if draw.random() < 0.9 else streams[1]
        with torch.cuda.stream(stream):
            count = draw.choice((3, 3, 3, 3, 5))
            x = store[draw.randrange(64), :count] if draw.random() < 0.5 else rows(count)
            args = (x, x) if draw.random() < 0.1 else (x,)
            out = model(*args)
            held.append((out, by_forward(model, *args)))
        if draw.random() < 0.02:
            torch.cuda.synchronize()  # what is still to run on either stream reads them
            for parameter in model.parameters():
                parameter.mul_(draw.choice((0.9, 1.1)))
            torch.cuda.synchronize()
        if draw.random() < 0.01:
            torch.cuda.empty_cache()
        if len(held) > 40 or draw.random() < 0.02:
            torch.cuda.synchronize()
            for ours, expected in held:
                torch.testing.assert_close(ours, expected, rtol=2e-3, atol=1e-3)
            held.clear()
    assert sum(map(replayed, models)) > 500, [explain_module(model)[0] for model in models]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_graphs_and_keeps_the_programs_cached_memory() -> None:
    cached = [torch.empty(96 << 20, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(2)]
    del cached
    for gpu in range(2):
        reserved = [torch.cuda.memory_reserved(index) for index in range(2)]
        with torch.cuda.device(gpu):
            model = warmed(Deep(12 + gpu).cuda().eval(), rows())
            for _ in range(5):
                is_right(model, rows())
        assert all(torch.cuda.memory_reserved(index) >= reserved[index] for index in range(2))
    assert 0 < replay.pool_bytes() <= 2 * 64 << 20
    replay.give_back()
    assert replay.pool_bytes() == 0
    assert all(torch.cuda.memory_reserved(index) >= 96 << 20 for index in range(2))
