"""How long files and functions may be, and how many files a folder may hold (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[3]
MOST_FILES = 25  # of a folder
MOST_LINES = 400  # of a file
MOST_LINES_OF_TESTS = 500
# Of a function. Six in C++ are longer than CONTRIBUTING.md wants; two of them list bindings.
MOST_LINES_OF_FUNCTIONS = {".py": 60, ".cc": 80, ".h": 80}

FOLDERS = (
    *("bench", "cmake", "cpp_api", "dispatcher", "docs", "examples", "guards", "kernel_cache"),
    *("python_hooks", "scripts", "tests"),
)
ENDINGS = {".cc", ".cmake", ".cu", ".h", ".py", ".sh"}


def is_code(path: Path) -> bool:
    if not path.is_file() or {"__pycache__", "objects"} & set(path.parts):
        return False
    return path.suffix in ENDINGS or (not path.suffix and path.read_bytes()[:2] == b"#!")


CODE = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if is_code(path)]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_test(path: Path) -> bool:
    return named(path).startswith("tests/")


def functions_of_python(text: str) -> Iterator[tuple[str, int]]:
    """Each function's name and lines; its docstring, which is a contract, does not count."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                first = node.body[0]
                lines -= (first.end_lineno or 0) - first.lineno + 1
            yield node.name, lines


# Where clang-format has been, a function begins at the margin or, inside of a class, two columns
# from it, and ends with the next brace that stands there alone.
BEGINS = re.compile(
    r"^(?P<margin>(?:  )?)(?!namespace|extern|//|\#)"
    r"(?P<head>[A-Za-z_~:\[].*?(?:\n(?P=margin) .*?)*?) \{$",
    re.MULTILINE,
)


def functions_of_cpp(text: str) -> Iterator[tuple[str, int]]:
    for found in BEGINS.finditer(text):
        head, margin = found["head"], found["margin"]
        if "(" not in head or re.match(r"(struct|class|enum|union|if|for|while|switch)\b", head):
            continue
        end = re.compile(rf"^{margin}\}}", re.MULTILINE).search(text, found.end())
        if end is not None:
            name = re.search(r"([\w:~]+)\(", head)
            lines = text.count("\n", found.start(), end.end()) + 1
            yield name[1] if name else head, lines


def test_functions_fit_on_a_screen() -> None:
    readers = {".py": functions_of_python, ".cc": functions_of_cpp, ".h": functions_of_cpp}
    long = {
        f"{named(path)}: {name}": lines
        for path in CODE
        if path.suffix in readers and not is_test(path)
        for name, lines in readers[path.suffix](path.read_text())
        if lines > MOST_LINES_OF_FUNCTIONS[path.suffix]
    }
    assert long == {}


def test_files_do_one_thing() -> None:
    long = {
        named(path): lines
        for path in CODE
        if (lines := len(path.read_text().splitlines()))
        > (MOST_LINES_OF_TESTS if is_test(path) else MOST_LINES)
    }
    assert long == {}


def test_no_folder_is_a_heap() -> None:
    counts = Counter(named(path.parent) for path in CODE)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_lengths_are_seen() -> None:
    python = 'def a():\n    """b\n\n    c\n    """\n    def d():\n        pass\n    return d\n'
    assert dict(functions_of_python(python)) == {"a": 4, "d": 2}
    cpp = (
        "namespace x {\n\nint a(int b,\n      int c) {\n  if (b) {\n    return c;\n  }\n}\n\n"
        "struct S {\n  void d() {\n    e();\n  }\n};\n\nTEST(A, B) {\n}\n\n}  // namespace x\n"
    )
    assert dict(functions_of_cpp(cpp)) == {"a": 6, "d": 3, "TEST": 2}
    assert len(CODE) > 500
