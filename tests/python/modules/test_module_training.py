"""Calls of whole modules that need gradients: kernels for the forward and for the backward."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import eagercache
import pytest
import torch
import training_zoo
from conftest import module_kernels, run_program
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
from torch import nn
from training_checks import (
    NODE,
    Trained,
    assert_alike,
    assert_same_gradients,
    assert_same_state,
    eager,
    fill_program,
    leaf,
    leaves_of,
    pair,
)
from training_zoo import loss_of


def test_another_process_compiles_nothing(training_store: Trained) -> None:
    again = run_program(fill_program("native"), training_store.store)
    assert again["compiles"] == 0
    for name in ("ConvNorm", "Attention"):
        assert again["rows"][name]["hits"] == [3], again["rows"][name]
    assert again["others"] == [2, 2]


def test_a_module_that_draws_is_left_and_its_parts_are_tried(training_store: Trained) -> None:
    row = training_store.report["rows"]["Noisy"]
    assert row["hits"] == [0]
    assert "random" in row["lines"][0], row["lines"]
    assert row["below"] > 0, row["lines"]


@pytest.mark.parametrize("name", ["ConvNorm", "Attention", "Mlp"])
def test_training_steps_are_eagers(training_kernels: None, name: str) -> None:
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


def test_buffers_are_written_in_place_and_their_versions_move_as_in_eager(
    training_kernels: None,
) -> None:
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


def test_one_answer_alone_gives_no_gradient_to_what_the_other_needs(training_kernels: None) -> None:
    model, other, x = pair("Mlp")
    model(x)["left"].sum().backward()
    eager(other, x)["left"].sum().backward()
    assert model.right.weight.grad is None
    assert_same_gradients(model, other)


def test_gradients_do_not_share_memory(training_kernels: None) -> None:
    model, other, x = pair("Attention")
    argument = leaf(x)
    tangent = torch.ones_like(x)
    model(argument).backward(tangent)
    argument.grad.add_(1)
    assert torch.equal(tangent, torch.ones_like(x))
    eager(other, x).backward(tangent)
    assert_same_gradients(model, other)


def test_expanded_transposed_and_shifted_gradients_of_the_answer(training_kernels: None) -> None:
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


def test_retained_graphs_and_graphs_that_are_gone(training_kernels: None) -> None:
    model, other, x = pair("Attention")
    answer = model(x).sum()
    answer.backward(retain_graph=True)
    answer.backward()
    for _ in range(2):
        eager(other, x).sum().backward()
    assert_same_gradients(model, other)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        answer.backward()


def test_writing_what_the_backward_reads_raises_as_in_eager(training_kernels: None) -> None:
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


def test_hooks_on_answers_and_parameters_run(training_kernels: None) -> None:
    model, other, x = pair("Attention")
    for own, call in ((model, model), (other, lambda value: eager(other, value))):
        own.out.weight.register_hook(lambda grad: grad * 3)
        answer = call(x)
        answer.register_hook(lambda grad: grad * 2)
        answer.sum().backward()
    assert_same_gradients(model, other)


def test_gradients_of_gradients_are_eagers(training_kernels: None) -> None:
    model, other, x = pair("ConvNorm")
    for call in (model, lambda value: eager(other, value)):
        argument = leaf(x)
        answer = call(argument)
        (first,) = torch.autograd.grad(answer.square().sum(), argument, create_graph=True)
        first.square().sum().backward()
    assert_same_gradients(model, other)
    assert_same_state(model, other)


def test_frozen_parameters_and_changes_between_calls(training_kernels: None) -> None:
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


def test_batched_gradients(training_kernels: None) -> None:
    model, other, x = pair("Attention")
    tangents = torch.randn(3, 2, 6, 16)
    rows = [
        torch.autograd.grad(answer, own.out.weight, tangents, is_grads_batched=True)[0]
        for own, answer in ((model, model(x)), (other, eager(other, x)))
    ]
    assert_alike(*rows)


def test_two_threads(training_kernels: None) -> None:
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


def test_modules_and_arguments_are_freed(training_kernels: None) -> None:
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


def test_it_is_off_unless_asked_for(training_store: Trained) -> None:
    with module_kernels(training_store.store):
        model, x = training_zoo.make("Attention"), training_zoo.example("Attention")
        model(x)
        assert model(x).grad_fn.name() != NODE
        assert "gradients" in explain_module(model)[0]


def node_of(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a kernel answers a call that needs gradients."""
    model(x)
    return bool(model(x).grad_fn.name() == NODE)


def test_contexts_put_training_back(training_store: Trained) -> None:
    model, x = training_zoo.make("Attention"), training_zoo.example("Attention")
    with module_kernels(training_store.store, training=True):
        assert node_of(model, x)
        with module_kernels(training_store.store):
            assert not node_of(model, x)
            with module_kernels(training_store.store, training=True):
                assert node_of(model, x)
            assert not node_of(model, x)
        assert node_of(model, x)


