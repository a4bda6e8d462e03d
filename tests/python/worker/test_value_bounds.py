"""Bounds of integers that a graph computes, and the inputs that it makes its indices of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagercache.worker.compat import traced_graphs
from eagercache.worker.graphs.index_sources import index_sources
from eagercache.worker.graphs.indices import index_ranges
from eagercache.worker.graphs.nodes import operator_name, shifted_input
from eagercache.worker.graphs.value_bounds import bounds_of
from eagercache.worker.inductor.commands import CompileRefused
from torch.fx.experimental.proxy_tensor import make_fx

IDS = torch.tensor([[5, 1, 7, 1], [1, 1, 1, 9]])


def positions(ids: torch.Tensor) -> torch.Tensor:
    """As RoBERTa counts them."""
    mask = ids.ne(1).int()
    return (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + 1


def skipping(labels: torch.Tensor, skipped: int) -> torch.Tensor:
    """As a cross entropy has it."""
    return torch.where(labels != skipped, labels, 0)


KNOWN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, int]]] = {
    "positions": (positions, (1, 5)),
    "counted": (lambda ids: torch.arange(2, 9) + ids.ne(1).any(), (2, 9)),
    "mask": (lambda ids: ids.eq(3).long() - 1, (-1, 0)),
    "chosen": (lambda ids: torch.where(ids > 2, 7, 3), (3, 7)),
    "clamped": (lambda ids: ids.clamp(2, 6), (2, 6)),
    "clamped below": (lambda ids: ids.gt(2).long().add(4).clamp(max=4), (4, 4)),
    "one end": (lambda ids: ids.clamp(min=2), (2, torch.iinfo(torch.int64).max)),
    "one after the other": (lambda ids: ids.clamp(min=2).clamp(max=6), (2, 6)),
    "skipped": (lambda ids: skipping(ids.clamp(0, 7), 7), (0, 6)),
    "skipped below": (lambda ids: skipping(ids.clamp(1, 7), 1), (0, 7)),
    "all skipped": (lambda ids: skipping(ids.clamp(7, 7), 7), (0, 0)),
    "none skipped": (lambda ids: skipping(ids.clamp(0, 7), 8), (0, 7)),
    "bucket": (lambda ids: ids % 3, (0, 2)),
    "largest": (lambda ids: ids.float().argmax(1), (0, 3)),
    "in order": (lambda ids: ids.float().argsort(1), (0, 3)),
    "in order by columns": (lambda ids: ids.sort(0, descending=True)[1], (0, 1)),
    "a few": (lambda ids: ids.float().topk(2, 0)[1], (0, 1)),
    "the last of them": (lambda ids: ids.float().topk(2)[1], (0, 3)),
    "largest by columns": (lambda ids: ids.max(0).indices, (0, 1)),
    "in the middle": (lambda ids: ids.float().median(dim=1)[1], (0, 3)),
    "joined": (lambda ids: torch.cat([ids % 4, torch.full_like(ids, 9)], 1).view(-1), (0, 9)),
    "smaller": (lambda ids: torch.minimum(ids % 4, torch.full_like(ids, 2)), (0, 2)),
    "part": (lambda ids: positions(ids)[:, 1:].gather(1, ids % 2), (1, 5)),
}
UNKNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "input": lambda ids: ids,
    "in order, values": lambda ids: ids.sort(0)[0],
    "rounded": lambda ids: ids.float().long(),
    "wraps around": lambda ids: ids.ne(1).to(torch.int8) * 100 + 100,
    "alpha": lambda ids: torch.add(ids % 2, ids % 2, alpha=5),
    "negative counts": lambda ids: torch.cumsum(ids.ne(1).long() - 1, 1),
    "negative factor": lambda ids: (ids % 2) * -3,
    "skipped in between": lambda ids: torch.where(ids != 3, ids, 0),
    "skipped of others": lambda ids: torch.where(ids.clamp(0, 9) != 9, ids, 0),
    "remainder of a negative number": lambda ids: ids % -3,
    "bytes": lambda ids: (ids % 3).to(torch.int32).view(torch.int64),
}


def _last(function: Callable[[torch.Tensor], torch.Tensor], above: bool = False) -> Any:
    """What it returns, in a graph; ``above`` as `torch.export` has it, where casts are others."""
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=above)(IDS).graph
    (output,) = graph.find_nodes(op="output")
    return output.args[0]


@pytest.mark.parametrize("name", KNOWN)
def test_bounds_hold_what_is_computed(name: str) -> None:
    function, expected = KNOWN[name]
    values = function(IDS)
    for above in (False, True):
        assert bounds_of(_last(function, above)) == expected
    assert expected[0] <= int(values.min()) and int(values.max()) <= expected[1]


def test_casts_in_a_graph_with_gradients_keep_bounds() -> None:
    def looks_up(ids: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        return [table[positions(ids)], table[ids.to(torch.int8).long()]]

    table = torch.randn(300, 2, requires_grad=True)
    graph = traced_graphs.joint_graph(looks_up, (IDS, table)).graph
    known, unknown = (
        node.args[1][0] for node in graph.nodes if operator_name(node) == "aten::index"
    )
    assert bounds_of(known) == (1, 5)
    assert bounds_of(unknown) is None and shifted_input(unknown) is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_be_any_number_has_none(name: str) -> None:
    for above in (False, True):
        assert bounds_of(_last(UNKNOWN[name], above)) is None


def test_bounds_of_open_sizes_are_such() -> None:
    graph = make_fx(positions, tracing_mode="symbolic")(IDS).graph
    (output,) = graph.find_nodes(op="output")
    found = bounds_of(output.args[0])
    assert found is not None
    least, most = found
    assert least == 1 and isinstance(most, torch.SymInt) and most == 5


def test_an_input_is_looked_at_in_place_of_what_shows_its_very_integers() -> None:
    for above in (False, True):
        shown = shifted_input(_last(lambda ids: ids.int().view(-1) + 2, above))
        assert shown is not None and shown[0].op == "placeholder" and shown[1:] == (2, 2)
    assert shifted_input(_last(lambda ids: ids.view(torch.int32))) is None
    assert shifted_input(_last(lambda ids: ids.to(torch.int8).long())) is None
    assert shifted_input(_last(lambda ids: ids.bool().long())) is None


ROWS = 9
Made = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def shifted(labels: torch.Tensor, first: int = 2, skipped: int = -100) -> torch.Tensor:
    """As transformers makes a decoder's tokens of labels."""
    tokens = labels.new_zeros(labels.shape)
    tokens[..., 1:] = labels[..., :-1].clone()
    tokens[..., 0] = first
    return tokens.masked_fill_(tokens == skipped, 3)


