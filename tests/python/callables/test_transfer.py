"""What code of the program travels as."""

from __future__ import annotations

import torch
from eagercache.callables import function_transfer, module_transfer

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
