"""Convolutions that work in channels_last, in calls that are traced with their gradients."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from eagercache.base.load import core
from eagercache.base.toolchain import find_compiler, pick_isa
from eagercache.callables.module_identity import identify
from eagercache.worker.compat import aot_inductor
from eagercache.worker.graphs.layout import is_channels_last, use_channels_last
from eagercache.worker.inductor.commands import CompileRefused
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.inductor.generated_text import GeneratedText
from eagercache.worker.modules.joint_graph import trace_training
from eagercache.worker.modules.training_graphs import TrainingGraphs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training_checks import assert_alike


class Block(nn.Module):
    """A residual block of pictures, whose answer is a picture; ``bias`` before the batch norm."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu_(self.norm(self.first(x))))


class Viewed(nn.Module):
    """Shows a convolution's answer in other sizes, which only a contiguous one can."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, 8, 2, stride=2)
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x)
        rows = patches.view(2, 8, 16)
        if self.writes:
            rows.mul_(2)
            rows = patches.flatten(2)
        return torch.tanh(rows).transpose(1, 2).contiguous()


def traced(model: nn.Module, x: torch.Tensor, most: float = math.inf) -> TrainingGraphs:
    """The graphs of a call whose every tensor autograd may keep, and ``most`` bytes beside them."""
    identity = identify(model)
    memory = {slot.tensor.untyped_storage().data_ptr() for slot in identity.slots}
    memory.add(x.untyped_storage().data_ptr())
    strides = copy.deepcopy(model)(x).stride()

    def fits(graphs: TrainingGraphs) -> bool:
        return graphs.made_bytes <= most

    return trace_training(model, (x,), {}, identity, memory, [True], [False], [strides], fits)


def run(graphs: TrainingGraphs, tangent: torch.Tensor) -> tuple[torch.Tensor, list[Any], list[Any]]:
    """(answer, what was made for the backward, gradients) by the graphs' own operators."""
    values = [example.detach().clone() for example in graphs.examples]
    with torch.no_grad():
        made = list(graphs.forward(*values))
        answer, buffers = made[0], len(graphs.buffers)
        kept = made[1 + buffers :]
        sources = {"input": values, "output": made, "made": kept}
        saved = [sources[saved.kind][saved.index] for saved in graphs.saved]
        return answer, kept, list(graphs.backward(*saved, tangent))


