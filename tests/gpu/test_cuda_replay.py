"""Calls of modules that are replayed as CUDA graphs, against the forward."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator
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
    with torch.no_grad(), eagercache.enable(**OPTIONS):
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


def test_another_stream(deep: nn.Module) -> None:
    stream = torch.cuda.Stream()
    for step in range(40):
        with torch.cuda.stream(stream if step % 2 else torch.cuda.current_stream()):
            x = rows()
            out = deep(x)
            expected = by_forward(deep, x)
            torch.cuda.current_stream().synchronize()
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


def test_threads(deep: nn.Module) -> None:
    inputs = [[rows() for _ in range(60)] for _ in range(4)]
    expected = [[by_forward(deep, x) for x in some] for some in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.no_grad():
            for x, right in zip(inputs[number], expected[number], strict=True):
                out = deep(x)
                if not torch.allclose(out, right, rtol=1e-3, atol=1e-4):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_under_a_capture_of_the_program(deep: nn.Module) -> None:
    x = rows()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = deep(x)
    x.copy_(rows())
    graph.replay()
    torch.testing.assert_close(out, by_forward(deep, x), rtol=1e-3, atol=1e-4)
    is_right(deep, rows())


def test_while_another_thread_captures(deep: nn.Module) -> None:
    """A capture of the program's, which forbids unsafe calls to all threads, holds."""
    other = Deep(6).cuda().eval()
    x = rows()
    ready, begun, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with torch.no_grad():
            for model in (deep, other):  # what libraries make for a thread, none makes in a capture
                by_forward(model, x)
                for _ in range(6):
                    model(x)
            torch.cuda.synchronize()
            ready.set()
            begun.wait()
            for _ in range(60):
                deep(x)
                other(x)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        begun.set()
        y = x * 2
        assert done.wait(60)
    thread.join()
    graph.replay()
    assert torch.equal(y, x * 2)


def test_emptied_caches_and_cleared_workspaces(deep: nn.Module) -> None:
    for _ in range(5):
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()
        filler = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
        is_right(deep, rows())
        is_right(Deep(2).cuda().eval(), rows())
        assert all(bool((part == 7).all()) for part in filler)
        del filler


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
    for step in range(2500):
        model = draw.choice(models)
        stream = streams[0] if draw.random() < 0.9 else streams[1]
        with torch.cuda.stream(stream):
            count = draw.choice((3, 3, 3, 3, 5))
            x = store[draw.randrange(64), :count] if draw.random() < 0.5 else rows(count)
            args = (x, x) if draw.random() < 0.1 else (x,)
            out = model(*args)
            held.append((out, by_forward(model, *args)))
        if draw.random() < 0.02:
            for parameter in model.parameters():
                parameter.mul_(draw.choice((0.9, 1.1)))
        if draw.random() < 0.01:
            torch.cuda.empty_cache()
        if len(held) > 40 or draw.random() < 0.02:
            torch.cuda.synchronize()
            for ours, expected in held:
                torch.testing.assert_close(ours, expected, rtol=2e-3, atol=1e-3, msg=f"{step}")
            held.clear()
    assert sum(map(replayed, models)) > 500, [explain_module(model)[0] for model in models]
