"""Kernels of modules that draw masks: the program's own numbers, in eager's order."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_program
from eagercache.calls.replay import Replayed
from eagercache.worker.compat import traced_graphs
from eagercache.worker.graphs.dropout_masks import (
    Attention,
    Noise,
    drawn_layouts,
    drawn_within,
    keep_draws,
    take_noise,
)
from eagercache.worker.graphs.nodes import operator_name
from eagercache.worker.graphs.refused_operators import refuse_operators
from eagercache.worker.inductor.commands import CompileRefused
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
        Noise("bernoulli", 0.9, 0.0, torch.bool, (4, 6), (6, 1), cpu),
        Noise("bernoulli", 0.75, 0.0, torch.float32, (4, 1), (1, 1), cpu),
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
    assert [(n.kind, n.first, n.dtype) for n in noise] == [
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


def attention_graph(device: str, p: float = 0.1) -> torch.fx.GraphModule:
    """Attention that drops some of its weights, then a dropout of what it gives."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    with FakeTensorMode():
        inputs = [graph.placeholder(name) for name in ("query", "key", "value")]
        for node in inputs:
            node.meta["val"] = torch.empty(2, 128, 4, 64, device=device).bfloat16().transpose(1, 2)
        heads = tuple(node.meta["val"] for node in inputs)
        target = aten._scaled_dot_product_cudnn_attention.default
        node = graph.call_function(target, (*inputs, None, True, p), {"scale": 0.125})
        node.meta["val"] = (heads[0],)
        first = graph.call_function(operator.getitem, (node, 0))
        first.meta["val"] = heads[0]
        dropped = graph.call_function(aten.native_dropout.default, (first, 0.2, True))
        dropped.meta["val"] = (heads[0], heads[0].bool())
    graph.output((dropped,))
    return torch.fx.GraphModule(nn.Module(), graph)


def test_what_attention_draws_is_drawn_between_the_masks_before_and_after_it() -> None:
    attention, mask = drawn_within(attention_graph("cuda").graph)
    assert isinstance(attention, Attention)
    given = dict(attention.arguments)
    assert given["dropout_p"] == 0.1 and given["scale"] == 0.125 and given["attn_bias"] is None
    layout = given["value"]
    assert (layout.sizes, layout.strides) == ((2, 4, 128, 64), (32768, 64, 256, 1))
    assert isinstance(mask, Noise) and mask.first == 0.2


def test_gradients_of_attention_draw_nothing() -> None:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention

    def forward(*heads: torch.Tensor) -> list[torch.Tensor]:
        return [attend(*heads, None, True, 0.1)[0].sin()]

    with FakeTensorMode():
        heads = [torch.empty(2, 4, 128, 64, requires_grad=True) for _ in range(3)]
        joint = traced_graphs.joint_graph(forward, tuple(heads))
        refuse_operators(joint.graph, draws=True)
        _, backward = keep_draws(joint, lambda: traced_graphs.split_joint_graph(joint, 1))
    names = [operator_name(node) for node in backward.graph.nodes]
    assert "aten::_scaled_dot_product_cudnn_attention_backward" in names


def test_attention_that_drops_nothing_leaves_masks_to_be_inputs() -> None:
    assert drawn_within(attention_graph("cuda", p=0.0).graph) == []
    assert drawn_within(graph_of("cuda").graph) == []
    with pytest.raises(CompileRefused, match="random numbers"):
        drawn_within(attention_graph("cpu").graph)  # no such operator draws there


# Has every forward of the processes below draw by itself, as one with attention does on a GPU.
DRAWING = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "eagercache.worker.modules.joint_graph":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            from eagercache.worker.graphs.dropout_masks import _noise_of, draws_numbers

            module.drawn_within = lambda graph: [
                _noise_of(node) for node in graph.nodes if draws_numbers(node)
            ]

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""

STEPS = """
import copy
import torch, eagercache, training_zoo
from eagercache.modules.manager import manager
torch.set_num_threads(1)
model, x = training_zoo.make("Dropped"), training_zoo.example("Dropped")
other = copy.deepcopy(model)

def step(called, seed):
    torch.manual_seed(seed)
    argument = x.clone().requires_grad_()
    answer = called(argument)
    after = torch.rand(2)
    (first,) = torch.autograd.grad(answer.square().sum(), argument, create_graph=seed > 2)
    if seed > 2:
        first.square().sum().backward()
    found = [answer, after, first, *(p.grad for p in called.parameters() if p.grad is not None)]
    called.zero_grad()
    return [tensor.detach().clone() for tensor in found]

with eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always"):
    mine = [step(model, seed) for seed in range(6)]
    hits = [row.training_hits for part, row in manager.stats() if part is model]
    lines = eagercache.explain_module(model)
theirs = [step(other, seed) for seed in range(6)]
pairs = [(a, b) for left, right in zip(mine, theirs) for a, b in zip(left, right, strict=True)]
report(lines=lines, hits=hits, after=[torch.equal(m[1], t[1]) for m, t in zip(mine, theirs)],
       close=[torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs])
"""


