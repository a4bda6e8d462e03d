"""Which folder of the C++ sources includes which: the table "Layers of C++" of ARCHITECTURE.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LAYERS = ["kernel_cache", "guards", "dispatcher", "cpp_api", "python_hooks"]
PUBLIC = "cpp_api/include/"  # on the include path itself
GENERATED = {"cpp_api/build_facts.h"}
MOST_FILES = 25

SOURCES = sorted(
    str(path.relative_to(ROOT))
    for layer in LAYERS
    for path in (ROOT / layer).rglob("*")
    if path.suffix in (".cc", ".h")
)


def folder_of(source: str) -> str:
    return source.rpartition("/")[0]


def read_table(text: str) -> dict[str, list[str]]:
    """Each folder of the table, in its order, with what it may include."""
    section = text.partition("## Layers of C++\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    assert len({folder for folder, _ in rows}) == len(rows), "a folder has two rows"
    return {folder: re.findall(r"`([^`]+)`", allowed) for folder, allowed in rows}


def read_includes(source: str) -> list[str]:
    """What a file includes of this repository."""
    found = []
    text = (ROOT / source).read_text()
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE):
        path = PUBLIC + name if (ROOT / PUBLIC / name).exists() else name
        if path not in GENERATED:
            found.append(path)
    return found


def cycle_of(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Nodes that lead back to the first of them; empty where there is no cycle."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        path.append(node)
        for other in graph.get(node, ()):
            if found := visit(other):
                return found
        path.pop()
        done.add(node)
        return []

    return next((found for node in graph if (found := visit(node))), [])


def violations(table: Mapping[str, list[str]], includes: Mapping[str, list[str]]) -> list[str]:
    """The includes that the table does not allow."""
    order = list(table)
    found = []
    for source, names in includes.items():
        folder = folder_of(source)
        above = order[: order.index(folder)]
        allowed = {other for row in table[folder] for other in above if fnmatch(other, row)}
        found += [
            f"{source} includes {name}"
            for name in names
            if folder_of(name) not in {folder, *allowed}
        ]
    return found


TABLE = read_table((ROOT / "ARCHITECTURE.md").read_text())
INCLUDES = {source: read_includes(source) for source in SOURCES}


def test_every_folder_with_sources_has_a_row_and_the_other_way_round() -> None:
    assert set(TABLE) == {folder_of(source) for source in SOURCES}


def test_rows_name_folders_above_them_that_are_included() -> None:
    order = list(TABLE)
    for folder, rows in TABLE.items():
        above = order[: order.index(folder)]
        used = {folder_of(n) for s in SOURCES if folder_of(s) == folder for n in INCLUDES[s]}
        for row in rows:
            assert any(fnmatch(other, row) for other in above), f"{folder}: {row} is not above it"
            assert any(fnmatch(other, row) for other in used), f"{folder}: {row} is not included"


def test_includes_are_paths_from_the_root() -> None:
    known = set(SOURCES)
    assert [f"{s}: {n}" for s in SOURCES for n in INCLUDES[s] if n not in known] == []


def test_folders_include_what_the_table_allows() -> None:
    assert violations(TABLE, INCLUDES) == []


def test_no_folder_and_no_file_includes_itself_in_a_circle() -> None:
    folders: dict[str, set[str]] = {}
    for source, names in INCLUDES.items():
        folder = folder_of(source)
        folders.setdefault(folder, set()).update({folder_of(name) for name in names} - {folder})
    assert cycle_of(folders) == []
    assert cycle_of(INCLUDES) == []


def test_no_folder_has_too_many_sources() -> None:
    sizes = {folder: sum(folder_of(s) == folder for s in SOURCES) for folder in TABLE}
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}


def test_the_checks_see_what_they_are_for() -> None:
    table = read_table(
        "## Layers of C++\n| `a` | |\n| `b/x` | `a` |\n| `c` | `b/*` |\n\n## Next\n| `d` | |"
    )
    assert list(table) == ["a", "b/x", "c"]
    fine = {"a/1.h": ["a/2.h"], "b/x/1.h": ["a/1.h"], "c/1.cc": ["b/x/1.h"]}
    assert violations(table, fine) == []
    assert violations(table, {"a/1.h": ["b/x/1.h"]}) == ["a/1.h includes b/x/1.h"]
    assert violations(table, {"c/1.cc": ["a/1.h"]}) == ["c/1.cc includes a/1.h"]
    assert cycle_of({"1": ["2"], "2": ["3"], "3": ["2"]}) == ["2", "3"]
    assert cycle_of({"1": ["2", "3"], "2": ["3"], "3": []}) == []
