"""Calls of modules that are replayed as CUDA graphs, against the forward."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
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


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs ``work`` with 0, 1 ... in threads, and raises what the first of them raised."""
    raised: list[BaseException] = []

    def run(number: int) -> None:
        try:
            with torch.no_grad():
                work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_threads_that_capture_modules_of_their_own() -> None:
    """Each brings a workspace of cuBLAS, which costs nobody a graph."""
    models = [Deep(12 + index).cuda().eval() for index in range(3)]
    for model in models:
        is_right(model, rows())
    inputs = [rows() for _ in range(5)]
    # Before there are threads: which calls the forward answers is the same for all of them.
    expected = [[by_forward(model, x) for x in inputs] for model in models]
    all_alive = threading.Barrier(len(models))

    def work(number: int) -> None:
        model = models[number]
        for _ in range(3 * UNTIL_REPLAYED):  # a capture waits for no other, and is tried again
            model(rows())
            torch.cuda.synchronize()
        all_alive.wait(30)
        before = replayed(model)
        for x, right in zip(inputs, expected[number], strict=True):
            torch.testing.assert_close(model(x), right, rtol=1e-3, atol=1e-4)
        assert replayed(model) == before + 5, explain_module(model)

    run_threads(len(models), work)
    for model in models:  # this thread captured none of them
        before = replayed(model)
        is_right(model, rows())
        assert replayed(model) == before + 1, explain_module(model)
    assert 0 < replay.pool_bytes() <= 64 << 20


def test_while_other_threads_wait_for_the_device() -> None:
    """The driver refuses that while a stream is captured, with an error for both."""
    models = [Deep(4 + index).cuda().eval() for index in range(8)]
    for model in models:
        is_right(model, rows())
    ended = threading.Event()
    waits = [0, 0, 0]

    def work(number: int) -> None:
        if number == 0:
            try:
                for model in models:
                    warmed(model, rows())
            finally:
                ended.set()
            return
        x = rows()
        while not ended.is_set():
            if number == 1:
                x = x * 2  # so that there is something to wait for
            torch.cuda.synchronize()
            waits[number] += 1

    run_threads(3, work)
    assert min(waits[1:]) > 100


def test_streams_with_modules_of_their_own() -> None:
    models = [Deep(12 + index).cuda().eval() for index in range(3)]
    streams = [torch.cuda.Stream() for _ in models]
    torch.cuda.synchronize()
    for model, stream in zip(models, streams, strict=True):
        with torch.cuda.stream(stream):
            warmed(model, rows())
    for model, stream in zip(models, streams, strict=True):
        with torch.cuda.stream(stream):
            before = replayed(model)
            is_right(model, rows())
            assert replayed(model) == before + 1, explain_module(model)


def test_threads_beyond_the_most_workspaces_replay_what_others_captured(
    deep: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST_WORKSPACES", 0)
    other = Deep(12).cuda().eval()
    held = replay.workspace_bytes()

    def work(number: int) -> None:
        before = replayed(deep)
        for _ in range(40):
            is_right(deep, rows())
            is_right(other, rows())
        assert replayed(deep) == before + 40
        assert replayed(other) == 0

    run_threads(1, work)
    assert replay.workspace_bytes() == held
    warmed(other, rows())  # by the thread that has a workspace


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
