"""The notebooks of examples/ run from top to bottom, and what they show is what their text says.

A notebook is JSON, and its cells are Python. They are run as Jupyter runs them: in order, in one
namespace, the value of a cell's last expression being shown. Jupyter itself would bring twenty
packages to the requirements, and test nothing of ours.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import run_program

NOTEBOOK = Path(__file__).parent.parent.parent.parent / "examples" / "see_modules.ipynb"

RUN = """
import ast
cells = json.loads(open({path!r}).read())["cells"]
names, shown = {{"__name__": "__main__"}}, []
for number, cell in enumerate(cells):
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]), f"cell {{number}}")
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {{number}}", "exec"), names)
    if last is None:
        continue
    value = eval(compile(ast.Expression(last.value), f"cell {{number}}", "eval"), names)
    html = getattr(value, "_repr_html_", None)
    shown.append(html() if html else repr(value))
infos = names["said"].tree
report(shown=shown, hits=[info.hits for info in infos], timed=infos[0].native_ns)
"""


@pytest.fixture
def notebook() -> Path:
    if not NOTEBOOK.exists():
        pytest.skip("no sources beside the package")
    return NOTEBOOK


def test_the_notebook_of_modules_runs_and_shows_what_it_says(notebook: Path, cache: Path) -> None:
    said = run_program(RUN.format(path=str(notebook)), cache, fills=True)
    assert len(said["hits"]) == 8 and all(hits > 0 for hits in said["hits"])
    assert said["timed"] > 0
    table = next(text for text in said["shown"] if "eagercache: modules" in text)
    assert "layers.7" in table and "seconds saved" in table
    assert "module: layers.0 [eagercache " in said["stdout"]  # the profiler's table
    events = next(text for text in said["shown"] if "'aten::var'" in text)
    assert "('eagercache " in events


def test_the_notebook_is_kept_without_outputs(notebook: Path) -> None:
    body = json.loads(notebook.read_text())
    assert body["nbformat"] == 4
    for cell in body["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
