"""Reads operator logs: `Operator: aten.NAME.OVERLOAD`, then `cnt: N, ((args), {kwargs})` a call.

`T([sizes], dtype)` or `T([sizes], dtype, stride=(…))` is a tensor; the rest are Python literals.
The logs were made on GPUs by an older PyTorch: overloads that have another name now are found by
their arguments, and for a CPU half precision is read as float32. What such a log does not say (the
thread count, the alignment of data) is taken as in a process that has just started.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import torch

from eagercache.calls.global_state import GlobalState
from eagercache.calls.log_descriptions import (
    Reading,
    TensorNote,
    Unreadable,
    contiguous_strides,
    describe_call,
)
from eagercache.calls.trace import LOG_MARK, Trace, TracedCall, TraceError

_DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "b8": "bool",
    "c32": "complex32",
    "c64": "complex64",
    "c128": "complex128",
}
_CONSTANTS = {"inf": float("inf"), "nan": float("nan")}
_LINE = re.compile(r"cnt: (\d+), (.*)$")


def read(path: Path, reading: Reading, trace: Trace) -> None:
    """Adds the calls of a log to a trace. Raises TraceError for a file that is no log.

    A call that this torch does not have is left out, and said in the trace's problems.
    """
    operator = ""
    left_out: dict[str, int] = {}
    state = GlobalState.current().as_json()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(LOG_MARK):
            operator = line.removeprefix(LOG_MARK).strip()
        elif line.strip():
            found = _LINE.match(line)
            if not found or not operator:
                raise TraceError(f"{path}:{number}: is no line of an operator log: {line[:60]!r}")
            try:
                args, kwargs = _parse_call(found[2])
                described = describe_call(operator, args, kwargs, reading)
            except Unreadable as problem:
                reason = f"{operator}: {problem}"
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            except (SyntaxError, ValueError) as error:
                raise TraceError(f"{path}:{number}: cannot be read: {error}") from error
            trace.add(TracedCall({**described, "state": state}, int(found[1])))
    trace.sections += 1
    trace.problems.extend(f"{path.name}: {text} ({n} lines)" for text, n in left_out.items())


def _parse_call(text: str) -> tuple[list[Any], dict[str, Any]]:
    pair = _value(ast.parse(text, mode="eval").body)
    if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], dict)):
        raise ValueError("a call is ((args), {kwargs})")
    return pair[0], pair[1]


def _value(node: ast.expr) -> Any:
    """A literal; tuples are lists."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Name) and node.id in _DTYPES:
        return getattr(torch, _DTYPES[node.id])
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _of_torch(node.value.id, node.attr)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "T":
        return _tensor(node)
    raise ValueError(f"{ast.unparse(node)!r} is no value of a log")


def _of_torch(module: str, name: str) -> Any:
    value = getattr(torch, name, None) if module == "torch" else None
    if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(f"'{module}.{name}' is no value of a log")  # noqa: TRY004 - it is the data
    return value


def _tensor(node: ast.Call) -> TensorNote:
    sizes = tuple(_value(node.args[0]))
    dtype = str(_value(node.args[1])).removeprefix("torch.")
    strides: tuple[int, ...] | None = None
    for keyword in node.keywords:
        if keyword.arg == "stride":
            strides = tuple(_value(keyword.value))
    if strides is None:
        strides = contiguous_strides(sizes)
    if len(strides) != len(sizes):
        raise ValueError("a tensor has another number of strides than of sizes")
    return TensorNote(sizes, dtype, strides)
