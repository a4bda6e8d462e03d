"""Why a call is, or is not, answered by a kernel: `explain`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from eagercache.base import config, operators
from eagercache.base.load import core
from eagercache.base.untried.standing import standing
from eagercache.calls.texts import ASIDE_RULES, counted
from eagercache.frontend.tables import html_table
from eagercache.runtime.left_native import left_native
from eagercache.runtime.session import session

_LEFT_NATIVE = (
    "it is left alone, because native was faster in all calls that earlier processes made; name it "
    "in enable(ops=[...]) to hook it"
)


@dataclass(frozen=True)
class Explanation:
    """What would answer one operator call now, and why.

    Attributes:
        op: the operator, "aten::var.correction".
        outcome: "hit" (a kernel answers), "native" (decided, not enabled or not eligible), "aside"
            (a rule keeps this call from having a key; `rule` names it) or "miss" (no verdict in
            this process yet).
        reason: one clause.
        difference: for a miss, the first field of the key in which the call differs from the
            nearest known one ("argument 0 (self): sizes [8, 4] is not [8, 8]"); "" without one.
        nearest: that known call, and `nearest_state` what is known of it: "kernel", "native",
            "pending" or "failed".
        parts: the operators that this one is made of, when it is not hooked itself.
    """

    op: str
    outcome: config.Outcome
    reason: str
    rule: str = ""
    difference: str = ""
    nearest_state: str = ""
    dispatch_key: str = ""
    digest: str = ""
    call: Mapping[str, Any] = field(default_factory=dict, repr=False)
    nearest: Mapping[str, Any] = field(default_factory=dict, repr=False)
    facts: Mapping[str, str] = field(default_factory=dict, repr=False)
    parts: tuple[Explanation, ...] = ()

    def __str__(self) -> str:
        text = f"{self.op}: {self.outcome}, {self.reason}"
        if self.difference:
            text += f"; the nearest known call ({self.nearest_state}): {self.difference}"
        return "\n  ".join([text, *(str(part) for part in self.parts)])

    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_html_(self) -> str:
        return html_table(
            f"eagercache: {self.op}",
            ("operator", "outcome", "why", "nearest known call"),
            (
                (
                    one.op,
                    one.outcome,
                    one.reason,
                    f"{one.nearest_state}: {one.difference}" if one.difference else "",
                )
                for one in (self, *self.parts)
            ),
        )


def explain(op: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Says what would answer `op(*args, **kwargs)` now: a kernel or native, and why.

    Args:
        op: an operator ("aten::var.correction", "var", torch.ops.aten.var) or any function that
            calls operators (torch.nn.functional.layer_norm).
        *args: the call's positional arguments.
        **kwargs: the call's keyword arguments.

    The call is made once, natively, on this thread; nothing is counted, compiled or loaded, and
    what native raises is raised. Operators that the function calls and that are hooked are in
    `parts`, unless there is just one and it is `op` itself.

    Raises:
        ValueError: there is no such operator.
        TypeError: `op` is neither an operator nor a function.
    """
    function, names = _callable(op)
    if core is None:
        return Explanation(_shown(op, names), "native", "eagercache does nothing on this platform")
    explainer = core.Explainer()
    explainer.start()
    try:
        result = function(*args, **kwargs)
    finally:
        calls = explainer.stop()
    met = tuple(_explanation(row) for row in calls)
    wanted = {operators.full_name(name) for name in names}
    if len(met) == 1 and (not wanted or met[0].op in wanted):
        return met[0]
    name = names[0][0] if names else str(getattr(op, "name", ""))
    refused = _function_refusal(name)
    if refused and all(part.op != name for part in met):
        return Explanation(name, "native", refused, parts=met)
    if met:
        are = "is" if len(met) == 1 else "are"
        reason = f"it is not hooked itself; {counted(len(met), 'operator')} that it calls {are}"
        if left_native.holds(names):
            reason = _LEFT_NATIVE
        return Explanation(_shown(op, names), "native", reason, parts=met)
    meant = _plain(names or _operators_of_name(op), kwargs)
    leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Explanation(_shown(op, names), "native", _why_not_hooked(meant, tensors))


def _operators_of_name(function: Any) -> list[operators.OperatorName]:
    """The operators that have the name of a function of torch's; [] of any other function."""
    name = getattr(function, "__name__", "")
    places = (torch, torch.nn.functional, torch.Tensor)
    if not any(getattr(place, name, None) is function for place in places):
        return []
    try:
        return operators.resolve(name)
    except operators.UnknownOperator:
        return []


def _callable(op: Any) -> tuple[Any, list[operators.OperatorName]]:
    """What to call, and the operators that it names (none for a plain function)."""
    overload = torch._ops.OpOverload
    packet = torch._ops.OpOverloadPacket
    if not isinstance(op, (str, overload, packet)):
        if not callable(op):
            raise TypeError(f"{op!r} is neither an operator nor a function")
        return op, []
    if core is None:
        return (lambda *args, **kwargs: None), []
    names = operators.resolve(op)
    if not isinstance(op, str):
        return op, names
    function = getattr(torch, op, None)
    if function is not None and callable(function):
        return function, names  # what people call by that name; it may pass other defaults
    space, _, base = names[0][0].partition("::")
    found = getattr(getattr(torch.ops, space), base)
    if len(names) == 1:
        found = getattr(found, names[0][1] or "default")
    return found, names


def _shown(op: Any, names: list[operators.OperatorName]) -> str:
    if len(names) == 1:
        return operators.full_name(names[0])
    return names[0][0] if names else getattr(op, "__name__", str(op))


