"""Programs that go to and fro between training and evaluation while a kernel is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import eagercache
import pytest
import torch
from eagercache.modules import look_budget
from eagercache.modules.forms import Form, Missed
from eagercache.modules.looks import MAX_LOOKS_WITHOUT_HITS
from eagercache.modules.manager import manager
from torch import nn

X = torch.randn(4, 8)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """One that is looked at; nothing is asked of a worker, which takes as long as it likes."""

    def leave(_digest: str, _module: nn.Module, missed: Missed) -> None:
        missed.done.set()

    monkeypatch.setattr(manager._requests, "_submit", leave)
    monkeypatch.setattr(look_budget, "SHARE", 1e9)  # looks are counted here
    made = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1))
    with eagercache.enable((), modules=[nn.Sequential], training=True, on_miss="native"):
        yield made


def epochs(model: nn.Module, count: int) -> None:
    """Each switches the mode, and makes two calls: one is looked at, at once, and one counts."""
    for _ in range(count):
        model.train(not model.training)
        for _ in range(2):
            model(X)


def three_modes(model: nn.Module, count: int) -> None:
    """The same with a mode more: of two by turns the second is known without a look."""
    for number in range(count):
        model.train(number % 3 > 0)
        model.get_submodule("2").train(number % 3 == 1)
        for _ in range(2):
            model(X)


def reason(model: nn.Module) -> str:
    return next(row.reason for part, row in manager.stats() if part is model)


def test_looks_do_not_count_that_come_before_a_kernel_which_is_waited_for(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[int] = {id(model)}
    monkeypatch.setattr(manager._requests, "asked", lambda: asked)
    three_modes(model, MAX_LOOKS_WITHOUT_HITS + 8)
    assert not reason(model)
    asked.clear()
    three_modes(model, MAX_LOOKS_WITHOUT_HITS - 8)
    assert not reason(model)
    three_modes(model, 16)
    assert reason(model) == "it changes again and again, and has no kernel"


def test_a_module_that_is_another_one_between_its_calls_is_looked_at_in_them(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trainers set on a module what they are about to do."""
    beside: list[Callable[[], None]] = []
    monkeypatch.setattr(manager._thread, "post", beside.append)
    with eagercache.enable((), modules=[nn.Sequential], training=True, on_miss="background"):
        for _ in range(16):
            model.phase = "step"  # type: ignore[assignment]
            model(X)
            model.phase = None  # type: ignore[assignment]
            while beside:
                beside.pop(0)()
        (row,) = [row for part, row in manager.stats() if part is model]
    assert row.state == "watched"
    assert row.pending >= 8


def test_a_request_for_a_mode_that_the_module_is_no_longer_in_is_not_made(
    model: nn.Module,
) -> None:
    epochs(model, 2)
    info = manager._known.find(model)
    assert info is not None and model.training and len(info.seen) == 2
    form = Form(weakref.ref(model), info.identity, b"", 1, True)
    assert not manager._requests._is_another(model, form)
    model.eval()
    assert manager._requests._is_another(model, form)
    assert not info.settled  # nothing is to be looked at once more
    model.train()
    assert not manager._requests._is_another(model, form)