# (which numbers are replaced) for each of two inputs; None where nothing is known.
CASES: dict[str, tuple[Made, dict[int, set[int]] | None]] = {
    "shifted": (lambda a, b: shifted(a), {0: {-100}}),
    "cast": (lambda a, b: shifted(a.int()).long(), {0: {-100}}),
    "joined": (lambda a, b: torch.cat([a, shifted(b)], 1), {0: set(), 1: {-100}}),
    "twice": (lambda a, b: shifted(shifted(a), skipped=-1), {0: {-100, -1}}),
    "by two ways": (lambda a, b: torch.cat([a, shifted(a)]), {0: set()}),
    "chosen": (lambda a, b: torch.where(b > 0, a, 4), {0: set()}),
    "kept": (lambda a, b: torch.where(a != -1, a, 4), {0: {-1}}),
    "of another": (lambda a, b: torch.where(b != -1, a, 4), {0: set()}),
    "of the replaced": (lambda a, b: torch.where(a == -1, a, 4), {0: set()}),
    "by an outside number": (lambda a, b: shifted(a, first=9), None),
    "by a negative number": (lambda a, b: torch.where(a != -1, a, -1), None),
    "added": (lambda a, b: shifted(a + b), None),
    "narrowed": (lambda a, b: shifted(a.to(torch.int8).long()), None),
    "rounded": (lambda a, b: shifted(a.float().long()), None),
}


@pytest.mark.parametrize("name", CASES)
def test_what_holds_of_inputs_holds_of_indices(name: str) -> None:
    make, expected = CASES[name]

    def looks_up(a: torch.Tensor, b: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.embedding(make(a, b), table)]

    inputs = (torch.tensor([[1, 2, 4]]), torch.tensor([[4, 5, 1]]))
    table = torch.randn(300, 2, requires_grad=True)
    graph = traced_graphs.joint_graph(looks_up, (*inputs, table)).graph
    places = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    (index,) = (n.args[1] for n in graph.nodes if operator_name(n) == "aten::embedding")
    found = index_sources(index, ROWS)
    assert (None if found is None else {places[k]: set(v) for k, v in found.items()}) == expected


def test_a_mask_whose_tokens_are_counted_is_looked_at() -> None:
    def ranges(function: Callable[[torch.Tensor], torch.Tensor], rows: int) -> Any:
        def looks_up(mask: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
            return [torch.nn.functional.embedding(function(mask), table)]

        table = torch.randn(rows, 2, requires_grad=True)
        return index_ranges(
            traced_graphs.joint_graph(looks_up, (torch.ones_like(IDS), table)).graph
        )

    def counted(mask: torch.Tensor) -> torch.Tensor:
        return (torch.cumsum(mask, dim=1) * mask - 1).long() + 2

    assert ranges(counted, 6) == ((0, 0, 2, 0),)
    for function, rows in ((counted, 5), (lambda mask: mask * 3 + 1, 6)):
        with pytest.raises(CompileRefused, match="computed"):
            ranges(function, rows)


def test_inputs_are_looked_at_for_what_is_made_of_them() -> None:
    def looks_up(labels: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.embedding(shifted(labels), table)]

    def ranges(rows: int) -> tuple[tuple[int, int, int, int], ...]:
        table = torch.randn(rows, 2, requires_grad=True)
        return index_ranges(
            traced_graphs.joint_graph(looks_up, (torch.tensor([[1, 0, 1]]), table)).graph
        )

    assert ranges(ROWS) == ((0, 0, ROWS, -100),)
    with pytest.raises(CompileRefused, match="computed"):
        ranges(3)  # the number that replaces one is outside
