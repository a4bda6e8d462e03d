"""Sphinx's configuration. `make docs` builds build/docs/index.html and fails on any warning.

What code knows is not written down twice: the environment table comes from
`eagercache.base.config`, the command line from its own help, the Python reference from docstrings.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import eagercache
from eagercache.base import config
from eagercache.cli import main as cli

project = "eagercache"
copyright = "the eagercache authors"
version = release = eagercache.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["substitution"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
html_theme = "alabaster"
html_theme_options = {"description": "Compiled kernels for eager PyTorch, call by call"}
html_show_sourcelink = False


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
