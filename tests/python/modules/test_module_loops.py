"""What training loops do around modules whose forward and backward are kernels.

Hooks, activation checkpointing, mixed precision, data-parallel wrappers, and the memory that is
kept between a forward and its backward.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import training_zoo
from eagercache.callables.module_gradient import forwards_alone
from eagercache.callables.module_identity import identify
from eagercache.callables.module_transfer import pack, unpack
from eagercache.callables.standins import NotTransferable
from eagercache.modules.manager import explain_module, manager
from gloo import run_ranks
from kept_memory import kept_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_checks import (
    HERE,
    NODE,
    Trained,
    assert_alike,
    assert_same_gradients,
    assert_same_state,
    eager,
    leaf,
    pair,
)
from training_zoo import loss_of, loss_under_autocast


def training_hits(model: nn.Module) -> int:
    """Calls with gradients of ``model`` and of what is below it that kernels answered."""
    parts = set(model.modules())
    return sum(row.training_hits for part, row in manager.stats() if part in parts)


# ---- hooks ---------------------------------------------------------------------------------------


def _add_hooks(model: nn.Module) -> list[Any]:
    """Hooks of every kind, three of which change what they are given. What they saw."""
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.register_forward_hook(lambda _, args, answer: seen.append(answer.detach()) or answer * 3)
    model.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))
    model.register_full_backward_hook(lambda _, mine, grads: seen.extend([mine[0], grads[0]]))
    return seen


def test_the_module_below_one_with_hooks_is_tried(training_kernels: None) -> None:
    inner, other, x = pair("Attention")
    mine, theirs = training_zoo.Wrapper(inner), training_zoo.Wrapper(other)
    seen = [_add_hooks(mine), _add_hooks(theirs)]
    before = training_hits(mine)
    loss_of(mine(leaf(x))).backward()
    assert training_hits(mine) == before + 1, explain_module(mine)
    with forwards_alone():
        loss_of(theirs(leaf(x))).backward()
    assert len(seen[0]) == len(seen[1]) == 3
    for a, b in zip(*seen, strict=True):
        assert_alike(a, b)
    assert_same_gradients(mine, theirs, far=10)


def test_a_hook_below_a_module_sends_its_calls_to_the_forward_while_it_is_there(
    training_kernels: None,
) -> None:
    model, other, x = pair("ConvNorm")
    seen: list[torch.Tensor] = []
    handle = model.norm.register_forward_hook(lambda _, args, answer: seen.append(args[0]))
    answer = model(x)
    assert answer.grad_fn.name() != NODE and len(seen) == 1
    handle.remove()
    again = model(x)
    assert again.grad_fn.name() == NODE and len(seen) == 1
    loss_of(answer + again).backward()
    loss_of(eager(other, x) + eager(other, x)).backward()
    assert_same_gradients(model, other, far=10)
    assert_same_state(model, other)


# ---- activation checkpointing --------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["ConvNorm", "Attention"])
def test_activation_checkpointing(training_kernels: None, name: str, reentrant: bool) -> None:
    model, other, x = pair(name)
    for own in (model, other):
        call = own if own is model else lambda value: eager(other, value)
        for step in range(2):  # accumulates
            argument = leaf(x, step)
            loss_of(checkpoint(call, argument, use_reentrant=reentrant)).backward()
    assert_same_gradients(model, other)
    assert_same_state(model, other)


def test_a_model_that_checkpoints_its_parts_is_trained_as_by_eager(
    training_store: Trained, training_kernels: None
) -> None:
    row = training_store.report["rows"]["Checkpointed"]
    assert row["below"] > 0, row["lines"]  # what is computed again, with gradients
    model, x = training_zoo.make("Checkpointed"), training_zoo.example("Checkpointed")
    other = copy.deepcopy(model)
    for _ in range(2):
        loss_of(model(x)).backward()
        with forwards_alone():
            loss_of(other(x)).backward()
    assert_same_gradients(model, other)


# ---- mixed precision -----------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
def test_calls_under_autocast_have_kernels_of_their_own(
    training_kernels: None, scaled: bool
) -> None:
    model, other, x = pair("Attention")
    for own in (model, other):
        argument = leaf(x)
        with torch.autocast("cpu", torch.bfloat16):
            own(argument)  # its kernel is loaded
            answer = own(argument) if own is model else eager(other, argument)
            loss = loss_of(answer)
        if own is model:
            assert answer.grad_fn.name() == NODE, explain_module(model)
        own.zero_grad()
        (loss * 1024 if scaled else loss).backward()
    assert_same_gradients(model, other, far=300)  # a bfloat16 has 8 bits
    with torch.autocast("cpu", torch.float16):
        answer = model(x)
    assert answer.grad_fn.name() != NODE  # another dtype is another call
    loss_of(answer).backward()


def _labelled(training_store: Trained) -> tuple[nn.Module, torch.Tensor]:
    """(a `training_zoo.Labelled` whose next call a kernel answers, an argument)."""
    model, x = training_zoo.make("Labelled"), training_zoo.example("Labelled")
    for _ in range(2):
        answer = loss_under_autocast(model, x, training_zoo.labels())
    assert answer.grad_fn.name() == NODE, training_store.report["rows"]["Labelled"]
    return model, x


def test_gradients_of_gradients_of_an_argument_that_is_kept_as_a_cast_are_eagers(
    training_store: Trained, training_kernels: None
) -> None:
    model, x = _labelled(training_store)
    other = copy.deepcopy(model)
    found: list[list[torch.Tensor]] = []
    for own in (model, other):
        # One of the program's, one of a graph, and one that the module's own parameter is in.
        for begin in (leaf(x), leaf(x) * 1.7, leaf(x) * own.up.bias[0]):
            with contextlib.nullcontext() if own is model else forwards_alone():
                answer = loss_under_autocast(own, begin, training_zoo.labels())
            assert (answer.grad_fn.name() == NODE) == (own is model)
            if not begin.is_leaf:
                begin.detach().zero_()  # eager has its own copy
            wanted = [begin, *own.parameters()]
            first = torch.autograd.grad(answer, wanted, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
            found.append([*(g.detach() for g in first), *second])
    half = len(found) // 2
    for mine, theirs in zip(found[:half], found[half:], strict=True):
        assert all(float(t.abs().max()) > 0 for t in theirs)
        for a, b in zip(mine, theirs, strict=True):  # added up in another order
            assert_alike(a, b)


def test_an_argument_of_which_a_cast_is_read_is_let_go_of(
    training_store: Trained, training_kernels: None
) -> None:
    model, x = _labelled(training_store)
    made: list[weakref.ref[torch.Tensor]] = []

    def call() -> torch.Tensor:
        argument = x * 1.7
        made.append(weakref.ref(argument))
        return loss_under_autocast(model, argument, training_zoo.labels())

    before = training_hits(model)
    mine = kept_bytes(call)
    assert training_hits(model) == before + 1
    answer = call()
    assert made[-1]() is None and answer.requires_grad
    with forwards_alone():
        theirs = kept_bytes(call)
    assert 0 < mine <= theirs


def test_labels_are_classes_or_none_and_others_raise_as_in_eager(
    training_store: Trained, training_kernels: None
) -> None:
    model, x = _labelled(training_store)
    other, argument = copy.deepcopy(model), leaf(x)
    for labels in (training_zoo.labels(), training_zoo.labels().abs() % 64):
        answer = loss_under_autocast(model, argument, labels)
        assert answer.grad_fn.name() == NODE
        answer.backward()
        mine = argument.grad
        argument.grad = None
        with forwards_alone():
            loss_under_autocast(other, argument, labels).backward()
        assert_alike(mine, argument.grad, far=300)  # a bfloat16 has 8 bits
        argument.grad = None
    assert_same_gradients(model, other, far=300)
    for wrong in (-1, 64):
        labels = training_zoo.labels()
        labels[1, 3] = wrong
        with pytest.raises(IndexError, match="out of bounds"):
            loss_under_autocast(model, x, labels)


def test_parameters_without_memory_are_not_read(training_kernels: None) -> None:
    model = training_zoo.make("Attention")
    for parameter in model.parameters():  # as FSDP does between a forward and its backward
        parameter.untyped_storage().resize_(0)
    with pytest.raises(NotTransferable, match="memory"):
        pack(model, (training_zoo.example("Attention"),), {})


def test_what_sharding_marks_modules_with_is_no_part_of_what_they_are() -> None:
    model, x = training_zoo.make("Attention"), training_zoo.example("Attention")
    digest = identify(model).digest
    for part in model.modules():
        part._is_fsdp_managed_module = True
    assert identify(model).digest == digest
    rebuilt = unpack(pack(model, (x,), {})).module
    assert identify(rebuilt).digest == digest
    assert not any(hasattr(part, "_is_fsdp_managed_module") for part in rebuilt.modules())


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ConvNorm", "Attention", "Mlp"])
def test_no_more_is_kept_for_the_backward_than_eager_keeps(
    training_kernels: None, name: str
) -> None:
    model, _, x = pair(name)
    before = training_hits(model)
    mine = kept_bytes(lambda: model(x))
    assert training_hits(model) == before + 1, explain_module(model)
    with forwards_alone():
        theirs = kept_bytes(lambda: model(x))
    assert 0 < mine <= theirs


# ---- several processes ---------------------------------------------------------------------------

RANKS = """
import copy, hashlib, json, os, sys
sys.path.insert(0, {here!r})
import torch, torch.distributed as dist, training_zoo
torch.set_num_threads(1)
rank, kind = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
import eagercache
from eagercache.modules.manager import explain_module, manager
from eagercache.runtime.session import session
from eagercache.callables.module_gradient import forwards_alone
eagercache.enable(ops=(), modules="auto", training=True, on_miss="native", choose="always")

