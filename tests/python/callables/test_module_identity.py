"""What tells two modules apart."""

from __future__ import annotations

import datetime
import decimal
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

import module_zoo
import numpy as np
import pytest
import torch
from conftest import run_program
from eagercache.callables.module_identity import Unfit, identify
from torch import nn


def digest(model: nn.Module) -> str:
    """The module's identity."""
    return identify(model).digest


def test_equal_modules_have_equal_identities_whatever_their_values() -> None:
    torch.manual_seed(1)
    one, two = module_zoo.Block().eval(), module_zoo.Block().eval()
    assert not torch.equal(one.up.weight, two.up.weight)
    assert digest(one) == digest(two)


def _share(block: Any) -> None:
    block.norm.bias = block.norm.weight


def _narrow(block: Any) -> None:
    block.up.weight = nn.Parameter(torch.zeros(96, 49)[:, :48])


def _attribute(block: Any) -> None:
    block.scale = 2


def _minus_zero(block: Any) -> None:
    block.offset = -0.0


def _train(block: Any) -> None:
    block.train()


def _no_bias(block: Any) -> None:
    block.up.bias = None


def _half(block: Any) -> None:
    block.half()


def _subclass(block: Any) -> None:
    class Other(module_zoo.Block):
        pass

    block.__class__ = Other


def _container(block: Any) -> None:
    block.sizes = {"a": [1, 2, (3, None)]}


@pytest.mark.parametrize(
    "change",
    [
        _share,
        _narrow,
        _attribute,
        _minus_zero,
        _train,
        _no_bias,
        _half,
        _subclass,
        _container,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
def test_what_a_kernel_depends_on_is_in_the_identity(change: Callable[[Any], None]) -> None:
    block = module_zoo.Block().eval()
    before = digest(block)
    change(block)
    assert digest(block) != before


def test_values_of_the_same_kind_differ_by_their_bits() -> None:
    block = module_zoo.Block()
    seen = set()
    for value in (0.0, -0.0, 0, False, None, "0", (0,), [0], {0}, float("nan")):
        block.value = value
        seen.add(digest(block))
    assert len(seen) == 10


def test_bookkeeping_that_differs_from_process_to_process_is_left_out() -> None:
    class Settings:
        def __init__(self, text: str, length: int) -> None:
            self.length = length
            self._original_object_hash = hash(text)

    blocks = []
    for text, length in (("a", 1), ("b", 1), ("a", 2)):
        block: Any = module_zoo.Block()
        block.settings = Settings(text, length)
        blocks.append(digest(block))
    assert blocks[0] == blocks[1] != blocks[2]


def test_a_program_that_has_compiled_something_has_the_same_identities() -> None:
    done = run_program(
        """
import torch
from eagercache.callables.module_identity import identify
module = torch.nn.Sequential(torch.nn.Linear(2, 2))
first, before = identify(module).digest, torch.nn.Module.__init__
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
patched = torch.nn.Module.__init__ is not before
same = identify(module).digest == first
torch.nn.Module.__init__ = lambda self: before(self)
report(patched=patched, same=same, others=identify(module).digest != first)
""",
        None,
    )
    assert done["patched"] and done["same"] and done["others"], done


def test_the_code_of_a_class_is_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    block = module_zoo.Block()
    before = digest(block)
    monkeypatch.setattr(module_zoo.Block, "extra", lambda self: 1, raising=False)
    changed = digest(block)
    monkeypatch.setattr(module_zoo.Block, "extra", lambda self: 2, raising=False)
    assert len({before, changed, digest(block)}) == 3


class Shifted(nn.Module):
    """Its forward computes with what its class holds, a default and a function's closure."""

    shift, table = 1.0, {"scale": [2.0]}
    scaled = staticmethod((lambda scale: lambda x: x * scale)(3.0))

    def forward(self, x: torch.Tensor, power: int = 2) -> torch.Tensor:
        return self.scaled(x) ** power + self.shift * self.table["scale"][0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shift", 1.5),
        ("table", {"scale": [2.5]}),
        ("scaled", staticmethod((lambda scale: lambda x: x * scale)(4.0))),
    ],
)
def test_values_of_a_class_are_in_the_identity(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    before = digest(Shifted())
    assert digest(Shifted()) == before
    monkeypatch.setattr(Shifted, name, value)
    assert digest(Shifted()) != before


def test_defaults_of_a_method_are_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(Shifted())
    monkeypatch.setattr(Shifted.forward, "__defaults__", (3,))
    assert digest(Shifted()) != before


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (range(0, 4, 2), range(0, 4)),
        (pathlib.Path("a/b"), pathlib.Path("a/c")),
        (pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a")),
        (datetime.timedelta(seconds=1), datetime.timedelta(seconds=2)),
        (
            datetime.datetime(2026, 1, 2),
            datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        ),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (re.compile("a"), re.compile(b"a")),
        (torch.per_tensor_affine, torch.per_channel_affine),
        (np.dtype("<f4"), np.dtype(">f4")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_never_change_are_written_down(value: Any, other: Any) -> None:
    block = module_zoo.Block()
    block.held = [value]
    before = digest(block)
    block.held = [value]
    assert digest(block) == before
    block.held = [other]
    assert digest(block) != before


class _Zone(datetime.tzinfo):
    hours = 1

    def utcoffset(self, _: datetime.datetime | None) -> datetime.timedelta:
        return datetime.timedelta(hours=self.hours)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("date", datetime.datetime(2026, 1, 2, tzinfo=_Zone()), "cannot be compared"),
        ("record", np.dtype([("a", "f4")]), "cannot be compared"),
        ("lock", threading.Lock(), "cannot be compared"),
        ("hidden", [nn.Linear(2, 2)], "hidden holds a module that is not registered"),
        ("tensors", {torch.ones(2)}, "inside a container"),
        ("graphs", [torch.ones(2, requires_grad=True) * 2], "inside a container"),
        ("sparse", torch.eye(3).to_sparse(), "not a dense tensor"),
    ],
)
def test_what_cannot_be_written_down_is_named(name: str, value: Any, reason: str) -> None:
    block = module_zoo.Block()
    object.__setattr__(block, name, value)
    with pytest.raises(Unfit, match=reason) as error:
        identify(block)
    assert name in str(error.value)
