"""Between which numbers the integers lie that a graph computes, for whatever it is called with.

Interval arithmetic (R. E. Moore, Interval Analysis, 1966): positions that are counted among the
tokens of a mask, buckets, clamped differences. An index of which this is known needs no check
before a call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import TRANSPARENT, operator_name, shows_bytes

# (least, most). Numbers, or sizes that are left open.
Bounds = tuple[Any, Any]

_MOST_STEPS = 64
_NONE: Mapping[torch.fx.Node, Bounds] = {}


def bounds_of(node: Any, assumed: Mapping[torch.fx.Node, Bounds] = _NONE) -> Bounds | None:
    """Those of an integer, of a tensor of integers or of booleans; None where nothing is known.

    ``assumed``: those of other nodes.
    """
    return _bounds(node, _MOST_STEPS, assumed)


def _bounds(node: Any, steps: int, assumed: Mapping[torch.fx.Node, Bounds]) -> Bounds | None:
    if isinstance(node, torch.fx.Node) and node in assumed:
        return assumed[node]
    if isinstance(node, (bool, int, torch.SymInt)):
        return node, node
    value = getattr(node, "meta", {}).get("val") if isinstance(node, torch.fx.Node) else None
    if isinstance(value, (int, torch.SymInt)):
        return value, value
    if steps == 0 or not isinstance(value, torch.Tensor):
        return None
    if value.dtype == torch.bool:
        return 0, 1
    if value.is_floating_point() or value.is_complex():
        return None
    rule = None if shows_bytes(node) else _RULES.get(operator_name(node))
    if node.target is operator.getitem and operator_name(node.args[0]) in _PLACES:
        rule = _second
    found = None if rule is None else rule(node, lambda other: _bounds(other, steps - 1, assumed))
    return found if found is None or _fits(found, value.dtype) else None


def _fits(found: Bounds, dtype: torch.dtype) -> bool:
    """Whether nothing wraps around. An open size is less than 2**31."""
    held = torch.iinfo(dtype)
    if any(isinstance(end, torch.SymInt) for end in found) and held.bits < 32:
        return False
    known = [end for end in found if isinstance(end, int)]
    return all(held.min <= end <= held.max for end in known)


_Ask = Callable[[Any], Bounds | None]
_Rule = Callable[[torch.fx.Node, _Ask], Bounds | None]


def _same(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    return ask(node.args[0])


def _arange(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    first, end, step = (0, *node.args, 1)[:3] if len(node.args) == 1 else (*node.args, 1)[:3]
    low, high = ask(first), ask(end)
    if low is None or high is None or not (isinstance(step, int) and step > 0):
        return None
    return low[0], high[1] - 1


def _iota(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    """An `arange` of integers as a graph with gradients has it."""
    start, step = node.kwargs.get("start"), node.kwargs.get("step")
    first, count = ask(start), ask(node.args[0])
    if first is None or count is None or not (isinstance(step, int) and step > 0):
        return None
    return first[0], first[1] + (count[1] - 1) * step


def _filled(number: int | None, position: int = -1) -> _Rule:
    def rule(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
        return ask(node.args[position] if number is None else number)

    return rule


def _cumsum(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    found = ask(node.args[0])
    shape = node.args[0].meta["val"].shape
    if found is None or not shape or not _not_negative(found):
        return None
    return found[0], found[1] * shape[node.args[1]]


def _add(sign: int) -> _Rule:
    def rule(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
        one, other = ask(node.args[0]), ask(node.args[1])
        if one is None or other is None or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
            return None
        low, high = other if sign > 0 else (-other[1], -other[0])
        return one[0] + low, one[1] + high

    return rule


def _mul(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    one, other = ask(node.args[0]), ask(node.args[1])
    if one is None or other is None or not (_not_negative(one) and _not_negative(other)):
        return None
    return one[0] * other[0], one[1] * other[1]


def _where(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    """Labels from which the one that is skipped is taken: where(labels != skipped, labels, 0)."""
    condition, chosen, other = node.args
    found = ask(chosen)
    if operator_name(condition) == "aten::ne" and condition.args[0] is chosen and found is not None:
        skipped = condition.args[1]
        if isinstance(skipped, int) and all(isinstance(end, int) for end in found):
            low, high = found
            found = low + (low == skipped), high - (high == skipped)
            if found[0] > found[1]:
                return ask(other)
    return _union([found, ask(other)])


def _cat(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    parts: Any = node.args[0]
    return _union([ask(part) for part in parts])


def _clamp(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    """A clamp's lower end first, then its upper one, as PyTorch has it."""
    name = operator_name(node)
    low = node.args[1] if name != "aten::clamp_max" else None
    high = node.args[1] if name == "aten::clamp_max" else (*node.args, None, None)[2]
    if name == "aten::clamp":
        low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    found = ask(node.args[0])
    least, most = ask(low), ask(high)
    if (low is None) != (least is None) or (high is None) != (most is None):
        return None
    if found is None and least is not None and most is not None:
        return torch.sym_min(least[0], most[0]), most[1]
    if found is None:
        found = _all_of(node.args[0].meta["val"].dtype, least or most)
    for end, choose in ((least, torch.sym_max), (most, torch.sym_min)):
        if end is not None and found is not None:
            found = choose(found[0], end[0]), choose(found[1], end[1])
    return found


