"""Modules on a GPU whose calls differ in sizes, or have objects: one kernel for all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import eagercache
import pytest
import torch
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
from torch import nn

PYTHON_TESTS = str(Path(__file__).parent.parent / "python" / "zoos")
sys.path.append(PYTHON_TESTS)

import module_zoo  # noqa: E402 - found there by compile workers too
from object_world import Cache, Reader, inside, is_close  # noqa: E402

OPTIONS: dict[str, Any] = {"ops": (), "modules": "auto", "choose": "always", "on_miss": "wait"}
SIZES = (3, 4, 5, 8, 16, 17, 31, 64, 127, 128, 129, 1000)


@pytest.fixture(autouse=True)
def modules_enabled() -> Iterator[None]:
    with torch.no_grad(), eagercache.enable(**OPTIONS):
        yield


def hits(model: nn.Module) -> int:
    return sum(row.hits for part, row in manager.stats() if part is model)


def by_forward(model: nn.Module, *args: Any) -> Any:
    assert core is not None
    core.set_answering(False)
    try:
        return model(*args)
    finally:
        core.set_answering(True)


def test_sizes_share_two_kernels_and_equal_the_forward() -> None:
    model = module_zoo.make("Block").cuda()
    example = module_zoo.example("Block")
    before = eagercache.stats().compiles
    for size in SIZES:
        x = torch.randn(size, *example.shape[1:], device="cuda")
        for _ in range(2):
            torch.testing.assert_close(model(x), by_forward(model, x), rtol=1e-4, atol=1e-5)
    assert hits(model) >= 2 * (len(SIZES) - 2), explain_module(model)
    assert eagercache.stats().compiles - before <= 2


def moved(cache: Cache) -> Cache:
    for layer in cache.layers:
        assert layer.keys is not None
        layer.keys = layer.keys.cuda()
    return cache


def test_a_growing_cache_has_two_kernels_and_holds_what_the_forward_puts_into_it() -> None:
    model = Reader(Reader.grow).cuda()
    mine, natives = moved(Cache(4)), moved(Cache(4))
    before = eagercache.stats().compiles
    for step in range(40):
        x = torch.randn(1, 1, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        answer, expected = model(x, mine), by_forward(model, x, natives)
        assert answer["cache"] is mine
        torch.testing.assert_close(answer["out"], expected["out"], rtol=1e-4, atol=1e-5)
        assert is_close(inside(mine), inside(natives)), step
    assert hits(model) >= 34, explain_module(model)
    assert eagercache.stats().compiles - before <= 2


def test_objects_on_two_streams_are_written_in_order() -> None:
    model = Reader(Reader.grow).cuda()
    mine, natives = moved(Cache(4)), moved(Cache(4))
    x = torch.randn(1, 1, 8, device="cuda")
    for step in range(12):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            torch.cuda._sleep(10_000_000)
            model(x, mine)
        torch.cuda.synchronize()
        by_forward(model, x, natives)
        assert is_close(inside(mine), inside(natives)), step
    assert hits(model) > 0, explain_module(model)
