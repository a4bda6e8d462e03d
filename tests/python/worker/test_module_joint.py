"""Graphs of a call and its gradients: what they may return, and what is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagercache.callables.module_identity import identify
from eagercache.worker.compat.traced_graphs import joint_graph
from eagercache.worker.graphs.bags import sum_equal_bags
from eagercache.worker.graphs.indices import index_ranges, trap_negative_indices
from eagercache.worker.inductor.commands import CompileRefused
from test_module_layout import run, traced
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training_checks import assert_alike


class Attending(nn.Module):
    """Ends with a linear layer of three dimensions, and makes a mask that no call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.full((6, 6), float("-inf")).triu(1)
        return self.out(torch.softmax(q @ k.transpose(1, 2) + mask, -1) @ v)


def test_a_linear_layer_may_come_last_and_constants_are_not_saved() -> None:
    torch.manual_seed(0)
    model, x = Attending(), torch.randn(2, 6, 8, requires_grad=True)
    graphs = traced(model, x)
    native = model(x)
    tangent = torch.randn_like(native)
    answer, kept, gradients = run(graphs, tangent)
    assert all(tensor.size() != (6, 6) for tensor in kept)
    (output,) = graphs.forward.graph.find_nodes(op="output")
    assert "clone" not in str(output.args[0][0].target)
    assert answer.stride() == native.stride()
    assert_alike(answer, native.detach())
    native.backward(tangent)
    slots = identify(model).slots
    for index, mine in zip(graphs.gradients, gradients, strict=True):
        of_module, number = graphs.inputs[index]
        theirs = (slots[number].tensor if of_module else x).grad
        assert theirs is not None
        assert_alike(mine, theirs)


class Masked(nn.Module):
    """Adds a mask where it is read again for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.cumsum(torch.ones(6, 6), 1)
        return torch.tanh(x @ mask) * self.scale


def test_what_a_gradient_reads_of_constants_is_made_again() -> None:
    model, x = Masked(), torch.randn(4, 6, requires_grad=True)
    graphs = traced(model, x)
    native = model(x)
    tangent = torch.randn_like(native)
    _, kept, gradients = run(graphs, tangent)
    assert all(tensor.size() != (6, 6) for tensor in kept)
    native.backward(tangent)
    for index, mine in zip(graphs.gradients, gradients, strict=True):
        theirs = x.grad if not graphs.inputs[index][0] else model.scale.grad
        assert theirs is not None
        assert_alike(mine, theirs)


def _picking(device: str, fill: float, skipped: int = -100) -> torch.fx.Graph:
    """A cross entropy's gather out of 64 classes, by labels that ``fill`` was put behind."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    scores, labels = graph.placeholder("scores"), graph.placeholder("labels")
    with FakeTensorMode():
        values = [
            torch.empty(4, 64, device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
        ]
        for node, value in zip((scores, labels), values, strict=True):
            node.meta["val"] = value

        def call(target: Any, *args: Any) -> torch.fx.Node:
            node = graph.call_function(target, args)
            node.meta["val"] = target(
                *(arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args)
            )
            return node

        padded = call(aten.constant_pad_nd.default, labels, [0, 1], fill)
        is_class = call(aten.ne.Scalar, padded, skipped)
        chosen = call(aten.where.ScalarOther, is_class, padded, 0)
        picked = call(aten.gather.default, scores, 1, call(aten.unsqueeze.default, chosen, 1))
    graph.output((picked,))
    return graph


def test_labels_have_a_range_and_one_number_beside_it() -> None:
    assert index_ranges(_picking("cpu", -100.0)) == ((1, 0, 64, -100),)
    assert index_ranges(_picking("cpu", 63.0)) == ((1, 0, 64, -100),)
    for fill in (-1.0, 64.0):
        with pytest.raises(CompileRefused, match=r"indexes with data|indices of gather"):
            index_ranges(_picking("cpu", fill))


@pytest.mark.parametrize(("device", "traps"), [("cpu", False), ("cuda", True)])
def test_negative_labels_end_a_program_on_a_gpu_as_in_eager(device: str, traps: bool) -> None:
    graph = _picking(device, -100.0)
    trap_negative_indices(graph)
    graph.lint()
    (picked,) = [node for node in graph.nodes if "gather" in str(node.target)]
    assert ("where" in str(picked.args[2].target)) == traps
    if traps:
        negative, past, shown = picked.args[2].args
        assert (str(negative.target), negative.args) == ("aten.lt.Scalar", (shown, 0))
        assert past.args == ([], 64)


def _rows(device: str, pick: Callable[..., torch.Tensor]) -> torch.fx.Graph:
    """``pick`` of 8 rows and 3 indices, traced and decomposed as a forward of training is."""
    with FakeTensorMode():
        rows = torch.empty(8, 4, device=device)
        index = torch.empty(3, dtype=torch.int64, device=device)
        return joint_graph(lambda *given: [pick(*given)], (rows, index), gradients=False).graph


PICKS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "subscript": (lambda rows, index: rows[index] * 2, True),
    "index_select": (lambda rows, index: rows.index_select(0, index) * 2, False),
    "gather": (lambda rows, index: rows.gather(0, index[:, None]) * 2, False),
    "index_add": (lambda rows, index: rows.index_add(0, index, rows[:3]) * 2, False),
    "embedding": (lambda rows, index: torch.embedding(rows, index) * 2, False),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PICKS)
