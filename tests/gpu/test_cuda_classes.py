"""Calls on a GPU that differ in sizes, or in numbers: few kernels for all of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import eagercache
import pytest
import torch
from gpu_calls import flat, hits, rand

F = torch.nn.functional
Call = Callable[[int], Any]
OPTIONS: dict[str, Any] = {"devices": ["cuda"], "on_miss": "wait", "choose": "always"}
LENGTHS = (2, 3, 4, 5, 8, 16, 17, 31, 33, 64, 127, 129, 500, 1000, 1024, 2048)


@pytest.fixture(autouse=True)
def everything_enabled() -> Iterator[None]:
    with eagercache.enable(**OPTIONS):
        yield


def kernels(name: str) -> list[tuple[str, str, str]]:
    """Of an operator: form, decision and why, of each that was made."""
    return [
        (row.facts.get("form", ""), row.decision, row.reason)
        for row in eagercache.kernels()
        if row.op == name.partition(".")[0]
    ]


def check_lengths(name: str, call: Call) -> None:
    """Each length twice, against native: all but the first few answered, by two kernels."""
    before, known = hits(name), len(kernels(name))
    answers = {n: [flat(call(n)) for _ in range(2)] for n in LENGTHS}
    made, answered = kernels(name)[known:], hits(name) - before
    eagercache.disable()
    for n, both in answers.items():
        expected = flat(call(n))
        for answer in both:
            for mine, native in zip(answer, expected, strict=True):
                assert mine.dtype == native.dtype and mine.size() == native.size(), n
                assert mine.stride() == native.stride(), n
                torch.testing.assert_close(mine, native, equal_nan=True)
    assert len(made) <= 2, f"{len(made)} kernels for {len(LENGTHS)} lengths: {made}"
    assert answered >= 2 * len(LENGTHS) - 4, made


OPERATORS: dict[str, Call] = {
    "aten::tanh": lambda n: torch.tanh(rand(n, 40, dtype=torch.bfloat16)),
    "aten::gelu": lambda n: F.gelu(rand(4, n, 256)),
    "aten::add.Tensor": lambda n: rand(3, n, 64) + rand(n, 64),
    "aten::mul.Tensor": lambda n: rand(n, 56) * 2.5,
    "aten::_softmax": lambda n: torch.softmax(rand(2, 3, 7, n), -1),
    "aten::native_layer_norm": lambda n: torch.native_layer_norm(
        rand(2, n, 96), [96], None, None, 1e-5
    ),
    "aten::clone": lambda n: rand(n, 24).t().clone(memory_format=torch.contiguous_format),
    "aten::cat": lambda n: torch.cat([rand(2, n, 48), rand(2, 5, 48)], 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_lengths_share_kernels(name: str) -> None:
    check_lengths(name, OPERATORS[name])


def test_a_long_sum_is_right_whether_its_class_has_a_kernel_or_each_length() -> None:
    lengths = (3, 4, 5, 6, 400)
    answers = [(n, rand(n, 72).sum(0)) for n in lengths for _ in range(2)]
    made = kernels("aten::sum")
    eagercache.disable()
    for n, answer in answers:
        torch.testing.assert_close(answer, rand(n, 72).sum(0))
    # The proof allows long sums less than what the columns of a large member may be off by.
    of_all = any(form == "cuda_shapes" for form, _, _ in made)
    assert of_all or sum(form == "cuda" for form, _, _ in made) >= len(lengths) - 1, made


def scaled_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (x.float() * scale).to(x.dtype) * weight


def test_lengths_of_a_function_share_kernels() -> None:
    norm = eagercache.op("open_sizes::scaled_norm")(scaled_norm)
    weight = rand(88, dtype=torch.bfloat16)
    check_lengths(
        "open_sizes::scaled_norm", lambda n: norm(rand(2, n, 88, dtype=torch.bfloat16), weight)
    )


def test_a_new_length_is_answered_in_a_graph_on_streams_and_in_threads() -> None:
    for n in (10, 11, 12):
        torch.sigmoid(rand(n, 104, dtype=torch.bfloat16))
        torch.sigmoid(rand(n, 104, dtype=torch.bfloat16))
    x, before = rand(77, 104, dtype=torch.bfloat16), hits("aten::sigmoid")
    torch.sigmoid(x)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        captured = torch.sigmoid(x)
    answers: list[torch.Tensor] = []

    def work(n: int) -> None:
        with torch.cuda.stream(stream):
            answers.append(torch.sigmoid(x[:n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(20, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hits("aten::sigmoid") - before >= 22
    x.copy_(rand(77, 104, dtype=torch.bfloat16) * 3)
    torch.cuda.synchronize()
    graph.replay()
    eagercache.disable()
    torch.testing.assert_close(captured, torch.sigmoid(x))
    assert sorted(len(answer) for answer in answers) == list(range(20, 40))


def test_a_second_process_has_the_kernel_for_lengths_that_nobody_has_met() -> None:
    for n in (6, 7, 8):
        F.silu(rand(n, 120))
        F.silu(rand(n, 120))
    program = """
        import torch, eagercache
        eagercache.enable(devices=["cuda"], on_miss="wait", choose="always")
        x = [torch.randn(n, 120, device="cuda") for n in (6, 50, 51, 999)]
        answers = [torch.nn.functional.silu(y) for y in x]
        stats = eagercache.stats()
        eagercache.disable()
        expected = [torch.nn.functional.silu(y) for y in x]
        same = all(torch.allclose(a, e, atol=1e-6) for a, e in zip(answers, expected))
        print(same, stats.compiles, stats.hits)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    same, compiles, answered = ended.stdout.split()
    assert (same, compiles) == ("True", "0") and int(answered) >= 3, ended.stdout


