"""Of which inputs a graph's indices are, where it has shifted and filled these before it uses them.

A decoder makes its tokens of labels so: one further, a first one before them, and another one in
the place of the label that is skipped. What holds of the labels' values then holds of the tokens'.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import behind, operator_name
from eagercache.worker.graphs.value_bounds import bounds_of

# For each input the numbers that are replaced wherever it has them.
Sources = dict[torch.fx.Node, frozenset[int]]

_MOST_STEPS = 64
_INTEGERS = (torch.int32, torch.int64)
_SCATTERED = ("aten::slice_scatter", "aten::select_scatter")
_JOINED = ("aten::cat", "aten::stack")


def index_sources(index: Any, rows: int) -> Sources | None:
    """The inputs that ``index`` is made of: each value is theirs, or known to be in [0, ``rows``).

    None where that is not known.
    """
    return _sources(index, rows, _MOST_STEPS)


def _sources(index: Any, rows: int, steps: int) -> Sources | None:
    if isinstance(index, int):
        return {} if 0 <= index < rows else None
    node = behind(index)
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if steps == 0 or not isinstance(value, torch.Tensor) or value.dtype not in _INTEGERS:
        return None
    if node.op == "placeholder":
        return {node: frozenset()}
    ends = _constant_ends(node) if node.op == "get_attr" else bounds_of(node)
    known = ends is not None and all(isinstance(end, int) for end in ends)
    if ends is not None and known and ends[0] >= 0 and ends[1] < rows:
        return {}
    return _behind_call(node, rows, steps - 1)


def _behind_call(node: torch.fx.Node, rows: int, steps: int) -> Sources | None:
    name = operator_name(node)
    given: Any = node.args
    if name == "aten::lift_fresh_copy":
        return _sources(given[0], rows, steps)
    if name == "aten::copy":
        return _sources(given[1], rows, steps)
    if name in _SCATTERED:
        return _all([_sources(part, rows, steps) for part in given[:2]])
    if name in _JOINED:
        return _all([_sources(part, rows, steps) for part in given[0]])
    if name == "aten::where" and len(given) == 3:
        condition, one, other = given
    elif name == "aten::masked_fill":
        other, condition, one = given
    else:
        return None
    parts = [
        _without(_sources(one, rows, steps), condition, one, "aten::ne"),
        _without(_sources(other, rows, steps), condition, other, "aten::eq"),
    ]
    return _all(parts)


def _without(found: Sources | None, condition: Any, part: Any, compares: str) -> Sources | None:
    """``found`` of a part that is chosen where ``condition``, as ``part != 3``, lets it be."""
    if found is None or operator_name(condition) != compares or condition.args[0] is not part:
        return found
    number = condition.args[1]
    if type(number) is not int:
        return found
    return {source: replaced | {number} for source, replaced in found.items()}


def _all(parts: list[Sources | None]) -> Sources | None:
    together: Sources = {}
    for part in parts:
        if part is None:
            return None
        for source, replaced in part.items():
            together[source] = together.get(source, replaced) & replaced
    return together


def _constant_ends(node: torch.fx.Node) -> tuple[int, int] | None:
    """The least and the largest value of a constant of the code."""
    module: Any = node.graph.owning_module
    value = getattr(module, str(node.target), None)
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return None
    return int(value.min()), int(value.max())
