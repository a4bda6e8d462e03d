"""Expressions of sizes, as C++ text that is evaluated here too."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

# What the expressions consist of.
EXPRESSION = re.compile(r"[\w\s+\-*/%()<>=!&|?:,.]+")
_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "c10::div_floor_integer": operator.floordiv,
    "std::max": max,
    "std::min": min,
}


def evaluate(text: str, values: Mapping[str, int]) -> int | None:
    """The value of a C++ integer expression; None where it is not known or not understood."""
    try:
        return _value(ast.parse(as_python(text).strip(), mode="eval").body, values)
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError):
        return None


def as_python(text: str) -> str:
    """A C++ integer expression as Python's text, "std::max" as "std_max"."""
    python = re.sub(r"\b(\d+)L+\b", r"\1", text)
    python = re.sub(r"static_cast<int64_t>", "", python)
    for name in _FUNCTIONS:
        python = python.replace(name, name.replace("::", "_"))
    # Of truth values; a comparison binds closer in C++ than a single sign, too.
    python = re.sub(r"&&?", " and ", python)
    return re.sub(r"\|\|?", " or ", python)


_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _value(node: ast.AST, values: Mapping[str, int]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, values)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, values), _value(node.right, values)
        if isinstance(node.op, ast.Mod):  # truncates in C++
            return int(math.fmod(left, right))
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _value(node.left, values), _value(node.comparators[0], values)
        return _OPERATORS[type(node.ops[0])](left, right)
    if isinstance(node, ast.BoolOp):
        parts = [bool(_value(part, values)) for part in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
        left, right = (_value(argument, values) for argument in node.args)
        return _FUNCTIONS[node.func.id.replace("_", "::", 1)](left, right)
    raise TypeError(f"{type(node).__name__} in an expression")