def test_accelerate_takes_training_where_kernels_are_enabled_and_where_not(
    training_store: Trained,
) -> None:
    model, x = training_zoo.make("Attention"), training_zoo.example("Attention")
    other = copy.deepcopy(model)
    with module_kernels(training_store.store):
        verdicts = eagercache.stats().hits
        eagercache.accelerate(model, training=True)
        assert node_of(model, x)
        assert eagercache.stats().hits == verdicts
        with pytest.raises(ValueError, match=r"on_miss=.*enabled already.*enable\(\)"):
            eagercache.accelerate(model, on_miss="wait")
        eagercache.accelerate(model)  # keeps it
        assert node_of(model, x)
    with eagercache.enable((), on_miss="native", cache_dir=training_store.store):
        eagercache.disable()
        options: dict[str, Any] = {"on_miss": "native", "choose": "always"}
        eagercache.accelerate(other, training=True, cache_dir=training_store.store, **options)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        assert node_of(other, x), explain_module(other)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_bad_value_of_training_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=f"training={value!r} is not True or False; with True"):
        eagercache.enable((), training=value)
    if value is not None:
        with pytest.raises(ValueError, match=f"training={value!r} is not True or False"):
            eagercache.accelerate(nn.Linear(2, 2), training=value)


def test_of_calls_that_are_left_one_in_sixteen_is_looked_at(tmp_path: Path) -> None:
    store = tmp_path / "cache"
    store.mkdir(mode=0o700)
    assert core is not None
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    options: dict[str, Any] = {"on_miss": "native", "modules": "auto", "cache_dir": store}
    with eagercache.enable((), training=True, **options):
        model(x)
        core.module_leave(model, True, True)  # gradients=True, left=True
        model(x)
        before = dict(manager.stats())[model].native
        model.extra = 1
        looks = []
        for _ in range(17):
            model(x)
            looks.append(manager._known.find(model).looks)
        assert looks == [1] * 15 + [2] * 2
        assert dict(manager.stats())[model].native == before + 17
        with torch.no_grad():
            model.extra = 2
            model(x)
        assert manager._known.find(model).looks == 3


CONSTANT = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager

class Fills(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return torch.where(y > 0, y, torch.tensor(-2.5)) * torch.tensor([1.0, 2.0] * 4).sqrt()

model = Fills()
eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always", training=True)
right = []
for _ in range(4):
    x = torch.randn(4, 8)
    gradients = []
    for call in (model, lambda given: Fills.forward(model, given)):
        model.zero_grad()
        answer = call(x)
        answer.square().sum().backward()
        gradients.append([answer.detach(), *(p.grad.clone() for p in model.parameters())])
    right.append(all(map(torch.allclose, *gradients)))
((_, row),) = [both for both in manager.stats() if both[0] is model]
report(right=right, hits=row.training_hits, lines=explain_module(model))
"""


def test_a_constant_of_the_forward_is_in_kernels_of_training(tmp_path: Path) -> None:
    seen = run_program(CONSTANT, tmp_path, timeout=300, fills=True)
    assert all(seen["right"]) and seen["hits"] == 3, seen


FUNCTION = """
import torch, eagercache
from eagercache.modules.manager import manager
torch.set_num_threads(1)
torch.manual_seed(0)

class Rounds(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(context, grad):
        (x,) = context.saved_tensors
        return grad * (x.abs() > 300)  # of numbers that are seldom drawn

class Calls(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(64, 64)

    def forward(self, x):
        y = self.dense(x)
        return torch.tanh(y) + Rounds.apply(y)

class Scales(torch.autograd.Function):
    @staticmethod
    def forward(context, x, module):
        return x * torch.relu(module.dense.weight[0] - 300)  # of weights that are seldom drawn

    @staticmethod
    def backward(context, grad):
        return None, None

class Reads(Calls):
    def forward(self, x):  # what the function is given needs no gradient
        return self.dense(x).abs() + Scales.apply(x, self)

class Detaches(Calls):
    def forward(self, x):
        y = self.dense(x)
        with torch.no_grad():
            rounded = y.round()
        return torch.tanh(y) + rounded

far, hits, reasons = {}, {}, {}
eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always")
for kind in (Calls, Reads, Detaches):
    model, name = kind(), kind.__name__
    far[name] = []
    for scale in (1, 1, 1, 1000, 1000):
        if kind is Reads and scale > 1:
            torch.nn.init.constant_(model.dense.weight, 400)
        x, gradients = torch.randn(32, 64) * scale, []
        for answer in (model(x), kind.forward(model, x)):
            gradients.append(torch.autograd.grad(answer.sum(), [*model.parameters()])[0])
        mine, theirs = gradients
        far[name].append(float((mine - theirs).abs().max() / theirs.abs().max()))
    (row,) = [row for part, row in manager.stats() if part is model]
    hits[name], reasons[name] = row.training_hits, row.training_reason
report(far=far, hits=hits, reasons=reasons)
"""


def test_a_gradient_that_a_function_of_autograd_defines_is_the_functions(cache: Path) -> None:
    seen = run_program(FUNCTION, cache, timeout=300, fills=True)
    assert all(far < 1e-3 for each in seen["far"].values() for far in each), seen
    assert seen["hits"]["Detaches"] > 2, seen
    for name in ("Calls", "Reads"):
        assert seen["hits"][name] == 0 and "torch.autograd.Function" in seen["reasons"][name], seen
