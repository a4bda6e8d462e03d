"""Two traces are one where their outputs are the same expressions of the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagercache.worker.graphs.same_programs import compute_the_same


def _exported(body: Callable[..., Any]) -> torch.export.ExportedProgram:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.ones(3))
            self.register_buffer("two", torch.ones(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return body(self, x, y)

    given = (torch.ones(3), torch.ones(3))
    return torch.export.export(Module().train(), given, strict=True)


def _swapped(_: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    right = y.cos() + torch.tensor([1.0, 2.0, 3.0])
    left = x.sin() * torch.tensor([4.0, 5.0, 6.0])
    return left, right


def test_another_order_of_operators_and_constants_is_no_difference() -> None:
    def straight(_: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        left = x.sin() * torch.tensor([4.0, 5.0, 6.0])
        return left, y.cos() + torch.tensor([1.0, 2.0, 3.0])

    assert compute_the_same(_exported(straight), _exported(_swapped))


def _turned(s: Any, x: torch.Tensor, buffers: tuple[str, ...], factor: float = 2.0) -> Any:
    found = {}
    for name in buffers:
        with torch.no_grad():
            found[name] = (getattr(s, name) * factor).cos()
    return x * found["one"] + found["two"]


def test_parts_without_gradients_are_followed() -> None:
    straight, back = (
        _exported(lambda s, x, y, names=names: _turned(s, x, names))
        for names in (("one", "two"), ("two", "one"))
    )
    assert any("wrap_with_set_grad" in str(node.target) for node in straight.graph.nodes)
    assert compute_the_same(straight, back)
    other = _exported(lambda s, x, y: _turned(s, x, ("two", "one"), factor=3.0))
    assert not compute_the_same(straight, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda s, x, y: x - y, lambda s, x, y: y - x),
        (lambda s, x, y: x * 2, lambda s, x, y: x * 3),
        (lambda s, x, y: x + s.one, lambda s, x, y: x + s.two),
        (lambda s, x, y: x + torch.tensor(1.0), lambda s, x, y: x + torch.tensor(2.0)),
        (lambda s, x, y: {"a": x + 1, "b": y}, lambda s, x, y: {"b": y, "a": x + 1}),
        (lambda s, x, y: (x.sin(), y.sin()), lambda s, x, y: (y.sin(), x.sin())),
        # The same expressions, with other numbers drawn for each.
        (
            lambda s, x, y: [t.bernoulli(0.5) for t in (x, y)],
            lambda s, x, y: [t.bernoulli(0.5) for t in (y, x)][::-1],
        ),
        # With gradients, and without.
        (lambda s, x, y: _turned(s, x, ("one", "two")), lambda s, x, y: x * (s.one * 2.0).cos()),
        # What operators write is not followed.
        (lambda s, x, y: x.clone().add_(y), lambda s, x, y: x.clone().add_(y)),
    ],
)
def test_other_computations_are_told_apart(one: Any, other: Any) -> None:
    assert not compute_the_same(_exported(one), _exported(other))
