"""Folders are layers: which may import which stands in one table, in ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python_hooks" / "eagercache"
TOP = "(top)"

# Imported inside of functions: for start-up time, or since few processes need it.
LATE = {
    "ahead": {"ahead"},  # without a cluster nothing of one
    # decomposition: only for an error's text; a torch that was tried needs nothing of the other
    "base": {"base", "base.untried"},
    "callables": {"callables"},  # function_transfer imports cloudpickle
    "cli": {
        *("ahead", "base", "calls", "cli", "cli.estimates", "cli.reports", "deploy"),
        *("cli.diagnoses", "frontend", "remote", "runtime", "service", "worker.validation"),
    },
    "cli.diagnoses": {"cli.diagnoses"},  # without remotes nothing of them is imported
    "cli.reports": {"base", "frontend", "runtime"},  # a process that reports has them by then
    "deploy": {"base", "callables", "deploy"},  # an artifact opens without what exports it
    "frontend": {"callables", "modules"},  # where nobody asked for modules or operators
    "modules": {"callables"},
    "remote": {"remote"},  # one kind of place, and not the others
    "runtime": {"callables", "remote", "service"},  # a process without a miss needs no service
    "service": {"remote"},  # likewise
    "worker": {"base", "worker.inductor", "worker.jobs", "worker.timing"},  # ready before Inductor
    "worker.cuda": {"worker.compat"},
}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if "_site" not in path.parts}


def folder_of(module: str) -> str:
    if FILES.get(module, PACKAGE).name == "__init__.py":
        return module or TOP
    return module.rpartition(".")[0] or TOP


def modules_of(node: ast.ImportFrom | ast.Import) -> Iterator[str]:
    """The modules of this package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.level == 0, "imports are absolute"
        names = [
            f"{node.module}.{alias.name}"
            if f"{node.module}.{alias.name}".removeprefix("eagercache.") in FILES
            else str(node.module)
            for alias in node.names
        ]
    for name in names:
        short = name.removeprefix("eagercache").lstrip(".")
        if name.startswith("eagercache.") and short in FILES:
            yield short


def imports(module: str) -> Iterator[tuple[str, bool, bool]]:
    """(module, for annotations alone, inside of a function) of each import."""

    def walk(node: ast.AST, typing: bool, late: bool) -> Iterator[tuple[str, bool, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                yield from ((name, typing, late) for name in modules_of(child))
            yield from walk(
                child,
                typing
                or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)),
                late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)),
            )

    yield from walk(ast.parse(FILES[module].read_text()), False, False)


def table() -> dict[str, set[str]]:
    """What each folder may import, out of ARCHITECTURE.md. A folder may import itself."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition("## Layers of Python\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.()]+)` \|[^|]*\| ([^|]*) \|$", section, re.M)
    assert rows, "ARCHITECTURE.md has no table of layers"
    return {folder: set(re.findall(r"`([\w.()]+)`", names)) for folder, names in rows}


def test_each_folder_imports_only_what_the_table_lets_it() -> None:
    allowed = table()
    wrong = [
        f"{module} imports {name}"
        for module in FILES
        if folder_of(module) != TOP  # what `import eagercache` gives, and __main__.py
        for name, _, _ in imports(module)
        if folder_of(name) not in allowed[folder_of(module)] | {folder_of(module), TOP}
    ]
    assert wrong == []
    assert set(allowed) == {folder_of(module) for module in FILES} - {TOP}


def test_the_table_points_one_way_and_says_no_more_than_is_needed() -> None:
    allowed = table()
    order = list(allowed)
    for folder, names in allowed.items():
        assert all(order.index(name) < order.index(folder) for name in names), folder
    used = defaultdict(set)
    for module in FILES:
        used[folder_of(module)] |= {folder_of(name) for name, _, _ in imports(module)}
    unused = {f"{a} -> {b}" for a, names in allowed.items() for b in names - used[a]}
    assert unused == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {name for name, typing, _ in imports(module) if not typing and name != module}
        for module in FILES
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in graph[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


def test_what_is_imported_late_is_listed() -> None:
    late = {
        (folder_of(module), folder_of(name))
        for module in FILES
        for name, typing, inside in imports(module)
        if inside and not typing
    }
    assert late == {(folder, name) for folder, names in LATE.items() for name in names}


def test_the_key_holds_all_that_a_worker_imports() -> None:
    from eagercache.base.environment import SOURCE_FOLDERS

    jobs = re.findall(r'"(?:eagercache\.)?([\w.]+):\w+"', FILES["worker.jobs.kinds"].read_text())
    known = {"worker.main", *(name if "." in name else f"worker.jobs.{name}" for name in jobs)}
    assert known <= set(FILES)
    left = sorted(known)
    while left:
        new = {name for name, typing, _ in imports(left.pop()) if not typing} - known
        known |= new
        left += sorted(new)
    outside = {name for name in known if name.partition(".")[0] not in SOURCE_FOLDERS}
    assert outside == {"version"}  # a field of its own


def test_no_folder_is_a_heap() -> None:
    counts = defaultdict(int)
    for path in FILES.values():
        counts[path.parent] += 1
    assert max(counts.values()) <= 25
