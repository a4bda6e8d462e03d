"""Kernels of modules that draw masks: the program's own numbers, in eager's order."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagercache.module_noise import Noise, Replayed, drawn_layouts, take_noise
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from training_checks import Trained, assert_alike, assert_same_gradients, eager, leaf, pair

Call = Callable[[torch.Tensor], torch.Tensor]


def both(model: nn.Module, other: nn.Module) -> tuple[Call, Call]:
    """By the kernel, and by eager."""
    return model, lambda value: eager(other, value)


def seeded(call: Callable[[], Any], seed: int = 7) -> tuple[Any, torch.Tensor]:
    """What a call gives from a seed, and a number that is drawn after it."""
    torch.manual_seed(seed)
    return call(), torch.rand(1)


def test_steps_draw_what_eager_draws(training_store: Trained, training_kernels: None) -> None:
    assert training_store.report["rows"]["Dropped"]["hits"] == [3], training_store.report
    model, other, x = pair("Dropped")
    for seed in range(4):
        found = []
        for call in both(model, other):
            argument = leaf(x, seed)
            answer, after = seeded(lambda call=call, argument=argument: call(argument), seed)
            answer.square().sum().backward()
            found.append((answer.detach(), argument.grad, after))
        for mine, theirs in zip(*found, strict=True):
            assert_alike(mine, theirs)
        assert torch.equal(found[0][2], found[1][2])
        assert not torch.equal(found[0][0], model(x))
    assert_same_gradients(model, other)


def test_a_backward_draws_nothing_and_has_the_masks_of_its_call(training_kernels: None) -> None:
    model, other, x = pair("Dropped")
    found = []
    for call in both(model, other):
        argument = leaf(x)
        answer, _ = seeded(lambda call=call, argument=argument: call(argument))
        call(argument)  # draws other ones
        before = torch.get_rng_state()
        (first,) = torch.autograd.grad(answer.square().sum(), argument, create_graph=True)
        first.square().sum().backward()
        assert torch.equal(before, torch.get_rng_state())
        found.append((first.detach(), argument.grad))
    for mine, theirs in zip(*found, strict=True):
        assert_alike(mine, theirs)
    assert_same_gradients(model, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_draws_the_same_again(training_kernels: None, reentrant: bool) -> None:
    model, other, x = pair("Dropped")
    for call in both(model, other):
        argument = leaf(x)
        answer, _ = seeded(
            lambda call=call, argument=argument: checkpoint(call, argument, use_reentrant=reentrant)
        )
        answer.square().sum().backward()
    assert_same_gradients(model, other)


def graph_of(device: str, *, own: bool = False, p: float = 0.1) -> torch.fx.GraphModule:
    """A dropout of halves, then a mask of rows, as a joint graph has them."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    with FakeTensorMode():
        x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
        for node in (x, tangent):
            node.meta["val"] = torch.empty(4, 6, device=device, dtype=torch.bfloat16)
        dropped = graph.call_function(aten.native_dropout.default, (x, p, True))
        dropped.meta["val"] = aten.native_dropout.default(x.meta["val"], p, True)
        first = graph.call_function(operator.getitem, (dropped, 0))
        mask = graph.call_function(operator.getitem, (dropped, 1))
        first.meta["val"], mask.meta["val"] = dropped.meta["val"]
        rows = graph.call_function(aten.empty.memory_format, ([4, 1],), {"device": device})
        rows.meta["val"] = torch.empty(4, 1, device=device)
        options = {"generator": None} if own else {}
        path = graph.call_function(aten.bernoulli.p, (rows, 0.75), options)
        path.meta["val"] = rows.meta["val"]
        kept = graph.call_function(aten.mul.Tensor, (first, path))
        kept.meta["val"] = first.meta["val"] * path.meta["val"]
    graph.output((kept, mask, tangent))
    return torch.fx.GraphModule(nn.Module(), graph)


def test_masks_are_inputs_in_the_order_in_which_they_are_drawn() -> None:
    made = graph_of("cpu")
    assert drawn_layouts(made.graph) == [(6, 1), (1, 1)]
    noise = take_noise(made)
    cpu = torch.device("cpu")
    assert noise == [
        Noise("bernoulli", 0.9, torch.bool, (4, 6), (6, 1), cpu),
        Noise("bernoulli", 0.75, torch.float32, (4, 1), (1, 1), cpu),
    ]
    names = [node.target for node in made.graph.find_nodes(op="placeholder")]
    assert names == ["primals_1", "primals_noise_0", "primals_noise_1", "tangents_1"]
    x = torch.randn(4, 6).bfloat16()
    torch.manual_seed(3)
    masks = [mask.draw() for mask in noise]
    torch.manual_seed(3)
    dropped, mask = torch.native_dropout(x, 0.1, True)
    path = torch.empty(4, 1).bernoulli_(0.75)
    answer, mine, _ = made(x, *masks, x)
    assert torch.equal(mine, mask)
    assert torch.equal(masks[1], path)
    torch.testing.assert_close(answer, dropped * path, rtol=2**-7, atol=0.0)  # rounded once more


def test_on_a_gpu_native_draws_from_what_has_the_dtype_of_the_dropped() -> None:
    noise = take_noise(graph_of("cuda"))
    assert [(n.kind, n.probability, n.dtype) for n in noise] == [
        ("dropout", 0.1, torch.bfloat16),
        ("bernoulli", 0.75, torch.float32),
    ]


def test_generators_of_a_modules_own_and_dropping_all_are_no_masks() -> None:
    assert [n.kind for n in take_noise(graph_of("cuda", own=True))] == ["dropout"]
    assert [n.kind for n in take_noise(graph_of("cuda", p=1.0))] == ["bernoulli"]


def test_other_masks_than_were_drawn_are_not_replayed() -> None:
    layer, x = nn.Dropout(0.5), torch.ones(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    with Replayed([mask]):
        assert torch.equal(layer(x), x * 2)
    for masks in ([], [torch.ones(4, 3)]):
        with pytest.raises(RuntimeError, match="other random masks"), Replayed(masks):
            layer(x)
