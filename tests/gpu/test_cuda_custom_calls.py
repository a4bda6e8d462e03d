"""Modules on a GPU whose kernels call operators of the program's own."""

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

sys.path.append(str(Path(__file__).parent.parent / "python" / "zoos"))

import custom_zoo


@pytest.fixture(autouse=True)
def modules_enabled() -> Iterator[None]:
    with (
        torch.no_grad(),
        eagercache.enable(ops=(), modules="auto", choose="always", on_miss="wait"),
    ):
        yield
    custom_zoo.FACTOR[0] = 2.0


def row(model: Any) -> Any:
    return next(row for part, row in manager.stats() if part is model)


def eager(model: Any, x: torch.Tensor) -> torch.Tensor:
    assert core is not None
    core.set_answering(False)
    try:
        return model(x)
    finally:
        core.set_answering(True)


@pytest.mark.parametrize("name", custom_zoo.TAKEN)
def test_every_call_calls_the_operators_and_none_is_replayed(name: str) -> None:
    model, x = custom_zoo.make(custom_zoo.TAKEN[name], "cuda"), custom_zoo.example("cuda")
    model(x)
    model(x)
    found = row(model)
    assert found.hits >= 1, explain_module(model)
    before, calls = found.hits, len(custom_zoo.CALLS)
    eager(model, x)
    each = len(custom_zoo.CALLS) - calls
    for _ in range(40):
        answer = model(x)
    assert len(custom_zoo.CALLS) - calls == 41 * each
    found = row(model)
    assert (found.hits - before, found.replayed) == (40, 0)
    torch.testing.assert_close(answer, eager(model, x), rtol=1e-4, atol=1e-5)
    custom_zoo.FACTOR[0] = 3.0
    torch.testing.assert_close(model(x), eager(model, x), rtol=1e-4, atol=1e-5)
