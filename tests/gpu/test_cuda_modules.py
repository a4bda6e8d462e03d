"""Whole modules answered by containers on a real GPU: values, streams, graphs, threads, memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import eagercache
import pytest
import torch
from eagercache.modules.manager import explain_module, manager
from torch import nn

PYTHON_TESTS = str(Path(__file__).parent.parent / "python" / "zoos")
sys.path.append(PYTHON_TESTS)

import module_reading  # noqa: E402 - found there by compile workers too
import module_zoo  # noqa: E402

OPTIONS: dict[str, Any] = {"ops": (), "modules": "auto", "choose": "always"}


@pytest.fixture(autouse=True)
def modules_enabled() -> Iterator[None]:
    with torch.no_grad(), eagercache.enable(on_miss="wait", **OPTIONS):
        yield


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    return module_zoo.make(name).cuda(), module_zoo.example(name).cuda()


def hits(model: nn.Module) -> int:
    return sum(row.hits for part, row in manager.stats() if part is model)


def forward(model: nn.Module, *args: Any) -> Any:
    return type(model).forward(model, *args)


def warm(name: str = "Block") -> tuple[nn.Module, torch.Tensor]:
    """A module whose next call a kernel answers."""
    model, x = make(name)
    model(x)
    before = hits(model)
    model(x)
    assert hits(model) == before + 1, explain_module(model)
    return model, x


def close(answer: Any, expected: Any) -> None:
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Block", "Words"])
def test_kernels_answer_and_equal_the_forward(name: str) -> None:
    model, x = warm(name)
    answers = [model(x) for _ in range(3)]
    expected = forward(model, x)
    for answer in answers:
        assert type(answer) is type(expected)
        close(answer, expected)
    assert hits(model) == 4


def test_new_values_and_other_modules_take_the_same_kernel() -> None:
    model, x = warm()
    compiles = eagercache.stats().compiles
    model.up.weight.mul_(0.5)
    model.shift.add_(1)
    other = module_zoo.Block().eval().cuda()
    other(x)
    for block in (model, other):
        for values in (x, torch.randn_like(x)):
            before = hits(block)
            close(block(values), forward(block, values))
            assert hits(block) == before + 1
    assert eagercache.stats().compiles == compiles


def test_answers_stay_when_later_calls_are_made_and_memory_does_not_grow() -> None:
    model, x = warm()
    first, copy = model(x), model(x).clone()
    # Until it is known whether calls are replayed: a graph brings a pool, and cuBLAS a workspace.
    for _ in range(200):
        model(torch.randn_like(x))
        torch.cuda.synchronize()
    assert torch.equal(first, copy)
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(5000):
        model(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() == reserved


def test_side_streams_are_used_and_nothing_waits() -> None:
    model, x = warm()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(x.clone())  # gives the stream its memory, and cuBLAS its workspace there
    before = hits(model)
    torch.cuda.synchronize()
    for number in range(6):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)  # half a second
            y = x.clone()
            y.fill_(float(number))
            torch.cuda.set_sync_debug_mode("error")
            try:
                z = model(y)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            waited = stream.query()
        # The driver loads PyTorch's own kernels at their first launch, and waits for the GPU then.
        assert number == 0 or not waited, f"call {number}"
        stream.synchronize()
        close(z, forward(model, torch.full_like(x, float(number))))
    assert hits(model) == before + 6


def test_threads_and_streams_on_one_cold_kernel() -> None:
    model, x = make("Block")
    model(x)
    expected = forward(model, x)
    failures: list[str] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for index in range(500):
                y = model(x)
                if index % 100 == 0:
                    stream.synchronize()
                    if not torch.allclose(y, expected, rtol=1e-4, atol=1e-5):
                        failures.append(f"call {index}")
            stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert hits(model) >= 8 * 500 - 8


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_graph_of_a_warm_kernel_replays_with_new_data(mode: str) -> None:
    model, x = warm()
    before = hits(model)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = model(x)
    assert hits(model) == before + 1
    for _ in range(3):
        x.copy_(torch.randn_like(x) * 3)
        model.shift.add_(0.25)
        graph.replay()
        close(y, forward(model, x))


COLD = """
import sys
sys.path.append({path!r})
import torch, eagercache, module_zoo
from eagercache.modules.manager import manager
model, x = module_zoo.make("Block").cuda(), module_zoo.example("Block").cuda()
def hits():
    return sum(row.hits for _, row in manager.stats())
with torch.no_grad():
    expected = model(x)  # sets cuBLAS up, which a capture could not
    torch.cuda.synchronize()
    eagercache.enable(ops=(), modules="auto", choose="always", on_miss="native")
    if {looked_up!r}:
        model(x)  # installed, and not yet run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    in_capture = hits()
    graph.replay()
    captured_right = torch.allclose(y, expected, rtol=1e-4, atol=1e-5)
    for _ in range(3):
        answer = model(x)
    right = torch.allclose(answer, expected, rtol=1e-4, atol=1e-5)
