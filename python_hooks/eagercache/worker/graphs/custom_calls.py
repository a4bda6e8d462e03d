"""Operators of the program's own in a module's graph, which its kernel calls back.

A compiler sees nothing of them but what they say that they return. The kernel calls each through
the dispatcher, where eager calls it: what it does besides happens, and another implementation is
another one for the kernel, too. The core checks after each call that the operator did what was
said (dispatcher/plans/operator_calls).

For the compiler each call is one of an operator of ours, of tensors and no more, which only this
one call has. So calls are never merged, and are told apart in the text.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from eagercache.callables.used_functions import is_of_programs
from eagercache.worker.graphs.nodes import operator_name
from eagercache.worker.inductor.commands import CompileRefused

_SPACE = "eagercache_calls"
_MAX_CALLS = 64
_numbers = itertools.count()


def is_custom(node: Any) -> bool:
    """Whether a node calls an operator of the program, or of a library beside PyTorch."""
    return is_of_programs(operator_name(node))


class CustomCalls:
    """The calls of a graph in their order; `close` when it is compiled."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._library = torch.library.Library(_SPACE, "FRAGMENT")

    def close(self) -> None:
        """Takes the operators of ours out again."""
        self._library._destroy()

    def add(self, node: torch.fx.Node) -> None:
        """Puts an operator of ours in the place of a node's. Raises CompileRefused."""
        row, given = _row_of(node)
        if len(self.rows) == _MAX_CALLS:
            raise CompileRefused(f"it calls more than {_MAX_CALLS} custom operators")
        name = f"called_{next(_numbers)}"
        self._library.define(
            f"{name}(Tensor[] given) -> Tensor[]", tags=[torch.Tag.needs_exact_strides]
        )
        value = node.meta["val"]
        answers = [value] if isinstance(value, torch.Tensor) else list(value)
        fake = _said_to_return([(a.size(), a.stride(), a.dtype, a.device) for a in answers])
        torch.library.register_fake(f"{_SPACE}::{name}", fake, lib=self._library)
        target = getattr(getattr(torch.ops, _SPACE), name).default
        graph = node.graph
        with graph.inserting_before(node):
            called = graph.call_function(target, (given,))
            called.meta["val"] = answers
            if isinstance(value, torch.Tensor):
                first = graph.call_function(operator.getitem, (called, 0))
                first.meta.update(node.meta)
        node.replace_all_uses_with(first if isinstance(value, torch.Tensor) else called)
        graph.erase_node(node)
        self.rows.append(row)
        self._names.append(f"{_SPACE}::{name}")

    def check(self, called: Sequence[str]) -> None:
        """Raises CompileRefused unless the text calls each, in eager's order.

        ``called``: what it calls by the proxy executor, as "space::name".
        """
        if list(called) != self._names:
            raise CompileRefused("the generated code calls custom operators otherwise than eager")

    def text(self) -> str:
        """C++ behind a container's text: the calls, as the core reads them."""
        pieces = json.dumps(self.rows)
        lines = [pieces[at : at + 2000] for at in range(0, len(pieces), 2000)]
        literal = "\n".join(json.dumps(line) for line in lines)
        return (
            '\nextern "C" __attribute__((visibility("default"))) const char*'
            f" eagercache_operators() {{\n  return {literal};\n}}\n"
        )


def take_custom_calls(
    graph: torch.fx.Graph, called: Sequence[str] | None, why_not: str
) -> CustomCalls | None:
    """Makes calls of ours of all custom operators in a graph; None where there are none.

    ``called``: what the forward called in eager, in order; where it is another list, or None, or
    something else is ``why_not``, the module is refused. Raises CompileRefused.
    """
    nodes = [node for node in graph.nodes if is_custom(node)]
    names = [operator_name(node) for node in nodes]
    if nodes and (called is None or why_not):
        raise CompileRefused(
            f"the forward calls the custom operator {nodes[0].target}{why_not and f' {why_not}'}"
        )
    for name in called or ():
        if name not in names:
            raise CompileRefused(f"the forward calls {name}, which a trace sees into or leaves out")
    if names != list(called or ()):
        raise CompileRefused("the forward calls custom operators in another order than its trace")
    if not nodes:
        return None
    calls = CustomCalls()
    try:
        for node in nodes:
            calls.add(node)
    except BaseException:
        calls.close()
        raise
    return calls


def _said_to_return(answers: Sequence[tuple[Any, ...]]) -> Callable[..., list[torch.Tensor]]:
    def fake(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype, device in answers
        ]

    return fake


# ---- what the core reads -------------------------------------------------------------------------


