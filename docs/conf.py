"""Sphinx's configuration. `make docs` builds build/docs/index.html and fails on any warning.

What code knows is not written down twice: the environment table comes from
`eagercache.base.config`, the command line from its own help, the Python reference from docstrings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import eagercache
from eagercache.base import config
from eagercache.cli import main as cli
from sphinx.application import Sphinx

project = "eagercache"
copyright = "the eagercache authors"
version = release = eagercache.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["substitution"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
html_theme = "furo"
html_title = f"eagercache {version}"
html_show_sourcelink = False

README = Path(__file__).parent.parent / "README.md"


def _readme() -> str:
    """README.md as the first page: its links to pages are this folder's, other files are named."""

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if "://" in target or target.startswith("#"):
            return match[0]
        if target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')})"
        return text if text == target else f"{text}: `{target}`"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, README.read_text(encoding="utf-8"))


def _read_source(app: Sphinx, page: str, text: list[str]) -> None:
    if page == "index":
        app.env.note_dependency(str(README))
        text[0] = text[0].replace("<!-- README.md -->", _readme())


def setup(app: Sphinx) -> None:
    """Has the first page begin with README.md."""
    app.connect("source-read", _read_source)


def _commands() -> Iterator[str]:
    context = click.Context(cli.main, info_name="eagercache")
    yield _help("eagercache", cli.main, context)
    yield from _subcommands("eagercache", cli.main, context)


def _subcommands(title: str, group: click.Group, context: click.Context) -> Iterator[str]:
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        yield _help(f"{title} {name}", command, context)
        if isinstance(command, click.Group):
            below = click.Context(command, info_name=name, parent=context)
            yield from _subcommands(f"{title} {name}", command, below)


def _help(title: str, command: click.Command, parent: click.Context) -> str:
    name = title.removeprefix("eagercache").rpartition(" ")[2] or "eagercache"
    context = click.Context(
        command, info_name=name, parent=parent if name != "eagercache" else None
    )
    return f"## {title}\n\n```text\n{command.get_help(context)}\n```\n"


myst_substitutions = {
    "environment_table": config.environment_table(),
    "commands": "\n".join(_commands()),
    "default_operators": ", ".join(f"`{name}`" for name in eagercache.default_operators()),
}
