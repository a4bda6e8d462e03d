"""Two GPUs: tensors on one that is not the current one, copies between them, one load for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import eagercache
import pytest
import torch

OPTIONS: dict[str, Any] = {"devices": ["cuda"], "on_miss": "wait", "choose": "always"}

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True)
def everything_enabled() -> Iterator[None]:
    with eagercache.enable(**OPTIONS):
        yield
    assert torch.cuda.current_device() == 0


def hits(name: str) -> int:
    row = eagercache.stats().operators.get(f"{name} @CUDA")
    return row.hits if row is not None else 0


def rand(*sizes: int, gpu: int) -> torch.Tensor:
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))
    return values.to(f"cuda:{gpu}")


def check(name: str, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Native's answer, then ours, on the GPU of ``x``, whichever is the current one."""
    call(x)
    before = hits(name)
    answers = []
    for current in (0, 1):
        with torch.cuda.device(current):
            answers.append(call(x))
    assert hits(name) == before + 2
    eagercache.disable()
    expected = call(x)
    eagercache.enable(**OPTIONS)
    for answer in answers:
        assert answer.device == x.device and answer.stride() == expected.stride()
        torch.testing.assert_close(answer, expected)


def test_one_compile_serves_both() -> None:
    x, y = rand(777, gpu=0), rand(777, gpu=1)
    check("aten::abs", torch.abs, x)
    compiles = eagercache.stats().compiles
    check("aten::abs", torch.abs, y)
    assert eagercache.stats().compiles == compiles


def test_a_call_that_only_the_second_gpu_makes_is_compiled_there() -> None:
    check("aten::floor", torch.floor, rand(63, 129, gpu=1))
    kernels = [k for k in eagercache.kernels() if k.op == "aten::floor"]
    assert {k.decision for k in kernels} == {"kernel"}, [k.reason for k in kernels]
    check("aten::floor", torch.floor, rand(63, 129, gpu=0))


def test_written_arguments_and_numbers_by_value() -> None:
    for gpu in (0, 1):
        x, y = rand(300, 7, gpu=gpu), rand(300, 7, gpu=gpu)
        expected = x * 1.5 + y
        for _ in range(2):
            before = hits("aten::add_.Tensor") + hits("aten::mul_.Tensor")
            z = x.clone()
            z.mul_(1.5).add_(y)
        assert hits("aten::add_.Tensor") + hits("aten::mul_.Tensor") == before + 2
        torch.testing.assert_close(z, expected)


def test_copies_between_gpus_and_to_the_host_are_natives() -> None:
    """A kernel for a cast on one GPU has the same entry but for the device that is asked for."""
    x = rand(130, 70, gpu=0)
    for _ in range(3):
        stays = x.to("cuda:0", torch.bfloat16)
        goes = x.to("cuda:1", torch.bfloat16)
        host = x.to("cpu", torch.bfloat16)
        back = goes.to("cuda:0", torch.float32)
        assert [t.device.type + str(t.device.index) for t in (stays, goes, back)] == [
            "cuda0", "cuda1", "cuda0",
        ]  # fmt: skip
        assert host.device.type == "cpu"
        assert torch.equal(stays.cpu(), goes.cpu()) and torch.equal(host, goes.cpu())
        assert torch.equal(back.cpu(), host.float())
    asides = eagercache.stats().operators["aten::_to_copy @CUDA"].aside_reasons
    assert asides.get("mixed_devices", 0) >= 9
    with torch.cuda.device(1):
        plain = x.to("cuda", torch.bfloat16)
    assert plain.device.index == 1 and torch.equal(plain.cpu(), host)


def test_threads_on_both_gpus_meet_a_cold_kernel() -> None:
    inputs = [rand(515, 33, gpu=gpu) for gpu in (0, 1)]
    expected = [torch.tanh(x.double()).float() for x in inputs]
    failures: list[str] = []

    def work(number: int) -> None:
        gpu = number % 2
        stream = torch.cuda.Stream(gpu)
        # Every other thread works on a GPU that is not its current one.
        with torch.cuda.device((number // 2) % 2), torch.cuda.stream(stream):
            for index in range(500):
                y = torch.tanh(inputs[gpu])
                if index % 100 == 0:
                    stream.synchronize()
                    if y.device.index != gpu or not torch.allclose(y, expected[gpu], atol=1e-6):
                        failures.append(f"thread {number}, call {index}")
            stream.synchronize()

    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert hits("aten::tanh") >= 8 * 400


def test_capture_on_the_second_gpu() -> None:
    x = rand(512, 64, gpu=1)
    with torch.cuda.device(1):
        torch.softmax(x, -1)
        before = hits("aten::_softmax")
        graph = torch.cuda.CUDAGraph()
        # PyTorch's own stream for captures is on the GPU of the process's first one.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
            y = torch.softmax(x, -1)
        assert hits("aten::_softmax") == before + 1
        x.copy_(rand(512, 64, gpu=1) * 3)
        graph.replay()
        torch.testing.assert_close(y, torch.softmax(x.double(), -1).float())
