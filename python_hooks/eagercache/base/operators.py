"""Operator names as people write them, turned into overloads that can be hooked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from eagercache.base.load import core

OperatorName = tuple[str, str]  # ("aten::var", "correction")


class UnknownOperator(ValueError):
    """A name that fits no operator; the message suggests similar ones."""


class IneligibleOperator(ValueError):
    """An operator that exists but cannot be accelerated; the message says why."""


def full_name(name: OperatorName) -> str:
    """("aten::var", "correction") as "aten::var.correction"."""
    return f"{name[0]}.{name[1]}" if name[1] else name[0]


def described_name(description: Mapping[str, Any]) -> str:
    """The full name in a described call: its fields "op" and "overload"."""
    return full_name((str(description.get("op", "")), str(description.get("overload", ""))))


def _split(text: str) -> tuple[str, str | None]:
    """(name, overload or None for all overloads) of "aten::var.correction", "torch.var", "var"."""
    spec = text.strip()
    # As programs write it; "torch" is no namespace of operators.
    for place in ("torch.ops.", "torch.nn.functional.", "torch.Tensor.", "torch."):
        if spec.startswith(place):
            spec = spec.removeprefix(place)
            break
    if "::" in spec:
        namespace, _, rest = spec.partition("::")
    else:
        head, _, tail = spec.partition(".")
        if tail and hasattr(torch.ops, head) and core is not None:
            is_namespace = bool(core.overloads_of(f"{head}::{tail.partition('.')[0]}"))
        else:
            is_namespace = False
        namespace, rest = (head, tail) if is_namespace else ("aten", spec)
    base, dot, overload = rest.partition(".")
    if not dot:
        return f"{namespace}::{base}", None
    return f"{namespace}::{base}", "" if overload == "default" else overload


def _suggestions(name: str) -> str:
    assert core is not None
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    near = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {', '.join(near)}?" if near else ""


def resolve(spec: Any) -> list[OperatorName]:
    """The overloads that `spec` names: a string, an OpOverload or an OpOverloadPacket.

    A string without overload names all overloads of the operator.

    Raises:
        UnknownOperator: there is no such operator or overload.
        TypeError: `spec` is something else.
    """
    assert core is not None
    if isinstance(spec, torch._ops.OpOverload):
        name, overload = spec._schema.name, spec._schema.overload_name
        return [(name, overload)]
    if isinstance(spec, torch._ops.OpOverloadPacket):
        return [(spec._qualified_op_name, o) for o in core.overloads_of(spec._qualified_op_name)]
    if not isinstance(spec, str):
        raise TypeError(
            f"an operator is named by a string such as 'aten::var.correction' or by "
            f"torch.ops.aten.var.correction, not by {spec!r}"
        )
    name, wanted = _split(spec)
    # ASCII, as every operator's name: the core takes no text that is not UTF-8.
    overloads = core.overloads_of(name) if name.isascii() else []
    if not overloads:
        raise UnknownOperator(f"there is no operator {name!r}.{_suggestions(name)}")
    if wanted is None:
        return [(name, overload) for overload in overloads]
    if wanted not in overloads:
        shown = ", ".join(sorted(o or "default" for o in overloads))
        raise UnknownOperator(f"{name} has no overload {wanted!r}; it has {shown}.")
    return [(name, wanted)]


def require_eligible(spec: Any, dispatch_key: str) -> list[OperatorName]:
    """The overloads of `spec` that can be hooked at `dispatch_key`; never empty.

    Raises:
        IneligibleOperator: none can; the message gives the reason, and for a composite operator the
            operators that it is made of.
        UnknownOperator, TypeError: see `resolve`.
    """
    assert core is not None
    names = resolve(spec)
    reasons: list[str] = []
    eligible: list[OperatorName] = []
    composite: OperatorName | None = None
    for name in names:
        ok, is_composite, reason = core.eligibility(name[0], name[1], dispatch_key)
        if ok:
            eligible.append(name)
            continue
        if is_composite:
            composite = composite or name
        reasons.append(f"{full_name(name)}: {reason}")
    if eligible:
        return eligible
    message = "cannot be accelerated at " + dispatch_key + ": " + "; ".join(reasons[:3])
    if composite is not None:
        from eagercache.base.decomposition import parts_text

        message += parts_text(composite)
    raise IneligibleOperator(f"{full_name(names[0])} {message}.")


def resolve_all(specs: Iterable[Any]) -> set[OperatorName]:
    """The union of `resolve` over `specs`."""
    return {name for spec in specs for name in resolve(spec)}