def _row_of(node: torch.fx.Node) -> tuple[dict[str, Any], list[torch.fx.Node]]:
    """A call for the core, and the tensors that it is given. Raises CompileRefused."""
    target: Any = node.target
    schema = target._schema
    says = f"the forward calls the custom operator {target}"
    if schema.is_mutable:
        raise CompileRefused(f"{says}, which writes its arguments")
    if any(value.alias_info is not None for value in schema.returns):
        raise CompileRefused(f"{says}, which returns what it is given")
    given: list[torch.fx.Node] = []
    arguments: list[dict[str, Any]] = []
    values = [*node.args, *(None for _ in range(len(schema.arguments) - len(node.args)))]
    for argument, value in zip(schema.arguments, values, strict=True):
        at = len(arguments)
        if argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        elif at >= len(node.args):
            value = argument.default_value
        try:
            arguments.append(_argument(argument.real_type, value, given))
        except _Unknown as error:
            raise CompileRefused(f"{says} with {error} for {argument.name}") from error
    value = node.meta.get("val")
    answers = [value] if isinstance(value, torch.Tensor) else value
    if not isinstance(answers, (list, tuple)) or not answers:
        raise CompileRefused(f"{says}, which returns no tensor")
    devices = {tensor.meta["val"].device for tensor in given}
    for answer in answers:
        if not isinstance(answer, torch.Tensor) or not all(
            type(number) is int for number in (*answer.size(), *answer.stride())
        ):
            raise CompileRefused(f"{says}, which returns something else than tensors")
        devices.add(answer.device)
    if len(devices) != 1 or not given:
        raise CompileRefused(f"{says} without tensors, or across devices")
    row = {
        "name": schema.name,
        "overload": schema.overload_name,
        "schema": str(schema),
        "arguments": arguments,
        "tensors": len(given),
        "made_here": [at for at, tensor in enumerate(given) if tensor.op == "call_function"],
        "outputs": [
            {
                "dtype": str(answer.dtype).removeprefix("torch."),
                "sizes": list(answer.size()),
                "strides": list(answer.stride()),
            }
            for answer in answers
        ],
    }
    return row, given


class _Unknown(Exception):
    """A value that the core is not told of."""


def _argument(kind: Any, value: Any, given: list[torch.fx.Node]) -> dict[str, Any]:
    """One argument as the core reads it; its tensors are put behind ``given``."""
    name = type(kind).__name__
    if name == "OptionalType":
        return {"none": True} if value is None else _argument(kind.getElementType(), value, given)
    if value is None:
        return {"none": True}
    if name == "TensorType":
        return {"tensor": _place(value, given)}
    if name == "ListType":
        return _list(kind.getElementType(), value, given)
    return {_SINGLE[name]: _single(name, value)} if name in _SINGLE else _other(kind, value)


def _place(value: Any, given: list[torch.fx.Node]) -> int:
    if not isinstance(value, torch.fx.Node) or not isinstance(value.meta["val"], torch.Tensor):
        raise _Unknown("a number that it computes")
    given.append(value)
    return len(given) - 1


_SINGLE = {"BoolType": "bool", "IntType": "int", "FloatType": "float", "StringType": "string"}
_SINGLE["SymIntType"] = "int"
_PYTHON: dict[str, Any] = {"bool": bool, "int": int, "float": (int, float), "string": str}


def _single(name: str, value: Any) -> Any:
    kind = _SINGLE[name]
    if not isinstance(value, _PYTHON[kind]) or isinstance(value, bool) != (kind == "bool"):
        raise _Unknown(f"a {type(value).__name__}")
    return float(value).hex() if kind == "float" else value


def _list(element: Any, value: Any, given: list[torch.fx.Node]) -> dict[str, Any]:
    if not isinstance(value, (list, tuple)):
        raise _Unknown(f"a {type(value).__name__}")
    name = type(element).__name__
    if name == "TensorType":
        return {"tensors": [_place(one, given) for one in value]}
    if name == "OptionalType" and type(element.getElementType()).__name__ == "TensorType":
        places = [-1 if one is None else _place(one, given) for one in value]
        return {"optional_tensors": places}
    if name not in _SINGLE:
        raise _Unknown(f"a list of {element}")
    return {f"{_SINGLE[name]}s": [_single(name, one) for one in value]}


def _other(kind: Any, value: Any) -> dict[str, Any]:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device) and value.type == "cpu":  # others have numbers
        return {"device": str(value)}
    if type(kind).__name__ == "NumberType" and type(value) in (bool, int, float):
        name = type(value).__name__
        return {name: value.hex() if isinstance(value, float) else value}
    raise _Unknown(f"a {type(value).__name__}")
