"""Changes of a module between two calls, which must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import eagercache
import module_zoo
import pytest
import torch
from module_fill import answered_by_kernel, block, forward, warm
from torch import nn

__all__ = ["block", "warm"]

pytestmark = pytest.mark.usefixtures("filled_modules")


def test_new_values_are_seen_without_a_new_kernel(block: nn.Module) -> None:
    x = module_zoo.example("Block")
    with torch.no_grad():
        block.up.weight.mul_(0.5)
        block.shift.add_(1)
        state = {name: value + 0.125 for name, value in block.state_dict().items()}
        answer, by_kernel = answered_by_kernel(block, x)
        assert by_kernel
        torch.testing.assert_close(answer, forward(block, x))
        block.load_state_dict(state)
        answer, by_kernel = answered_by_kernel(block, x)
        assert by_kernel
        torch.testing.assert_close(answer, forward(block, x))


def _set_attribute(block: Any) -> None:
    block.scale = 3.0


def _set_attribute_below(block: Any) -> None:
    block.norm.eps = 0.5


def _replace_submodule(block: Any) -> None:
    block.norm = nn.Sequential(nn.LayerNorm(48), nn.ReLU())


def _replace_submodule_directly(block: Any) -> None:
    block._modules["norm"] = nn.Identity()


def _replace_parameter(block: Any) -> None:
    block.up.weight = nn.Parameter(torch.zeros(96, 48).t().contiguous().t())


def _replace_parameter_directly(block: Any) -> None:
    block.up._parameters["weight"] = nn.Parameter(torch.ones(96, 48, dtype=torch.float32) * 0.01)


def _remove_parameter(block: Any) -> None:
    block.up.bias = None


def _hook(block: Any) -> None:
    block.down.register_forward_hook(lambda module, args, output: output + 7)


def _pre_hook(block: Any) -> None:
    block.register_forward_pre_hook(lambda module, args: (args[0] + 7,))


def _parametrize(block: Any) -> None:
    class Halve(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    nn.utils.parametrize.register_parametrization(block.up, "weight", Halve())


def _other_class(block: Any) -> None:
    class Doubled(module_zoo.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    block.__class__ = Doubled


def _own_forward(block: Any) -> None:
    block.forward = lambda x: x * 0


def _double(block: Any) -> None:
    block.double()


@pytest.mark.parametrize(
    "change",
    [
        _set_attribute,
        _set_attribute_below,
        _replace_submodule,
        _replace_submodule_directly,
        _replace_parameter,
        _replace_parameter_directly,
        _remove_parameter,
        _hook,
        _pre_hook,
        _parametrize,
        _other_class,
        _own_forward,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
def test_a_change_between_two_calls_is_noticed(
    block: nn.Module, change: Callable[[Any], None]
) -> None:
    x = module_zoo.example("Block")
    with torch.no_grad():
        before = block(x)
        change(block)
        answer = block(x)
        with eagercache.enable(ops=(), on_miss="native"):
            expected = block(x)
    torch.testing.assert_close(answer, expected)
    assert not torch.allclose(answer, before, atol=1e-3)


def test_a_method_of_the_class_is_replaced(
    block: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = module_zoo.example("Block")
    monkeypatch.setattr(module_zoo.Block, "forward", lambda self, x: x - 5)
    with torch.no_grad():
        torch.testing.assert_close(block(x), x - 5)


def test_training_mode_and_back(block: nn.Module) -> None:
    x = module_zoo.example("Block")
    with torch.no_grad():
        block.train()
        _, by_kernel = answered_by_kernel(block, x)
        assert not by_kernel  # the kernel was made for eval mode
        block.eval()
        block(x)
        _, by_kernel = answered_by_kernel(block, x)
        assert by_kernel


def test_calls_that_need_gradients_are_the_forwards(block: nn.Module) -> None:
    x = module_zoo.example("Block")
    answer, by_kernel = answered_by_kernel(block, x)
    assert not by_kernel
    answer.sum().backward()
    assert block.up.weight.grad is not None
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    _, by_kernel = answered_by_kernel(block, x)
    assert by_kernel
    _, by_kernel = answered_by_kernel(block, x.clone().requires_grad_())
    assert not by_kernel


def test_global_hooks_autocast_modes_and_inference(block: nn.Module) -> None:
    x = module_zoo.example("Block")
    with torch.no_grad():
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: output + 1 if module is block else None
        )
        try:
            hooked, by_kernel = answered_by_kernel(block, x)
        finally:
            handle.remove()
        assert not by_kernel
        torch.testing.assert_close(hooked, forward(block, x) + 1)
        with torch.autocast("cpu", torch.bfloat16):
            _, by_kernel = answered_by_kernel(block, x)
            assert not by_kernel
    with torch.inference_mode():
        answer, by_kernel = answered_by_kernel(block, x)
        assert by_kernel and answer.is_inference()
