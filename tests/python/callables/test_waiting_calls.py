"""What a call of a module keeps alive while it waits for its kernel: no activation, no graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import eagercache
import pytest
import torch
from eagercache.callables.module_transfer import pack
from eagercache.callables.standins import (
    NotTransferable,
    TensorSketch,
    describe,
    sketched,
)
from eagercache.modules.manager import manager
from eagercache.modules.requests import ModuleRequests
from torch import nn


class Block(nn.Module):
    """One of several that are alike, so that one kernel is for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, names: tuple[Any, ...] = ()) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Silent:
    """A compile service that never answers."""

    def submit(self, description: Mapping[str, Any], done: Callable[[Any], None]) -> None:
        """Takes a request."""


def test_a_sketch_lets_go_of_the_graph_and_of_the_memory() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    y = (x * 2).exp()
    graph = weakref.ref(y)  # which `exp` saves for the backward
    (sketch, (again, small)), _ = sketched((y, (y, y[:1, :4])), {})
    assert type(sketch) is TensorSketch and again is sketch and sketch.requires_grad
    assert small.is_leaf and small.requires_grad and bool((small == y[:1, :4]).all())
    assert sketch.sample.numel() <= 2 * 1024
    del y
    assert graph() is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(100, 70),
        torch.randn(100, 70).t(),
        torch.randn(100, 140)[:, ::2],
        torch.randn(100, 1).expand(100, 70),
        torch.randn(7000, dtype=torch.complex64),
        torch.full((70, 70), 3.0, dtype=torch.bfloat16),
        torch.arange(7001.0)[1:].requires_grad_(),
        torch.randn(2, 3),
        torch.randn(7000).bool(),
        torch.arange(70000),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.size())}-{t.stride()}",
)
def test_a_worker_is_told_of_a_sketch_what_it_is_told_of_the_tensor(tensor: torch.Tensor) -> None:
    (sketch,), _ = sketched((tensor,), {})
    told = describe(sketch)
    assert told == describe(tensor)
    assert told.sizes == tuple(tensor.size()) and told.strides == tensor.stride()
    # Neither what is small nor what may be indices is told by statistics alone.
    assert type(sketch) is TensorSketch or told.data is not None or told.dtype == torch.int64


def test_what_a_sketch_cannot_say_goes_as_it_is() -> None:
    named, dead = torch.randn(64, 64), torch.randn(64, 64)
    named.title = "a program's own"
    dead.untyped_storage().resize_(0)
    for tensor in (named, dead, nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64).to_sparse()):
        args, _ = sketched((tensor,), {})
        assert args[0] is tensor
    with pytest.raises(NotTransferable, match="memory was given up"):
        pack(Block(), (dead,), {})


def test_waiting_calls_keep_no_activation(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(ModuleRequests, "_service", staticmethod(lambda form: Silent()))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)))
    with eagercache.enable([], modules=[Block], training=True, cache_dir=cache):
        alive: list[weakref.ref[torch.Tensor]] = []
        gc.disable()
        try:
            for _ in range(
                9
            ):  # from the second on; the 1st, 2nd, 4th and 8th miss are told to our thread
                x = torch.randn(32, 64)
                for block in model:
                    x = block(x)
                    alive.append(weakref.ref(x))
                x.sum().backward()
                del x
                settle()
            kept = [tensor() for tensor in alive if tensor() is not None]
        finally:
            gc.enable()
        assert [row.pending for _, row in manager.stats()].count(8) == 6
    assert not kept, [tuple(tensor.shape) for tensor in kept if tensor is not None]


def settle() -> None:
    """Until our thread has done what it was told."""
    done: list[bool] = []
    manager._thread.post(lambda: done.append(True))
    while not done:
        torch.zeros(1)
