"""Replayed CUDA graphs of modules while other threads and streams work."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from eagercache.modules import replay
from eagercache.modules.manager import explain_module
from test_cuda_replay import (
    UNTIL_REPLAYED,
    Deep,
    by_forward,
    deep,
    is_right,
    modules_enabled,
    replayed,
    rows,
    warmed,
)
from torch import nn

__all__ = ["deep", "modules_enabled"]


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