def test_only_what_eager_counts_from_the_end_is_counted_so(name: str, device: str) -> None:
    pick, from_the_end = PICKS[name]
    graph = _rows(device, pick)
    assert [place for place, *_ in index_ranges(graph)] == [1]
    trap_negative_indices(graph)
    graph.lint()
    traps = [node for node in graph.nodes if str(node.target) == "aten.where.self"]
    assert len(traps) == (device == "cuda" and not from_the_end)
    for trap in traps:
        end = trap.args[1]
        assert end.args == ([], 8)


class Drops(nn.Module):
    """Attention's last half, with a dropout of nothing, which is traced as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(6, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.softmax(x, -1), 0.0, training=True) @ self.values


def test_a_copy_is_not_kept_beside_what_was_copied() -> None:
    x = torch.randn(6, 6, requires_grad=True)
    graphs = traced(Drops(), x)
    made = [row for row in graphs.saved if row.kind == "made"]
    assert len(made) == 1
    assert graphs.made_bytes == x.numel() * 4


class Bags(nn.Module):
    """Bags of eight, or as ``offsets`` say."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 16, **options)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> Any:
        return self.bags(ids, offsets) * 2


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("open_batch", [False, True])
def test_bags_of_one_length_are_rows_and_their_sums(mode: str, open_batch: bool) -> None:
    model, ids = Bags(mode=mode), torch.randint(50, (32, 8))
    batch = torch.export.Dim("batch", min=2)
    sizes = {"ids": {0: batch}} if open_batch else None
    program = torch.export.export(model, (ids,), dynamic_shapes=sizes, strict=True)
    assert sum_equal_bags(program.graph)
    program.graph_module.recompile()
    assert "embedding_bag" not in program.graph_module.code
    for rows in (32, 7) if open_batch else (32,):
        other = torch.randint(50, (rows, 8))
        (mine,) = program.graph_module(model.bags.weight, other)
        assert_alike(mine.detach(), model(other).detach())


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        ({"mode": "max"}, None),
        ({"mode": "sum", "padding_idx": 3}, None),
        ({"mode": "sum", "sparse": True}, None),
        ({"mode": "sum", "scale_grad_by_freq": True}, None),
        ({"mode": "sum"}, torch.tensor([0, 3, 10])),
    ],
)
def test_other_bags_are_natives(options: dict[str, Any], offsets: torch.Tensor | None) -> None:
    ids = torch.randint(50, (32, 8) if offsets is None else (64,))
    program = torch.export.export(Bags(**options), (ids, offsets), strict=True)
    assert not sum_equal_bags(program.graph)
    assert "embedding_bag" in program.graph_module.code
