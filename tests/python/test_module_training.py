"""Calls of whole modules that need gradients: kernels for the forward and for the backward."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import training_zoo
from conftest import module_kernels, run_program
from eagercache.modules import explain_module
from torch import nn
from torch.utils.checkpoint import checkpoint

HERE = str(Path(__file__).parent)
NODE = "EagercacheModuleBackward"

FILL = """
import os, sys
sys.path.insert(0, {here!r})
os.environ["EAGERCACHE_MODULE_TRAINING"] = "1"
import torch, eagercache, training_zoo
from eagercache.modules import explain_module, manager
torch.set_num_threads(1)
eagercache.enable(ops=(), modules="auto", on_miss={on_miss!r}, choose="always")
rows = {{}}
for name in {names!r}:
    model, x = training_zoo.make(name), training_zoo.example(name)
    for _ in range(4):
        answer = model(x)
        leaves = torch.utils._pytree.tree_leaves(answer)
        sum(leaf.sum() for leaf in leaves).backward()
    rows[name] = dict(
        lines=explain_module(model),
        hits=[row.training_hits for part, row in manager.stats() if part is model],
        below=sum(row.training_hits for part, row in manager.stats() if part is not model
                  and part in set(model.modules())),
    )
report(rows=rows, compiles=eagercache.stats().compiles)
"""

NAMES = ["ConvNorm", "Attention", "Dropped"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's directory."""
    path = tmp_path_factory.mktemp("training") / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(scope="module")
def filled(store: Path) -> dict[str, Any]:
    """What the program that filled the store reported."""
    return run_program(
        FILL.format(here=HERE, on_miss="wait", names=NAMES), store, timeout=900, fills=True
    )


