"""Whether two exported programs compute the same, in whatever order their operators stand."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import draws_numbers

# Constants are compared by their bytes up to here, and by where they are above.
_MOST_COMPARED = 1 << 16


class _Digest(str):
    """What stands for a node among another one's arguments; no argument is written like it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{self}>"


def compute_the_same(
    one: torch.export.ExportedProgram, other: torch.export.ExportedProgram
) -> bool:
    """Whether each output of one is the same expression of the same inputs in the other.

    Random numbers are drawn in the same order. False also where that cannot be told: where
    operators write or hold graphs.
    """
    first, second = _written(one), _written(other)
    return first is not None and first == second


def _written(program: torch.export.ExportedProgram) -> Any:
    digests: dict[torch.fx.Node, _Digest] = {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    unused: Counter[str] = Counter()
    outputs, draws = "", 0
    for node in program.graph.nodes:
        given = [torch.fx.map_arg(part, digests.__getitem__) for part in (node.args, node.kwargs)]
        if node.op == "output":
            outputs = repr(given)
            continue
        if node.op == "placeholder":
            text = _source(program, specs[node.name])
        elif node.op == "call_function" and _is_pure(node.target):
            text = f"{node.target}{given}"
            if draws_numbers(node):  # no two of them are one
                text += f" draw {draws}"
                draws += 1
        else:
            return None
        digests[node] = _Digest(hashlib.sha256(text.encode()).hexdigest())
        unused[digests[node]] += not node.users and node.op != "placeholder"
    kinds = [(str(spec.kind), spec.target) for spec in program.graph_signature.output_specs]
    ranges = sorted(map(str, program.range_constraints.items()))
    return outputs, kinds, str(program.call_spec.out_spec), ranges, +unused


def _source(program: torch.export.ExportedProgram, spec: Any) -> str:
    if spec.target is None or "CONSTANT" not in str(spec.kind):
        return f"{spec.kind} {spec.target or spec.arg.name}"
    # Constants of the code are numbered in the order in which they are met.
    value = program.constants[spec.target]
    if not isinstance(value, torch.Tensor):
        return f"object {id(value)}"
    text = f"constant {value.dtype} {tuple(value.shape)} {value.stride()} {value.device} "
    if value.numel() > _MOST_COMPARED:
        return text + str(value.data_ptr())
    return text + str(value.detach().cpu().contiguous().view(-1).tolist())


def _is_pure(target: Callable[..., Any] | str) -> bool:
    if target is torch.ops.aten.detach_.default:  # as export has it behind a constant
        return True
    if isinstance(target, torch._ops.OpOverload):
        # Of operators of a program nobody knows what they do besides.
        return target.namespace in ("aten", "prims") and not target._schema.is_mutable
    # Arithmetic of sizes, and items of what an operator returns.
    return getattr(target, "__module__", "") in ("_operator", "math")
