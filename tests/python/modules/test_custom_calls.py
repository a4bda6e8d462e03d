"""Modules that call operators of the program's own: their kernels call those, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import custom_zoo
import pytest
import torch
from conftest import module_hits as hits
from conftest import module_kernels, run_program
from eagercache.base.load import core
from eagercache.modules.manager import explain_module

HERE = str(Path(__file__).parents[1] / "zoos")

_FILL = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, custom_zoo
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
rows = {{}}
kinds = {{**custom_zoo.TAKEN, **{{name: kind for name, (kind, _) in custom_zoo.LEFT.items()}}}}
with torch.no_grad():
    for name, kind in kinds.items():
        model = custom_zoo.make(kind)
        for _ in range(3):
            model(custom_zoo.example())
        hits = sum(row.hits for part, row in manager.stats() if part is model)
        rows[name] = [hits, explain_module(model)]
report(rows=rows)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("custom") / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(scope="module")
def filled(store: Path) -> dict[str, Any]:
    """What a program that filled the store reported."""
    return run_program(_FILL.format(here=HERE), store, timeout=600, fills=True)["rows"]


@pytest.fixture
def kernels(store: Path, filled: dict[str, Any]) -> Iterator[None]:
    """Kernels of the store answer; nothing is compiled."""
    with module_kernels(store), torch.no_grad():
        yield
    custom_zoo.FACTOR[0], custom_zoo.LIMIT[0] = 2.0, 1e9


def eager(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward's answer."""
    assert core is not None
    core.set_answering(False)
    try:
        return model(x)
    finally:
        core.set_answering(True)


def settled(kind: type[custom_zoo.Base]) -> tuple[Any, torch.Tensor]:
    """A module that a kernel answers."""
    model, x = custom_zoo.make(kind), custom_zoo.example()
    model(x)
    before = hits(model)
    torch.testing.assert_close(model(x), eager(model, x))
    assert hits(model) == before + 1, explain_module(model)
    return model, x


@pytest.mark.parametrize("name", custom_zoo.TAKEN)
def test_a_kernel_calls_the_operators(name: str, kernels: None) -> None:
    model, x = settled(custom_zoo.TAKEN[name])
    before = hits(model)
    for seed in range(3):
        torch.manual_seed(seed)
        values = torch.randn_like(x) * 3
        torch.testing.assert_close(model(values), eager(model, values))
    assert hits(model) == before + 3


@pytest.mark.parametrize("name", custom_zoo.LEFT)
def test_an_operator_that_a_kernel_cannot_call_is_why_there_is_none(
    name: str, filled: dict[str, Any]
) -> None:
    count, lines = filled[name]
    assert count == 0
    assert custom_zoo.LEFT[name][1] in lines[0], lines


def test_what_an_operator_does_besides_happens_as_often_as_in_eager(kernels: None) -> None:
    model, x = settled(custom_zoo.Calls)
    before = len(custom_zoo.CALLS)
    model(x)
    by_kernel = len(custom_zoo.CALLS) - before
    eager(model, x)
    assert by_kernel == 2
    assert len(custom_zoo.CALLS) - before == 4


def test_what_an_operator_reads_now_counts(kernels: None) -> None:
    model, x = settled(custom_zoo.Calls)
    old, before = model(x), hits(model)
    custom_zoo.FACTOR[0] = 3.0
    new = model(x)
    assert hits(model) == before + 1  # by the same kernel
    assert not torch.allclose(old, new)
    torch.testing.assert_close(new, eager(model, x))


def test_another_operator_of_the_same_name_in_the_file_is_noticed(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = settled(custom_zoo.ByAlias)
    old = model(x)
    monkeypatch.setattr(custom_zoo, "OPERATOR", torch.ops.custom_zoo.halved)
    new = model(x)
    assert not torch.allclose(old, new)
    torch.testing.assert_close(new, eager(model, x))
    calls, x = settled(custom_zoo.Calls)
    old = calls(x)
    monkeypatch.setattr(custom_zoo, "scaled", custom_zoo.halved)
    new = calls(x)
    assert not torch.allclose(old, new)
    torch.testing.assert_close(new, eager(calls, x))


def test_what_an_operator_raises_is_raised_and_the_kernel_stays(kernels: None) -> None:
    model, x = settled(custom_zoo.Lists)
    custom_zoo.LIMIT[0] = 0.0
    with pytest.raises(ValueError, match="too large"):
        model(x)
    custom_zoo.LIMIT[0] = 1e9
    before = hits(model)
    torch.testing.assert_close(model(x), eager(model, x))
    assert hits(model) == before + 1


def test_an_operator_runs_under_the_grad_mode_of_the_call(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = settled(custom_zoo.Calls)
    modes = []

    class Asks(list[float]):
        def __getitem__(self, index: Any) -> Any:
            modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().__getitem__(index)

    monkeypatch.setattr(custom_zoo, "FACTOR", Asks([2.0]))
    model(x)
    with torch.inference_mode():
        model(x)
    assert modes == [(False, False)] * 2 + [(False, True)] * 2


def test_an_operator_that_is_defined_anew_is_called(kernels: None) -> None:
    model, x = settled(custom_zoo.ByAlias)
    old = model(x)
    library = torch.library.Library("custom_zoo", "IMPL")
    try:
        library.impl("scaled", lambda x, by, sizes: x * 7.0, "CPU", allow_override=True)
        new = model(x)
        assert not torch.allclose(old, new)
        torch.testing.assert_close(new, eager(model, x))
    finally:
        library._destroy()


def test_operators_of_a_script_travel(tmp_path: Path) -> None:
    store = tmp_path / "cache"
    store.mkdir(mode=0o700)
    report = run_program(
        """
import torch, eagercache
from torch import nn
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
SHIFT = [1.0]

@torch.library.custom_op("script::shifted", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + SHIFT[0]

@shifted.register_fake
def _(x):
    return torch.empty_like(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        y = torch.ops.script.shifted(torch.tanh(self.up(x)) * 2)
        return self.down(shifted(y.sin() + 0.5) * y).tanh() + 1

torch.manual_seed(0)
model, x = Model().eval(), torch.randn(4, 8)
with torch.no_grad():
    first = model(x)
    eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
    for _ in range(3):
        answer = model(x)
    SHIFT[0] = 2.0
    other = model(x)
hits = sum(row.hits for part, row in manager.stats() if part is model)
eagercache.disable()
with torch.no_grad():
    expected = model(x)
report(hits=hits, lines=explain_module(model), same=torch.allclose(first, answer, atol=1e-5),
       follows=torch.allclose(other, expected, atol=1e-5) and not torch.allclose(other, first))
""",
        store,
        timeout=600,
        fills=True,
    )
    assert report["hits"] >= 3, report["lines"]
    assert report["same"] and report["follows"]
