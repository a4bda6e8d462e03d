"""Modules with `nn.GRU`, `nn.LSTM` and `nn.RNN`, which keep their weights in lists, too."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import layer_zoo
import pytest
import torch
from eagercache.callables.module_identity import Unfit, Unsettled, identify
from eagercache.modules.watch import attribute_values
from layer_cases import run_all_cases
from torch import nn


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each case."""
    path = tmp_path_factory.mktemp("recurrent") / "cache"
    path.mkdir(mode=0o700)
    return run_all_cases("RECURRENT", path)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", layer_zoo.RECURRENT)
def test_a_module_around_a_recurrent_layer_has_a_kernel(
    name: str, training: bool, found: dict[str, Any]
) -> None:
    hits, wrong, lines = found[f"{name}, {training}"]
    assert wrong == 0, lines
    refused = layer_zoo.REFUSED_IN_TRAINING.get(name) if training else None
    if refused is not None:
        assert hits == 0 and refused in lines[0], lines
    else:
        assert hits == 3, lines


def _changes() -> dict[str, Callable[[nn.GRU], object]]:
    def other() -> nn.Parameter:
        return nn.Parameter(torch.ones(18, 6))

    return {
        "a weight": lambda layer: setattr(layer, "weight_hh_l0", other()),
        "a weight behind the layer's back": lambda layer: layer._parameters.update(
            weight_hh_l0=other()
        ),
        "an item of the list": lambda layer: layer._flat_weights.__setitem__(1, other()),
        "the order of the list": lambda layer: layer._flat_weights.reverse(),
        "another list": lambda layer: setattr(layer, "_flat_weights", [other()] * 4),
        "a reference": lambda layer: layer._flat_weight_refs.__setitem__(
            0, weakref.ref(layer.weight_hh_l0)
        ),
        "a name": lambda layer: layer._flat_weights_names.__setitem__(0, "bias_ih_l0"),
    }


@pytest.mark.parametrize("name", _changes())
def test_a_change_of_what_a_recurrent_layer_keeps_is_another_module(name: str) -> None:
    model = layer_zoo.Tagger(nn.GRU)
    before = identify(model).digest
    _changes()[name](model.layer)  # type: ignore[arg-type]
    with contextlib.suppress(Unfit):  # which no kernel answers either
        assert identify(model).digest != before


def test_a_recurrent_layer_is_described_again_when_it_has_met_its_new_weights() -> None:
    layer = nn.Sequential(nn.GRU(4, 4))
    before = identify(layer).digest
    old = layer[0].weight_ih_l0  # kept alive, as by an optimizer
    layer[0].weight_ih_l0 = nn.Parameter(torch.ones(12, 4))
    with pytest.raises(Unsettled, match="no longer the module's"):
        identify(layer)
    layer(torch.zeros(2, 1, 4))
    assert identify(layer).digest == before
    assert old is not layer[0].weight_ih_l0


def test_a_foreign_tensor_in_a_set_stays_unfit() -> None:
    model = layer_zoo.Tagger(nn.GRU)
    model.more = {model.norm.weight, torch.ones(2)}  # type: ignore[assignment]
    with pytest.raises(Unfit, match="attribute more holds a tensor inside a container"):
        identify(model)


def test_a_list_of_own_tensors_is_watched_item_by_item() -> None:
    model = nn.Linear(4, 4)
    model.both = [model.weight, model.bias]  # type: ignore[assignment]
    (row,) = [row for row in attribute_values(model) if row[1] is model.both]
    assert row[0] == "list"
    assert [value for value, by_type in row[3] if not by_type] == [model.weight, model.bias]