def test_what_has_no_kernel_for_all_sizes_has_one_for_each() -> None:
    # A product is a library's; its class is refused, and so is each size.
    x = rand(64, 64)
    for n in (3, 4, 5):
        torch.testing.assert_close(torch.mm(x[:n], x), x[:n] @ x)


RATES = [-0.1 * 0.93**step for step in range(30)]
Step = Callable[[float], list[torch.Tensor]]


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [rand(n, m, dtype=dtype) for n, m in ((40, 24), (1, 24), (33, 7), (5, 5))]


def added(rate: float) -> list[torch.Tensor]:
    mine = tensors()
    torch._foreach_add_(mine, [x + 1 for x in mine], alpha=rate)
    return mine


def moved(rate: float) -> list[torch.Tensor]:
    mine = tensors()
    rates = [rate * (1 + n / 8) for n in range(len(mine))]
    torch._foreach_addcdiv_(mine, [x * 2 for x in mine], [x.abs() + 1 for x in mine], rates)
    return mine


def shrunk(rate: float) -> list[torch.Tensor]:
    mine = tensors()
    torch._foreach_mul_(mine, 1 + rate)
    return mine


STEPS: dict[str, Step] = {
    "aten::add.Tensor": lambda rate: [torch.add(x, x * 3, alpha=rate) for x in tensors()[:1]],
    "aten::lerp.Scalar": lambda rate: [torch.lerp(x, x * 3, -rate) for x in tensors()[:1]],
    "aten::clamp": lambda rate: [x.clamp(rate, -rate) for x in tensors(torch.bfloat16)[:1]],
    "aten::_foreach_add_.List": added,
    "aten::_foreach_mul_.Scalar": shrunk,
}


@pytest.mark.parametrize("name", STEPS)
def test_numbers_share_a_kernel(name: str) -> None:
    eagercache.enable([name.removeprefix("aten::")], **OPTIONS)
    before, known = hits(name), Counter(kernels(name))
    answers = [STEPS[name](rate) for rate in RATES]
    made, answered = list((Counter(kernels(name)) - known).elements()), hits(name) - before
    eagercache.disable()
    for rate, mine in zip(RATES, answers, strict=True):
        for own, native in zip(mine, STEPS[name](rate), strict=True):
            torch.testing.assert_close(own, native, rtol=1e-6, atol=1e-6)
    # Two for one number each, before there is one for all.
    assert [form for form, _, _ in made].count("cuda_scalars") >= 1 and len(made) <= 3, made
    assert answered >= len(RATES) - 4, made


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda own: torch.optim.SGD(own, 0.1, momentum=0.9, weight_decay=1e-3, foreach=True),
    "adamw": lambda own: torch.optim.AdamW(own, 0.01, foreach=True),
}


def test_an_operator_that_writes_other_bits_is_natives_for_all_numbers() -> None:
    # Quotients are fused into what is added otherwise than native's are.
    name = "aten::_foreach_addcdiv_.ScalarList"
    eagercache.enable([name.removeprefix("aten::")], **OPTIONS)
    known = Counter(kernels(name))
    answers = [moved(rate) for rate in RATES]
    made = list((Counter(kernels(name)) - known).elements())
    eagercache.disable()
    for rate, mine in zip(RATES, answers, strict=True):
        assert all(map(torch.equal, mine, moved(rate))), rate
    # Two for one number each, and one that holds for all of them.
    assert len(made) <= 3, made


# What a step calls whose numbers change, by any of these optimizers.
IN_STEPS = ["_foreach_add_.List", "_foreach_mul_.Scalar", "_foreach_addcdiv_.ScalarList"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_of_learning_rates_is_answered_by_few_kernels(name: str) -> None:
    def train() -> list[torch.Tensor]:
        own = [x.clone().requires_grad_() for x in tensors()]
        optimizer = OPTIMIZERS[name](own)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        for _ in range(40):
            for x in own:
                x.grad = torch.sin(x.detach())
            optimizer.step()
            schedule.step()
        return [x.detach() for x in own]

    eagercache.enable(IN_STEPS, **OPTIONS)
    before, compiles = hits("aten::_foreach_mul_.Scalar"), eagercache.stats().compiles
    before += hits("aten::_foreach_add_.List")
    mine = train()
    compiles = eagercache.stats().compiles - compiles
    answered = hits("aten::_foreach_mul_.Scalar") + hits("aten::_foreach_add_.List") - before
    eagercache.disable()
    for own, native in zip(mine, train(), strict=True):
        torch.testing.assert_close(own, native, rtol=1e-6, atol=1e-6)
    assert compiles <= 20 and answered >= 30, (compiles, answered)


def test_a_graph_keeps_the_number_that_it_was_captured_with() -> None:
    x, y = rand(70, 3), rand(70, 3) + 1
    for rate in (0.11, 0.12, 0.13, 0.14):
        torch.sub(x, y, alpha=rate)
    before, graph = hits("aten::sub.Tensor"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.sub(x, y, alpha=0.2)
    torch.sub(x, y, alpha=0.3)
    assert hits("aten::sub.Tensor") == before + 2
    x.mul_(2)
    graph.replay()
    eagercache.disable()
    torch.testing.assert_close(captured, torch.sub(x, y, alpha=0.2))
