"""Python 3.12.1 compiles some comprehensions wrongly, which every other Python takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("python_hooks", "cmake", "scripts", "tests/matrix")
INLINED = (ast.ListComp, ast.SetComp, ast.DictComp)


def names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {
        name.id
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, context)
    }


def misread(text: str) -> Iterator[str]:
    """Names of a module that a comprehension reads and another one of the function goes through.

    Where the first has two loops, 3.12.1 takes the name for that local variable.
    """
    tree = ast.parse(text)
    known = {
        node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    } | set().union(*(names(node, ast.Store) for node in tree.body if isinstance(node, ast.Assign)))
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        parts = [node for node in ast.walk(function) if isinstance(node, INLINED)]
        gone_through = [
            set().union(*(names(loop.target, ast.Store) for loop in part.generators))
            for part in parts
        ]
        for place, part in enumerate(parts):
            own = gone_through[place]
            others = set().union(*gone_through[:place], *gone_through[place + 1 :])
            read = names(part, ast.Load) - own
            yield from (f"{function.name}: {name}" for name in sorted(read & others & known))


def test_no_comprehension_goes_through_a_name_that_another_one_calls() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {what}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for what in misread(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_what_the_matrix_once_did_is_seen() -> None:
    text = """
def row(x):
    return [x]

def main(table):
    versions = [row.torch for row in table]
    return [cell for version in versions for cell in row(version)]
"""
    assert list(misread(text)) == ["main: row"]
    assert list(misread(text.replace("row.torch for row in", "each.torch for each in"))) == []
