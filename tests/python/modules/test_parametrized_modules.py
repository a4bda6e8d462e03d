"""Modules with computed tensors: `torch.nn.utils.parametrize` and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import layer_zoo
import pytest
import torch
from eagercache.callables.module_identity import identify
from eagercache.callables.module_transfer import pack, unpack
from layer_cases import run_all_cases
from torch import nn
from torch.nn.utils import parametrizations, parametrize


def _run(cases: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(mode=0o700)
    return run_all_cases(cases, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each case."""
    folder = tmp_path_factory.mktemp("parametrized")
    return {**_run("PARAMETRIZED", folder / "taken"), **_run("LEFT", folder / "left")}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", layer_zoo.PARAMETRIZED)
def test_a_module_with_a_computed_tensor_has_a_kernel(
    name: str, training: bool, found: dict[str, Any]
) -> None:
    hits, wrong, lines = found[f"{name}, {training}"]
    assert wrong == 0, lines
    assert hits == 3, lines


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", layer_zoo.LEFT)
def test_what_cannot_be_a_kernel_says_why(name: str, training: bool, found: dict[str, Any]) -> None:
    hits, wrong, lines = found[f"{name}, {training}"]
    if name == "a custom operator" and not training:
        assert (hits, wrong) == (3, 0), lines
        return
    assert (hits, wrong) == (0, 0), lines
    assert layer_zoo.REASONS[name] in lines[0], lines


def test_a_custom_operator_arrives_as_that_of_its_file() -> None:
    layer = nn.Linear(2, 2)
    layer.calls = layer_zoo.twice
    assert unpack(pack(layer, (), {})).module.calls is layer_zoo.twice


def model() -> nn.Module:
    """Two parametrized tensors, of one layer."""
    return layer_zoo.PARAMETRIZED["several"][0]()


def test_it_arrives_as_what_it_was() -> None:
    sent, x = model(), torch.randn(2, 8)
    rebuilt = unpack(pack(sent, (x,), {})).module
    assert identify(rebuilt).digest == identify(sent).digest
    layer = rebuilt.layer
    assert isinstance(layer, nn.Linear) and parametrize.is_parametrized(layer, "weight")
    with torch.no_grad():
        for mine, its in zip(rebuilt.parameters(), sent.parameters(), strict=True):
            mine.copy_(its)
        assert torch.equal(rebuilt(x), sent(x))


def _changes() -> dict[str, Callable[[Any], object]]:
    return {
        "another parametrization": lambda layer: parametrize.register_parametrization(
            layer, "weight", layer_zoo.Symmetric()
        ),
        "none": lambda layer: parametrize.remove_parametrizations(layer, "bias"),
        "a value of one": lambda layer: setattr(layer.parametrizations.weight[1], "factor", 3.0),
        "their order": lambda layer: layer.parametrizations.weight._modules.update(
            {"0": layer.parametrizations.weight[1], "1": layer.parametrizations.weight[0]}
        ),
        "the property": lambda layer: setattr(
            type(layer), "weight", property(lambda self: self.parametrizations.weight() * 2.0)
        ),
        "another one beside it": lambda layer: setattr(type(layer), "more", 2.0),
    }


@pytest.mark.parametrize("name", _changes())
def test_a_change_of_what_computes_a_tensor_is_another_module(name: str) -> None:
    changed = model()
    before = identify(changed).digest
    _changes()[name](changed.layer)
    assert identify(changed).digest != before


def test_two_models_of_a_kind_share_their_kernels() -> None:
    first, second = model(), model()
    assert type(first.layer) is not type(second.layer)
    assert identify(first).digest == identify(second).digest


def test_what_is_parametrized_is_part_of_the_identity() -> None:
    def one(name: str) -> nn.Module:
        layer = nn.Linear(8, 8)
        parametrize.register_parametrization(layer, name, layer_zoo.Scaled())
        return layer

    assert identify(one("weight")).digest != identify(one("bias")).digest
    assert identify(parametrizations.weight_norm(nn.Linear(4, 4))).slots
