"""Whether two exported programs compute the same, in whatever order their operators stand."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from eagercache.worker.graphs.nodes import draws_numbers

# A part in which gradients are recorded, or are not: whether, a graph, and what that is given.
_RECORDS = torch.ops.higher_order.wrap_with_set_grad_enabled
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
    operators write or hold graphs, but for parts in which gradients are or are not recorded.
    """
    first, second = _written(one), _written(other)
    return first is not None and first == second


def _written(program: torch.export.ExportedProgram) -> Any:
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    given = [
        _digest(_source(program, specs[node.name]))
        for node in program.graph.find_nodes(op="placeholder")
    ]
    reading = _Reading()
    try:
        outputs = repr(reading.read(program.graph_module, given, ""))
    except _Unknown:
        return None
    kinds = [(str(spec.kind), spec.target) for spec in program.graph_signature.output_specs]
    ranges = sorted(map(str, program.range_constraints.items()))
    return outputs, kinds, str(program.call_spec.out_spec), ranges, +reading.unused


class _Unknown(Exception):
    """An operator of which nobody knows what it does besides."""


class _Reading:
    """What a program's graphs compute, operator by operator.

    Attributes:
        unused: what nothing reads.
    """

    def __init__(self) -> None:
        self.unused: Counter[str] = Counter()
        self._draws = 0

    def read(self, module: torch.fx.GraphModule, given: Sequence[_Digest], mode: str) -> Any:
        """What the graph returns, of ``given``; ``mode``: how it records gradients.

        Raises _Unknown.
        """
        inputs = module.graph.find_nodes(op="placeholder")
        digests: dict[torch.fx.Node, Any] = dict(zip(inputs, given, strict=True))
        for node in module.graph.nodes:
            if node.op == "output":
                return torch.fx.map_arg(node.args[0], digests.__getitem__)
            if node.op == "get_attr" and all(user.target is _RECORDS for user in node.users):
                continue
            if node.op == "call_function" and node.target is _RECORDS:
                records, part, *rest = node.args
                inner = getattr(module, part.target)
                digests[node] = self.read(inner, [digests[one] for one in rest], f"{records} ")
            elif node.op == "call_function":
                digests[node] = self._result(node, digests, mode)
            elif node.op != "placeholder":
                raise _Unknown
        raise _Unknown

    def _result(self, node: torch.fx.Node, digests: dict[torch.fx.Node, Any], mode: str) -> Any:
        if node.target is operator.getitem and type(digests[node.args[0]]) is not _Digest:
            return digests[node.args[0]][node.args[1]]
        if not _is_pure(node.target):
            raise _Unknown
        given = [torch.fx.map_arg(part, digests.__getitem__) for part in (node.args, node.kwargs)]
        text = f"{mode}{node.target}{given}"
        if draws_numbers(node):  # no two of them are one
            text += f" draw {self._draws}"
            self._draws += 1
        digest = _digest(text)
        self.unused[digest] += not node.users
        return digest


def _digest(text: str) -> _Digest:
    return _Digest(hashlib.sha256(text.encode()).hexdigest())


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