name = dict(ddp="ConvNorm", unused="Attention", fsdp="Attention")[kind]
example = training_zoo.example(name)
model = training_zoo.Wrapper(training_zoo.make(name)) if kind == "fsdp" else training_zoo.make(name)
start = copy.deepcopy(model)
steady = training_zoo.make("Attention").requires_grad_(False)
if kind != "fsdp":
    unused = kind == "unused"  # one of its parameters has no gradient
    model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
else:
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))

def batch(step, of):
    generator = torch.Generator().manual_seed(100 * step + of)
    return torch.randn(example.size(), generator=generator).requires_grad_()

def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).contiguous()

def decay(parameters):
    # What every replica computes again from equal data, by a module and without gradients.
    with torch.no_grad():
        far = steady(torch.ones(2, 6, 16)).abs().mean()
        for parameter in parameters:
            parameter.mul_(1 - 1e-3 * far)

def steps(model, batches, average, accumulate):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(12):
        optimizer.zero_grad()
        rows = batches(step)
        for number, row in enumerate(rows):
            with accumulate(number + 1 < len(rows)):
                (training_zoo.loss_of(model(row)) / average).backward()
        optimizer.step()
        decay(model.parameters())

import contextlib
def accumulate(waits):
    if kind != "fsdp":
        return model.no_sync() if waits else contextlib.nullcontext()
    model.set_requires_gradient_sync(not waits)
    return contextlib.nullcontext()