def _why_not_hooked(names: list[operators.OperatorName], tensors: list[torch.Tensor]) -> str:
    """For a call that met no hook, of such overloads, with these arguments and results."""
    assert core is not None
    if not names and not core.answering():
        return _nothing_enabled()
    if not names:
        return "it calls no operator that is hooked"
    if left_native.holds(names):
        return _LEFT_NATIVE
    judged = [(name, *core.eligibility(name[0], name[1], "CPU")) for name in names]
    eligible = [name for name, takes_kernels, _, _ in judged if takes_kernels]
    if eligible and not core.answering():
        return _nothing_enabled()
    if eligible and any(map(_has_no_data, tensors)):
        return "its tensors hold no data (meta or fake ones), so no kernel of a device is called"
    if eligible and _hooked(eligible):
        return "it is hooked, but another way of PyTorch's answered this call before a device's"
    if eligible:
        return (
            "it can have kernels, but is not among the enabled operators; name it in "
            "enable(ops=[...])"
        )
    _, _, composite, reason = min(judged, key=lambda row: len(row[0][1]))
    if composite:
        part = "none of its parts is hooked" if core.answering() else "nothing is enabled"
        return f"{reason}; {part}"
    return str(reason)


def _nothing_enabled() -> str:
    if standing.pending():
        return "the self-check beside this torch has not passed yet"
    return "nothing is enabled; see enable()"


def _plain(names: list[operators.OperatorName], keywords: Iterable[str]) -> list[Any]:
    """Of overloads those that a call means: with out= only where it is given, without names."""
    writes = "out" in keywords
    rare = [("out" in overload) is not writes or "name" in overload for _, overload in names]
    return [name for name, left in zip(names, rare, strict=True) if not left] or names


def _has_no_data(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


def _hooked(names: Iterable[operators.OperatorName]) -> bool:
    assert core is not None
    active = {row["op"] for row in core.operator_stats() if row["active"]}
    return any(operators.full_name(name) in active for name in names)


def _explanation(row: Mapping[str, Any]) -> Explanation:
    rule = row["reason"] if row["outcome"] == "aside" else ""
    refusal = _function_refusal(row["op"])
    if refusal and row["outcome"] in ("native", "miss"):
        row = {**row, "outcome": "native", "reason": refusal}
    elif row["outcome"] == "miss":
        row = {**row, **_rule_for_misses(row["reason"])}
    elif row["reason"] == "disabled":
        row = {**row, "reason": "kernels are switched off; enable() switches them on"}
    explained = Explanation(
        op=row["op"],
        outcome=row["outcome"],
        reason=ASIDE_RULES.get(rule, rule) if rule else row["reason"],
        rule=rule,
        difference=row["difference"],
        nearest_state=row["nearest_state"],
        dispatch_key=row["dispatch_key"],
        digest=row["digest"],
        call=_json(row["call"]),
        nearest=_json(row["nearest"]),
        facts=dict(row["facts"]),
    )
    if explained.outcome != "miss" or explained.difference:
        return explained
    return _with_nearest_stored(explained)


def _rule_for_misses(reason: str) -> dict[str, str]:
    """What decides calls without a verdict, whichever they are: fields of an explanation."""
    assert core is not None
    if core.frozen():
        return {
            "outcome": "native",
            "reason": "freeze() holds: no kernel is looked up or compiled for a call that none has "
            "answered; enable() ends it",
        }
    chosen, store = session.configuration, session.store
    if chosen is None or store is None:
        return {}
    if chosen.on_miss == "native":
        said = "on_miss='native': kernels of the cache are used, nothing is compiled"
    elif store.read_only:
        said = f"the cache {store.root} can only be read: no kernel is added"
    else:
        return {}
    return {} if "the store has a verdict" in reason else {"reason": f"it has no kernel; {said}"}


def _function_refusal(name: str) -> str:
    """Why the function of an operator made by `eagercache.op` has no kernels, or ""."""
    loaded = sys.modules.get("eagercache.callables.custom_operators")
    operator = loaded.find(name) if loaded is not None else None
    return str(operator.refusal) if operator is not None else ""


def _json(text: str) -> Mapping[str, Any]:
    return json.loads(text) if text else {}


def _with_nearest_stored(explained: Explanation) -> Explanation:
    """The same with the nearest call of the store, when this process has met none."""
    best: tuple[int, Explanation] | None = None
    for state, stored in _stored_calls(explained.op):
        differences = list(_differences(explained.call, stored))
        if differences and (best is None or len(differences) < best[0]):
            values = {
                **explained.__dict__,
                "difference": differences[0],
                "nearest": stored,
                "nearest_state": state,
            }
            best = len(differences), Explanation(**values)
    return explained if best is None else best[1]


def _stored_calls(op: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if session.store is None:
        return
    for entry in session.store.entries(all=False):
        if entry["facts"].get("op") == op and "call" in entry["facts"]:
            try:
                yield entry["kind"], json.loads(entry["facts"]["call"])
            except ValueError:
                continue


def _differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Fields in which two described calls differ."""
    yield from _field_differences("state", mine.get("state", {}), other.get("state", {}))
    pairs = zip(mine.get("args", []), other.get("args", []), strict=False)
    for index, (left, right) in enumerate(pairs):
        name = left.get("name", "")
        where = f"argument {index} ({name})" if name else f"argument {index}"
        if left.get("kind") != right.get("kind"):
            yield f"{where}: {left.get('kind')} is not {right.get('kind')}"
        else:
            yield from _field_differences(where, left, right)


def _field_differences(
    where: str, left: Mapping[str, Any], right: Mapping[str, Any]
) -> Iterator[str]:
    for name, value in left.items():
        if name in right and right[name] != value:
            yield f"{where}: {name} {value} is not {right[name]}"
