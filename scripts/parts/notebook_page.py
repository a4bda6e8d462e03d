"""Runs a notebook from top to bottom and writes it as one HTML page, light or dark.

    python scripts/parts/notebook_page.py NOTEBOOK PAGE

It shows what a notebook would: what cells print, and the value of a cell's last expression, as a
table where the value has one.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 1.5rem auto; padding: 0 1rem;
  font: 15px/1.5 system-ui, sans-serif; }
.highlight, pre.out { padding: .6rem .8rem; overflow-x: auto; border-radius: 4px;
  font-size: 13px; }
.highlight { background: #8881; } .highlight pre, pre.out { margin: 0; }
div.value { overflow-x: auto; padding: .4rem .8rem; } td, th { padding: .1rem .6rem; }
"""


def run(cells: list[dict[str, Any]]) -> list[str]:
    """The HTML of each cell; one that raises ends it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [
        _text(cell) if cell["cell_type"] == "markdown" else _code(cell, names) for cell in cells
    ]


def _text(cell: dict[str, Any]) -> str:
    return str(MarkdownIt().render("".join(cell["source"])))


def _code(cell: dict[str, Any], names: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    page = str(highlight(source, PythonLexer(), HtmlFormatter()))
    if text := printed.getvalue():
        page += f'<pre class="out">{escape(text)}</pre>'
    if value is not None:
        table = getattr(value, "_repr_html_", None)
        inside = table() if table else f"<pre>{escape(repr(value))}</pre>"
        page += f'<div class="value">{inside}</div>'
    return page


def main() -> None:
    """Runs the notebook."""
    notebook, page = map(Path, sys.argv[1:])
    body = "\n".join(run(json.loads(notebook.read_text(encoding="utf-8"))["cells"]))
    light = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    dark = HtmlFormatter(style="monokai").get_style_defs(".highlight")
    style = f"{light} @media (prefers-color-scheme: dark) {{ {dark} }} {_STYLE}"
    page.write_text(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><style>{style}</style></head>'
        f"<body>{body}</body></html>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
