"""Whole numbers that are computed from a call's open sizes, as a launch plan for CUDA holds them.

An expression is the steps of a stack machine, which the hook takes for each call
(dispatcher/plans/size_expression.h says what they are): Inductor's text is read into them, be it
Python's or C++'s. The same steps are taken here to find out which calls a kernel admits.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eagercache.worker.inductor.size_expressions import as_python
from eagercache.worker.inductor.wrapper_statements import NotUnderstood

# SizeExpression's limits.
MAX_STEPS = 256
MAX_DEPTH = 16
_LARGEST = 1 << 63


@dataclass(frozen=True)
class Expression:
    """Steps in postfix: numbers, "s0" for the first open size, and operators."""

    steps: tuple[int | str, ...]

    def __add__(self, other: Size) -> Size:
        return _both("+", self, other)

    def __radd__(self, other: int) -> Size:
        return _both("+", other, self)

    def __sub__(self, other: Size) -> Size:
        return _both("-", self, other)

    def __mul__(self, other: Size) -> Size:
        return _both("*", self, other)

    def __rmul__(self, other: int) -> Size:
        return _both("*", other, self)


Size = int | Expression

# What the machine does with the two values on top. "<=" and its like make 1 or 0.
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "max": max,
    "min": min,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    "and": lambda a, b: int(a != 0 and b != 0),
    "or": lambda a, b: int(a != 0 or b != 0),
}
_NEUTRAL = {"+": 0, "-": 0, "*": 1, "//": 1}
_BINARY = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.And: "and",
    ast.Or: "or",
}
_TURNED = {ast.Gt: "<", ast.GtE: "<="}
# Of Python's text and C++'s.
_FUNCTIONS = {
    "max": "max",
    "min": "min",
    "std_max": "max",
    "std_min": "min",
    "c10_div_floor_integer": "//",
}


def open_size(index: int) -> Expression:
    """The value of the pattern's symbol of that index."""
    return Expression((f"s{index}",))


def at_most(left: Size, right: Size) -> Size:
    """Whether it is: a condition, or 1 or 0 where that is known."""
    return 1 if left == right else _both("<=", left, right)


def equal(left: Size, right: Size) -> Size:
    """The same of equal numbers."""
    return 1 if left == right else _both("==", left, right)


def largest(sizes: Sequence[Size]) -> Size:
    """The largest of them; 1 of none."""
    found: Size = 1
    for size in sizes:
        found = size if found in (1, size) else _both("max", found, size)
    return found


def _both(sign: str, left: Size, right: Size) -> Size:
    if isinstance(left, int) and isinstance(right, int):
        try:
            return _OPERATORS[sign](left, right)
        except ZeroDivisionError as error:
            raise NotUnderstood("a division by zero") from error
    if right == _NEUTRAL.get(sign):
        return left
    if left == _NEUTRAL.get(sign) and sign in ("+", "*"):
        return right
    return Expression(steps_of(Expression((*steps_of(left), *steps_of(right), sign))))


def steps_of(size: Size) -> tuple[int | str, ...]:
    """As the plan's text has them. Raises NotUnderstood for more than the hook takes."""
    steps = size.steps if isinstance(size, Expression) else (int(size),)
    depth = deepest = 0
    for step in steps:
        depth += -1 if step in _OPERATORS else 1
        deepest = max(deepest, depth)
    large = any(isinstance(step, int) and abs(step) >= _LARGEST for step in steps)
    if len(steps) > MAX_STEPS or deepest > MAX_DEPTH or large:
        raise NotUnderstood("a long expression of sizes")
    return steps


def value_of(size: Size, values: Sequence[int]) -> int | None:
    """What it is where the open sizes have these values; None where the hook finds none."""
    stack: list[int] = []
    for step in steps_of(size):
        if isinstance(step, int):
            stack.append(step)
        elif step in _OPERATORS:
            right, left = stack.pop(), stack.pop()
            if right == 0 and step in ("//", "%"):
                return None
            stack.append(_OPERATORS[step](left, right))
            if not -_LARGEST <= stack[-1] < _LARGEST:
                return None
        else:
            stack.append(values[int(step[1:])])
    return stack[0]


def read_size(text: str | ast.expr, known: Mapping[str, Size]) -> Size:
    """An expression of ``known`` names, in Python's or C++'s text. Raises NotUnderstood."""
    if isinstance(text, ast.expr):
        return _read(text, known)
    try:
        return _read(ast.parse(as_python(text).strip(), mode="eval").body, known)
    except SyntaxError as error:
        raise NotUnderstood(f"expression {text[:60]}") from error


def _read(node: ast.expr, known: Mapping[str, Size]) -> Size:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _both("-", 0, _read(node.operand, known))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _read(node.left, known), _read(node.right, known)
        return _both(_BINARY[type(node.op)], left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _read(node.left, known), _read(node.comparators[0], known)
        kind = type(node.ops[0])
        if kind in _TURNED:
            return _both(_TURNED[kind], right, left)
        if kind in _BINARY:
            return _both(_BINARY[kind], left, right)
    if isinstance(node, ast.BoolOp):
        return _of_all(_BINARY[type(node.op)], node.values, known)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        sign = _FUNCTIONS.get(node.func.id)
        if sign is not None and len(node.args) >= 2:
            return _of_all(sign, node.args, known)
    raise NotUnderstood(f"expression {ast.unparse(node)[:60]}")


def _of_all(sign: str, nodes: Sequence[ast.expr], known: Mapping[str, Size]) -> Size:
    found = _read(nodes[0], known)
    for node in nodes[1:]:
        found = _both(sign, found, _read(node, known))
    return found