@pytest.mark.once
def test_a_forward_that_draws_by_itself_draws_what_eager_draws(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DRAWING)
    here = Path(__file__).parents[1] / "zoos"
    paths = [str(tmp_path), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    seen = run_program(STEPS, cache, timeout=600, PYTHONPATH=os.pathsep.join(paths))
    assert seen["hits"] == [5], seen["lines"]
    assert all(seen["after"]) and all(seen["close"]) and len(seen["close"]) > 20, seen


EMBEDDED = """
import copy, torch, eagercache
from torch import nn

class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.drop, self.head = nn.Embedding(50, 16), nn.Dropout(0.25), nn.Linear(16, 50)

    def forward(self, tokens):
        return self.head(self.drop(torch.tanh(self.table(tokens))))

torch.set_num_threads(1)
model, tokens = Embedded(), torch.randint(0, 50, (4, 8))
other = copy.deepcopy(model)

def step(called, seed):
    torch.manual_seed(seed)
    called(tokens).square().sum().backward()
    return [parameter.grad for parameter in called.parameters()]

with eagercache.enable((), modules=[Embedded], training=True, on_miss="wait", choose="always"):
    mine = [step(model, seed) for seed in range(4)][-1]
    lines = str(eagercache.explain_module(model))
theirs = [step(other, seed) for seed in range(4)][-1]
pairs = zip(mine, theirs)
report(lines=lines, close=[torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs])
"""


def test_the_mask_of_a_dropout_is_no_index_of_the_embedding_behind_it(cache: Path) -> None:
    seen = run_program(EMBEDDED, cache, timeout=600, fills=True)
    assert "with gradients" in seen["lines"] and "refused" not in seen["lines"], seen["lines"]
    assert seen["close"] == [True] * 3, seen


NUMBERS = """
import copy, torch, eagercache
from eagercache.modules.manager import explain_module
from torch import nn
torch.set_num_threads(1)
F = nn.functional

class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, -1)
        return self.decode(mean + torch.exp(spread / 2) * torch.randn_like(mean)), mean, spread

class Returns(Autoencoder):  # what it drew, which the program may write into
    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, -1)
        noise = torch.randn(mean.shape)
        return self.decode(mean + torch.exp(spread / 2) * noise), noise

class Paths(nn.Module):  # are dropped, as Swin does it, between masks of dropout
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)

    def path(self, x):
        kept = (0.8 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)).floor_()
        return x.div(0.8) * kept

    def forward(self, x):
        x = x + self.path(F.dropout(self.one(x).relu(), 0.2, self.training))
        return x + self.path(F.dropout(self.two(x), 0.3, self.training))

class Diffuses(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(13, 16), nn.SiLU(), nn.Linear(16, 12))
        self.register_buffer("left", torch.linspace(0.99, 0.1, 12))

    def forward(self, x):
        time = torch.arange(x.shape[0])
        left, noise = self.left[time][:, None], torch.randn_like(x)
        noisy = left.sqrt() * x + (1 - left).sqrt() * noise
        return F.mse_loss(self.net(torch.cat((noisy, time[:, None] / 12), 1)), noise)

class Pictures(nn.Module):  # channels_last: which number lies where depends on that
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        made = self.one(x.to(memory_format=torch.channels_last))
        return self.two((made + torch.randn_like(made)).relu())

def steps(model, x):
    torch.manual_seed(3)
    found = []
    for number in range(5):
        model.zero_grad()
        parts = model(x)
        parts = parts if isinstance(parts, tuple) else (parts,)
        if not parts[-1].requires_grad:
            parts[-1].mul_(2)
        loss = sum((part.sin() * (i + 1)).sum() for i, part in enumerate(parts))
        try:
            if number == 3:  # gradients of gradients are those of the same numbers
                weights = list(model.parameters())
                gradients = torch.autograd.grad(loss, weights, create_graph=True)
                loss = loss + sum(gradient.square().sum() for gradient in gradients)
            loss.backward()
        except RuntimeError as error:
            found.append(str(error)[:50])
            continue
        numbers = [*parts, *(p.grad for p in model.parameters()), torch.rand(3)]
        found.append([number.detach().clone() for number in numbers])
    return found

def equal(one, other):
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(one, other, strict=True))

seen = {}
for kind in (Autoencoder, Returns, Paths, Diffuses, Pictures):
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(2, 3, 8, 8) if kind is Pictures else torch.randn(6, 12)
    other = copy.deepcopy(model)
    native = steps(model, x)
    with eagercache.enable(ops=(), modules="auto", training=True, choose="always", on_miss="wait"):
        answers = steps(other, x)
        line = explain_module(other)[0]
    seen[kind.__name__] = [[equal(*both) for both in zip(answers, native)], line, str(native)[:99]]
report(seen=seen)
"""


def test_numbers_that_a_forward_draws_are_those_that_eager_draws(cache: Path) -> None:
    seen = run_program(NUMBERS, cache, fills=True)["seen"]
    for kind, (same, line, native) in seen.items():
        assert all(same), (kind, same, line, native)
        if kind != "Pictures":
            assert "4 with gradients" in line, (kind, line)
    assert "draws random numbers in a layout of their own" in seen["Pictures"][1]