@pytest.mark.parametrize(
    ("model", "used"),
    [(Block(), True), (Block(bias=True), False), (Viewed(), True), (Viewed(writes=True), False)],
    ids=["block", "bias", "view", "write"],
)
def test_what_is_saved_is_in_channels_last_and_what_comes_out_is_not(
    model: nn.Module, used: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    graphs = traced(model, x)
    native = model(x)
    tangent = torch.randn_like(native)
    answer, kept, gradients = run(graphs, tangent)
    assert any(is_channels_last(tensor) for tensor in kept) == (used and isinstance(model, Block))
    # What is there already, in another layout, is not kept twice.
    assert all(tensor.size() != x.size() for tensor in kept)
    layouts = [node for node in graphs.forward.graph.nodes if "clone" in str(node.target)]
    assert bool(layouts) or not used
    assert answer.stride() == native.stride()
    assert_alike(answer, native.detach())
    native.backward(tangent)
    slots = identify(model).slots
    assert len(gradients) == len([*model.parameters()]) + 1
    for index, mine in zip(graphs.gradients, gradients, strict=True):
        of_module, number = graphs.inputs[index]
        theirs = (slots[number].tensor if of_module else x).grad
        assert theirs is not None and mine.stride() == theirs.stride()
        assert_alike(mine, theirs)


def test_where_too_much_is_kept_more_is_computed_again() -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 16), nn.LayerNorm(16), nn.Mish(), nn.Linear(16, 16), nn.Tanh())
    model, x = nn.Sequential(*layers), torch.randn(8, 16, requires_grad=True)
    plain = traced(model, x)
    lean = traced(model, x, most=plain.made_bytes - 1)
    assert lean.made_bytes < plain.made_bytes
    assert traced(model, x, most=plain.made_bytes).made_bytes == plain.made_bytes
    tangent = torch.randn(8, 16)
    model(x).backward(tangent)
    answer, _, gradients = run(lean, tangent)
    assert_alike(answer, model(x).detach())
    slots = identify(model).slots
    assert len(gradients) == len([*model.parameters()]) + 1
    for index, mine in zip(lean.gradients, gradients, strict=True):
        of_module, number = lean.inputs[index]
        assert_alike(mine, (slots[number].tensor if of_module else x).grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_stack_in_either_layout_keeps_what_eager_keeps(
    layout: torch.memory_format, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (8, 16):
        layers += [nn.Conv2d(inputs, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers).to(dtype).to(memory_format=layout)
    x = torch.randn(4, 8, 32, 32, dtype=dtype).contiguous(memory_format=layout)
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        native = model(x)
    strides = [native.stride()]
    graphs = trace_training(
        model, (x,), {}, identify(model), set(saved), [True], [True], strides, lambda graphs: True
    )
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    eager = sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in own)
    assert graphs.made_bytes + x.untyped_storage().nbytes() <= eager
    tangent = torch.randn_like(native)
    answer, _, gradients = run(graphs, tangent)
    assert answer.stride() == native.stride()
    native.backward(tangent)
    slots = identify(model).slots
    for index, mine in zip(graphs.gradients, gradients, strict=True):
        theirs = slots[graphs.inputs[index][1]].tensor.grad
        assert theirs is not None and mine.stride() == theirs.stride()
        if (
            dtype == torch.float32
        ):  # half precision rounds sums of both signs far off on either side
            assert_alike(mine, theirs)


@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs", "groups", "used"),
    [
        (torch.bfloat16, 8, 8, 1, True),
        (torch.float16, 8, 1, 8, True),
        (torch.float32, 8, 8, 1, False),
        (torch.bfloat16, 8, 4, 2, False),
        (torch.bfloat16, 4, 8, 1, False),
    ],
    ids=["half", "each channel alone", "float32", "groups", "fewer channels"],
)
def test_on_a_gpu_it_is_for_convolutions_that_are_faster_so(
    dtype: torch.dtype, outputs: int, inputs: int, groups: int, used: bool
) -> None:
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    node = graph.call_function(
        torch.ops.aten.conv2d.default, (x, weight, None, [1, 1], [1, 1], [1, 1], groups)
    )
    graph.output((node,))
    sizes = {
        x: (2, inputs * groups, 8, 8),
        weight: (outputs, inputs, 3, 3),
        node: (2, outputs, 8, 8),
    }
    with FakeTensorMode():
        for own, size in sizes.items():
            own.meta["val"] = torch.empty(size, dtype=dtype, device="cuda")
    assert use_channels_last(graph) == used
    assert any("contiguous" in str(own.target) for own in graph.nodes) == used


def gradients_of(
    model: nn.Module, x: torch.Tensor, graphs: TrainingGraphs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of ``x``, by the graphs and by autograd, for an answer that is the same."""
    native = model(x)
    tangent = torch.randn_like(native)
    answer, _, gradients = run(graphs, tangent)
    native.backward(tangent)
    assert_alike(answer, native.detach())
    assert x.grad is not None
    return gradients[0], x.grad


@pytest.mark.parametrize(
    ("pool", "used"),
    [
        (nn.AvgPool2d(3, 1, 1, count_include_pad=False), True),
        (nn.AvgPool2d((5, 3), 1, (2, 1)), True),
        (nn.AvgPool2d(2, 1, count_include_pad=False), True),
        (nn.AvgPool2d(3, 1, 1, divisor_override=4), True),
        (nn.AvgPool2d(3, 2, 1, count_include_pad=False), False),
        (nn.AvgPool2d(3, 1), False),  # a pool takes no such padding
    ],
    ids=["inner", "padding", "even", "divisor", "stride", "narrow"],
)
def test_the_gradient_of_a_pool_that_moves_by_one_is_a_pools(pool: nn.Module, used: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 7, requires_grad=True)
    model = nn.Sequential(nn.Tanh(), pool)
    graphs = traced(model, x)
    names = [str(node.target) for node in graphs.backward.graph.nodes]
    assert any("avg_pool2d_backward" in name for name in names) != used
    mine, natives = gradients_of(model, x, graphs)
    torch.testing.assert_close(mine, natives, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_max_pool_is_natives_and_needs_no_values_of_its_input(
    tmp_path: Path,
) -> None:
    aot_inductor.prepare_inductor()
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 7, requires_grad=True)
    model = nn.Sequential(nn.Tanh(), nn.MaxPool2d(3, 2, 1))
    graphs = traced(model, x)
    assert_alike(*gradients_of(model, x, graphs))
    seen: list[GeneratedText] = []

    def look(text: GeneratedText) -> None:
        seen.append(text)
        raise CompileRefused("seen")

    tools = Tools(find_compiler(), pick_isa(core.host_cpu_features()), None)
    with pytest.raises(CompileRefused, match="seen"):
        tools.container(graphs.backward, graphs.backward_examples, tmp_path, look, improves=True)
    assert seen[0].extern_calls  # from 2.12 on native's scatter