steps(model, lambda step: [batch(step, rank), batch(step, 2 + rank)], 1, accumulate)
digests = [hashlib.sha256(whole(p).numpy().tobytes()).hexdigest() for p in model.parameters()]
lines = explain_module(model)
training = sum(row.training_hits for _, row in manager.stats())
inference = sum(row.hits - row.training_hits for _, row in manager.stats())
with forwards_alone():  # one process that sees all of it
    steps(start, lambda step: [batch(step, of) for of in range(4)], 2,
          lambda waits: contextlib.nullcontext())
far = max(float((whole(a) - b.detach()).abs().max() / b.detach().abs().max())
          for a, b in zip(model.parameters(), start.parameters()))
numerics = [row["facts"]["numerics"] for row in session.store.entries() if row["kind"] == "kernel"
            and row["facts"]["form"] == "module"]
print("REPORT " + json.dumps(dict(digests=digests, training=training, inference=inference,
                                  far=far, numerics=numerics, lines=lines)))
dist.destroy_process_group()
# FSDP keeps the group. A thread of gloo's that drops a tensor while Python ends asks for the GIL,
# which ends that thread, and so the process (ProcessGroupGloo::runLoop, torch 2.11).
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    "kind",
    ["ddp", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("unused", "fsdp"))],
)
def test_two_ranks_stay_equal_bit_for_bit_though_one_has_kernels(
    kind: str, training_store: Trained, cache: Path
) -> None:
    warm, cold = run_ranks(RANKS.format(here=HERE), [training_store.store, cache], kind)
    assert warm["digests"] == cold["digests"]
    assert warm["training"] >= 20 and cold["training"] == 0, warm["lines"]
    assert warm["far"] < 1e-4 and cold["far"] < 1e-4
    # A kernel of other bits than the forward's does not answer where replicas compute the same.
    assert "accurate" in warm["numerics"]
    assert warm["inference"] == 0