print("RESULT", in_capture, captured_right, right, hits(), eagercache.stats().compiles)
"""


@pytest.mark.parametrize("looked_up", [False, True], ids=["unknown", "installed"])
def test_cold_kernel_is_not_loaded_in_a_capture(looked_up: bool) -> None:
    warm()  # the store has it
    done = subprocess.run(
        [sys.executable, "-c", COLD.format(path=PYTHON_TESTS, looked_up=looked_up)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    at = words.index("RESULT")
    assert words[at + 1 : at + 4] == ["0", "True", "True"], done.stdout
    assert int(words[at + 4]) >= 2 and words[at + 5] == "0", done.stdout


def test_captures_go_on_while_a_kernel_is_made_in_the_background() -> None:
    with eagercache.enable(on_miss="background", **OPTIONS):
        model = module_zoo.Block(64).eval().cuda()
        x = torch.randn(8, 64, device="cuda")
        scratch = torch.zeros(1 << 16, device="cuda")
        expected = forward(model, x)
        captures = 0
        while hits(model) < 3 and captures < 20_000:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # "global": other threads' calls could break it
                scratch.add_(1)
            graph.replay()
            captures += 1
            close(model(x), expected)
            if captures % 50 == 0:
                eagercache.wait(0.5)
        assert hits(model) >= 3, explain_module(model)
        torch.cuda.synchronize()
        assert bool((scratch == captures).all())


def test_other_devices_and_modes_take_another_way() -> None:
    model, x = warm()
    before = hits(model)
    with pytest.raises(RuntimeError, match="device"):
        model(x.cpu())
    model.cpu()
    host = model(x.cpu())
    assert host.device.type == "cpu"
    model.cuda()
    model(x)
    after = hits(model)
    close(model(x), forward(model, x))
    assert after >= before and hits(model) == after + 1
    with torch.enable_grad():
        assert model(x).requires_grad
    with torch.inference_mode():
        assert model(x).is_inference()
    assert hits(model) == after + 2


def test_autocast_has_a_kernel_of_its_own() -> None:
    model, x = warm()
    with torch.autocast("cuda", torch.bfloat16):
        model(x)
        before = hits(model)
        answer = model(x)
        expected = forward(model, x)
    assert hits(model) == before + 1, explain_module(model)
    assert answer.dtype == expected.dtype
    torch.testing.assert_close(answer, expected, rtol=2e-2, atol=2e-2)


def test_switched_off_attention_back_ends_are_the_forwards() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, x = warm()
    before = hits(model)
    with sdpa_kernel(SDPBackend.MATH):
        model(x)
    assert hits(model) == before


def test_no_kernel_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 35))
    model, x = module_zoo.Block(80).eval().cuda(), torch.randn(4, 80, device="cuda")
    for _ in range(3):
        model(x)
    assert hits(model) == 0
    assert any("MiB free" in line for line in explain_module(model)), explain_module(model)


def test_an_index_out_of_range_is_reported_as_the_forward_reports_it() -> None:
    """In a process of its own: the context does not survive."""
    program = f"""
        import sys
        sys.path.append({PYTHON_TESTS!r})
        import torch, eagercache, module_zoo
        eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
        with torch.no_grad():
            model, ids = module_zoo.make("Words").cuda(), module_zoo.example("Words").cuda()
            model(ids)
            model(ids)
            try:
                model(ids + 10)
                torch.cuda.synchronize()
                print("NO ERROR")
            except RuntimeError as error:
                print("ERROR", str(error).splitlines()[0])
    """
    warm("Words")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "device-side assert" in done.stdout, done.stdout + done.stderr


def test_the_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _, x = warm()
    compiles = eagercache.stats().compiles
    other, y = module_zoo.make("Block").to("cuda:1"), x.to("cuda:1")
    with torch.cuda.device(1):
        other(y)
        before = hits(other)
        close(other(y), forward(other, y))
    assert hits(other) == before + 1 and eagercache.stats().compiles == compiles
    answer = other(y)  # another GPU is the current one
    assert hits(other) == before + 1 and answer.device.index == 1


def test_values_that_change_while_kernels_answer_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = module_reading.Reading().eval().cuda()
    x = torch.linspace(-1, 1, 32, device="cuda").view(4, 8)

    def settled() -> bool:
        for _ in range(3):
            model(x)
            manager.wait(60)
        before = hits(model)
        model(x)
        return hits(model) > before

    assert settled(), explain_module(model)
    changes = {
        "global": lambda at: at.setattr(module_reading, "FACTOR", 2.5),
        "table": lambda at: at.setitem(module_reading.TABLE, "mode", "sin"),
        "object": lambda at: at.setattr(model.config, "offset", -2.0),
        "environment": lambda at: at.setitem(os.environ, "TEST_READING", "2"),
    }
    for name, change in changes.items():
        with monkeypatch.context() as at:
            change(at)
            before = hits(model)
            answer = model(x)
            assert hits(model) == before, name
            close(answer, forward(model, x))
        assert settled(), (name, explain_module(model))
        close(model(x), forward(model, x))
