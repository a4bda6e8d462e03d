"""What code of the program travels as."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import Program
from eagercache.callables import function_transfer, module_transfer
from eagercache.callables.module_identity import identify
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten
everything = torch.ops


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return aten.relu.default(x) * 2 + everything.aten.tanh(x) + torch.ops.aten.sin(x)


class _Calls(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _doubled(x)


# As a script's own: they travel by value.
_doubled.__module__ = _Calls.__module__ = "__main__"


def test_namespaces_of_operators_travel_with_the_code_that_names_them() -> None:
    x = torch.linspace(-1, 1, 8)
    function = function_transfer.unpack(function_transfer.pack(_doubled))
    assert function.__globals__ is not _doubled.__globals__
    assert function.__globals__["aten"] is aten
    assert torch.equal(function(x), _doubled(x))
    packed = module_transfer.pack(_Calls(), (x,), {})
    assert packed


def _is_on() -> bool:
    return bool(torch.backends.mkldnn.enabled)


class _Kind:
    """Changed by a test."""


def _kind() -> type:
    return _Kind


_is_on.__module__ = _Kind.__module__ = _kind.__module__ = "__main__"


def test_modules_of_a_class_of_their_own_are_imported() -> None:
    assert type(torch.backends.mkldnn) is not type(torch)
    function = function_transfer.unpack(function_transfer.pack(_is_on))
    assert function.__globals__ is not _is_on.__globals__
    assert function() is _is_on()


def test_a_class_that_travels_again_has_nothing_of_what_it_was() -> None:
    _Kind.gain = 2.0  # type: ignore[attr-defined]
    with_gain = function_transfer.pack(_kind)
    del _Kind.gain  # type: ignore[attr-defined]
    without = function_transfer.pack(_kind)
    assert function_transfer.unpack(with_gain)().gain == 2.0
    assert not hasattr(function_transfer.unpack(without)(), "gain")
    assert not hasattr(_Kind, "gain")


class _Repeated(torch.nn.Module):
    """Pickled as what it was made with."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def __getstate__(self) -> dict[str, int]:
        return {"times": self.times}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(self.times)


@pytest.mark.parametrize("training", [False, True])
def test_modules_that_pickle_themselves_keep_their_mode(*, training: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), _Repeated(3)).train(training)
    model[0].train(not training)
    there = module_transfer.unpack(module_transfer.pack(model, (torch.ones(2, 8),), {})).module
    assert isinstance(there[1], _Repeated) and there[1].training is training
    assert identify(there).digest == identify(model).digest


class _Chosen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = functools.partial(sdpa_kernel, [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.kernels():
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_members_of_enums_of_torchs_own_travel() -> None:
    there = module_transfer.unpack(module_transfer.pack(_Chosen(), (torch.ones(2, 8),), {})).module
    assert there.kernels.args == _Chosen().kernels.args
    first, second = _Chosen(), _Chosen()
    second.kernels = functools.partial(sdpa_kernel, [SDPBackend.MATH])
    assert identify(there).digest == identify(first).digest != identify(second).digest


def test_what_is_computed_of_tensors_that_are_sent_is_no_call_of_the_program(
    program: Program,
) -> None:
    seen = program("""
import torch, eagercache
from eagercache.callables import module_transfer
names = ["mean", "std.correction", "abs", "eq.Tensor", "min", "max", "_to_copy", "add.Tensor"]
eagercache.enable(names, on_miss="native")
def calls():
    stats = eagercache.stats()
    return stats.hits + stats.misses + stats.pending + stats.native + stats.aside
model, x = torch.nn.Linear(128, 64), torch.randn(64, 128)
x + 1
before = calls()
packed = module_transfer.pack(model, (x,), {})
after = calls()
x + 2
report(before=before, after=after, last=calls(), packed=len(packed) > 0)
""")
    assert seen["packed"]
    assert seen["after"] == seen["before"] == 1
    assert seen["last"] == 2