def _all_of(dtype: torch.dtype, end: Bounds | None) -> Bounds | None:
    """All integers of a dtype, of which those up to a known end are to be left."""
    if dtype.is_floating_point or end is None or not all(isinstance(one, int) for one in end):
        return None
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _smaller(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    return _both(node, ask, torch.sym_min)


def _larger(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    return _both(node, ask, torch.sym_max)


def _both(node: torch.fx.Node, ask: _Ask, choose: Callable[[Any, Any], Any]) -> Bounds | None:
    one, other = ask(node.args[0]), ask(node.args[1])
    if one is None or other is None:
        return None
    return choose(one[0], other[0]), choose(one[1], other[1])


def _remainder(node: torch.fx.Node, _: _Ask) -> Bounds | None:
    divisor = node.args[1]
    return (0, divisor - 1) if isinstance(divisor, int) and divisor > 0 else None


def _argmax(node: torch.fx.Node, _: _Ask) -> Bounds | None:
    dimension = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dimension is None:
        return 0, node.args[0].meta["val"].numel() - 1
    return _along(node, dimension)


def _second(node: torch.fx.Node, ask: _Ask) -> Bounds | None:
    """The places of what an operator of `_PLACES` has chosen are its second answer."""
    chosen, which = node.args
    return _places(chosen, ask) if which == 1 else None


def _places(node: Any, _: _Ask) -> Bounds | None:
    position, dimension = _PLACES[operator_name(node)]
    if len(node.args) > position:
        dimension = node.args[position]
    dimension = node.kwargs.get("dim", dimension)
    return _along(node, dimension) if isinstance(dimension, int) else None


def _along(node: Any, dimension: int) -> Bounds:
    """The places along a dimension of what an operator is given."""
    value = node.args[0].meta["val"]
    return (0, value.shape[dimension] - 1) if value.dim() else (0, 0)


def _not_negative(found: Bounds) -> bool:
    return isinstance(found[0], int) and found[0] >= 0


def _union(parts: list[Bounds | None]) -> Bounds | None:
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or not known:
        return None
    low, high = known[0]
    for part in known[1:]:
        low, high = torch.sym_min(low, part[0]), torch.sym_max(high, part[1])
    return low, high


# Of operators that put in order or choose along a dimension: where it stands among the arguments,
# and what it is by default.
_PLACES: dict[str, tuple[int, int | None]] = {
    "aten::argsort": (1, -1),
    "aten::sort": (1, -1),
    "aten::topk": (2, -1),
    "aten::kthvalue": (2, -1),
    "aten::median": (1, None),
    "aten::max": (1, None),
    "aten::min": (1, None),
}
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(TRANSPARENT, _same),
    **dict.fromkeys(("aten::gather", "aten::index_select", "aten::index", "aten::take"), _same),
    **dict.fromkeys(
        ("aten::flip", "aten::roll", "aten::repeat", "aten::amax", "aten::amin"), _same
    ),
    **dict.fromkeys(("aten::zeros", "aten::zeros_like", "aten::new_zeros"), _filled(0)),
    **dict.fromkeys(("aten::ones", "aten::ones_like", "aten::new_ones"), _filled(1)),
    **dict.fromkeys(("aten::full", "aten::full_like"), _filled(None, 1)),
    "aten::scalar_tensor": _filled(None, 0),
    "aten::arange": _arange,
    "prims::iota": _iota,
    "aten::cumsum": _cumsum,
    "aten::add": _add(1),
    "aten::sub": _add(-1),
    "aten::mul": _mul,
    "aten::where": _where,
    "aten::cat": _cat,
    "aten::stack": _cat,
    **dict.fromkeys(("aten::clamp", "aten::clamp_min", "aten::clamp_max"), _clamp),
    "aten::minimum": _smaller,
    "aten::maximum": _larger,
    "aten::remainder": _remainder,
    "aten::argsort": _places,
    **dict.fromkeys(("aten::argmax", "aten::argmin"), _argmax),
}