@pytest.fixture
def warm(store: Path, filled: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of the filled store answer in this process; nothing is compiled."""
    assert filled["rows"]["ConvNorm"]["hits"] == [3], filled
    monkeypatch.setenv("EAGERCACHE_MODULE_TRAINING", "1")
    with module_kernels(store):
        yield


def pair(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """(module that kernels answer, its copy that is eager's, an argument)."""
    model, x = training_zoo.make(name), training_zoo.example(name)
    other = copy.deepcopy(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(x)
    answer = model(x)
    (node,) = {leaf.grad_fn.name() for leaf in leaves_of(answer)}
    assert node == NODE, explain_module(model)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_(before[key])
    return model, other, x


def leaves_of(answer: Any) -> list[torch.Tensor]:
    """The tensors of an answer."""
    return list(torch.utils._pytree.tree_leaves(answer))


def eager(model: nn.Module, *args: Any) -> Any:
    """The answer of the module's own forward."""
    return type(model).forward(model, *args)


def leaf(x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """Another argument like ``x``."""
    return (x.detach() + shift).requires_grad_()


def loss_of(answer: Any) -> torch.Tensor:
    """A number that depends on all of an answer, not in the same way."""
    return torch.stack([(leaf * (leaf + 0.5)).sum() for leaf in leaves_of(answer)]).sum()


def assert_alike(mine: torch.Tensor, theirs: torch.Tensor, name: str = "") -> None:
    """Equal but for rounding, which is as large as the largest number makes it."""
    scale = float(theirs.abs().max())
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5 * max(scale, 1.0), msg=name)


def assert_same_gradients(model: nn.Module, other: nn.Module) -> None:
    """The parameters' gradients are alike, and missing on both sides or on none."""
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            assert_alike(mine.grad, theirs.grad, name)
            assert mine.grad.stride() == theirs.grad.stride()


def assert_same_state(model: nn.Module, other: nn.Module) -> None:
    """Parameters and buffers are alike, counters exactly."""
    for name, mine in model.state_dict().items():
        theirs = other.state_dict()[name]
        if mine.is_floating_point():
            assert_alike(mine, theirs, name)
        else:
            assert torch.equal(mine, theirs), name


def test_another_process_compiles_nothing(store: Path, filled: dict[str, Any]) -> None:
    again = run_program(FILL.format(here=HERE, on_miss="native", names=NAMES), store)
    assert again["compiles"] == 0
    for name in ("ConvNorm", "Attention"):
        assert again["rows"][name]["hits"] == [3], again["rows"][name]


def test_a_module_that_draws_is_left_and_its_parts_are_tried(filled: dict[str, Any]) -> None:
    row = filled["rows"]["Dropped"]
    assert row["hits"] == [0]
    assert "random" in row["lines"][0], row["lines"]
    assert row["below"] > 0, row["lines"]


@pytest.mark.parametrize("name", ["ConvNorm", "Attention", "Mlp"])
def test_training_steps_are_eagers(warm: None, name: str) -> None:
    model, other, x = pair(name)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-4, momentum=0.9) for m in (model, other)]
    for step in range(5):
        for own, optimizer in zip((model, other), optimizers, strict=True):
            argument = leaf(x, step)
            call = own if own is model else lambda value: eager(other, value)
            for _ in range(2):  # accumulates
                answer = call(argument)
                loss_of(answer).backward()
            if own is model:
                assert leaves_of(answer)[0].grad_fn.name() == NODE
                mine = argument.grad
            optimizer.step()
            if step < 4:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert_alike(mine, argument.grad)
    assert_same_gradients(model, other)
    assert_same_state(model, other)


def test_buffers_are_written_in_place_and_their_versions_move_as_in_eager(warm: None) -> None:
    model, other, x = pair("ConvNorm")
    counts = [model.norm.num_batches_tracked, other.norm.num_batches_tracked]
    versions = [[b._version for b in own.buffers()] for own in (model, other)]
    model(x)
    eager(other, x)
    moved = [
        [b._version - v for b, v in zip(own.buffers(), before, strict=True)]
        for own, before in zip((model, other), versions, strict=True)
    ]
    assert moved[0] == moved[1]
    assert model.norm.num_batches_tracked is counts[0]
    assert_same_state(model, other)


def test_one_answer_alone_gives_no_gradient_to_what_the_other_needs(warm: None) -> None:
    model, other, x = pair("Mlp")
    model(x)["left"].sum().backward()
    eager(other, x)["left"].sum().backward()
    assert model.right.weight.grad is None
    assert_same_gradients(model, other)


def test_gradients_do_not_share_memory(warm: None) -> None:
    model, other, x = pair("Attention")
    argument = leaf(x)
    tangent = torch.ones_like(x)
    model(argument).backward(tangent)
    argument.grad.add_(1)
    assert torch.equal(tangent, torch.ones_like(x))
    eager(other, x).backward(tangent)
    assert_same_gradients(model, other)


def test_expanded_transposed_and_shifted_gradients_of_the_answer(warm: None) -> None:
    model, other, x = pair("Attention")
    shifted = torch.randn(2 * 6 * 16 + 1)[1:].view(2, 6, 16)
    for tangent in (
        torch.ones(()).expand(2, 6, 16),
        torch.randn(16, 6, 2).permute(2, 1, 0),
        shifted,
    ):
        model(x).backward(tangent)
        eager(other, x).backward(tangent)
    assert_same_gradients(model, other)


def test_retained_graphs_and_graphs_that_are_gone(warm: None) -> None:
    model, other, x = pair("Attention")
    answer = model(x).sum()
    answer.backward(retain_graph=True)
    answer.backward()
    for _ in range(2):
        eager(other, x).sum().backward()
    assert_same_gradients(model, other)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        answer.backward()


def test_writing_what_the_backward_reads_raises_as_in_eager(warm: None) -> None:
    model, other, x = pair("Attention")
    for call in (model, lambda value: eager(other, value)):
        answer = call(x).sum()
        with torch.no_grad():
            (model if call is model else other).qkv.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            answer.backward()
        answer = call(x).sum()
        with torch.no_grad():  # eager reads no bias
            (model if call is model else other).out.bias.add_(1)
        answer.backward()


def test_hooks_on_answers_and_parameters_run(warm: None) -> None:
    model, other, x = pair("Attention")
    for own, call in ((model, model), (other, lambda value: eager(other, value))):
        own.out.weight.register_hook(lambda grad: grad * 3)
        answer = call(x)
        answer.register_hook(lambda grad: grad * 2)
        answer.sum().backward()
    assert_same_gradients(model, other)


def test_gradients_of_gradients_are_eagers(warm: None) -> None:
    model, other, x = pair("ConvNorm")
    for call in (model, lambda value: eager(other, value)):
        argument = leaf(x)
        answer = call(argument)
        (first,) = torch.autograd.grad(answer.square().sum(), argument, create_graph=True)
        first.square().sum().backward()
    assert_same_gradients(model, other)
    assert_same_state(model, other)


def test_frozen_parameters_and_changes_between_calls(warm: None) -> None:
    model, other, x = pair("Attention")
    for own, call in ((model, model), (other, lambda value: eager(other, value))):
        own.qkv.requires_grad_(False)
        call(x).sum().backward()  # another form, which has no kernel here
        own.qkv.requires_grad_(True)
        call(x).square().sum().backward()
    assert_same_gradients(model, other)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert model(x).is_inference()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(warm: None, reentrant: bool) -> None:
    model, other, x = pair("ConvNorm")
    for call in (model, lambda value: eager(other, value)):
        argument = leaf(x)
        checkpoint(call, argument, use_reentrant=reentrant).sum().backward()
    assert_same_gradients(model, other)


def test_batched_gradients(warm: None) -> None:
    model, other, x = pair("Attention")
    tangents = torch.randn(3, 2, 6, 16)
    rows = [
        torch.autograd.grad(answer, own.out.weight, tangents, is_grads_batched=True)[0]
        for own, answer in ((model, model(x)), (other, eager(other, x)))
    ]
    assert_alike(*rows)


def test_two_threads(warm: None) -> None:
    model, other, x = pair("Attention")
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(20):
                argument = leaf(x, seed)
                (mine,) = torch.autograd.grad(model(argument).square().sum(), argument)
                (theirs,) = torch.autograd.grad(eager(other, argument).square().sum(), argument)
                assert_alike(mine, theirs)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_modules_and_arguments_are_freed(warm: None) -> None:
    model, _, x = pair("Attention")
    argument = leaf(x)
    answer = model(argument).sum()
    references = [weakref.ref(model), weakref.ref(argument)]
    answer.backward()
    del model, argument
    gc.collect()
    assert references[0]() is None  # the graph, which is still there, has given up the call
    del answer
    assert references[1]() is None


def test_autocast_is_another_form(warm: None) -> None:
    model, _, x = pair("Attention")
    with torch.autocast("cpu", torch.bfloat16):
        answer = model(x)
    assert answer.grad_fn.name() != NODE
    answer.sum().backward()


def test_it_is_off_unless_asked_for(
    store: Path, filled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EAGERCACHE_MODULE_TRAINING", raising=False)
    with module_kernels(store):
        model, x = training_zoo.make("Attention"), training_zoo.example("Attention")
        model(x)
        assert model(x).grad_fn.name() != NODE
        assert "gradients" in explain_module(model)[0]
