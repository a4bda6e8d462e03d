"""What the commands share: errors of one line, stores, tables."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import click

from eagercache.base import config, store_directory
from eagercache.calls.texts import argument_texts

BAD_USAGE = 2


class Wish:
    """What the command that runs was asked for: whether errors are JSON, and on which stream."""

    json = False
    err = False


class _Length(click.FloatRange):
    """A span of time, of which NaN is none: no comparison would hold."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        length = float(super().convert(value, param, ctx))
        if math.isnan(length):
            self.fail(f"{value} is no number.", param, ctx)
        return length


LENGTH = _Length(min=0.0)


class Unusable(click.ClickException):
    """Bad usage, or a store that cannot be opened: one line, exit code 2."""

    exit_code = BAD_USAGE

    def show(self, file: IO[Any] | None = None) -> None:
        """One line on standard error; with --json an object where the command's JSON goes."""
        if Wish.json:
            print_json({"error": self.format_message(), "exit_code": self.exit_code}, err=Wish.err)
        else:
            super().show(file)


class Stopped(Unusable):
    """The user said no, or nothing was found: exit code 1."""

    exit_code = 1


def require_core() -> Any:
    """The extension module; Unusable where it does not fit platform or torch."""
    from eagercache.base import load

    if load.core is None:
        raise Unusable(load.why_unavailable())
    return load.core


def environment_text() -> str:
    """What kernels of this environment are kept under."""
    from eagercache.base import environment

    return environment.environment_text(cxx=config.read_settings().cxx)


def store_path(directory: Path | None) -> Path:
    """The named directory, EAGERCACHE_DIR, or the first default that exists."""
    if directory is not None:
        return directory.absolute()
    settings = config.read_settings()
    if settings.directory is not None:
        return settings.directory.absolute()
    defaults = store_directory.candidates(os.environ, os.getuid())
    return next((path for path in defaults if path.exists()), defaults[0])


def open_store(directory: Path | None, *, read_only: bool, max_bytes: int | None = None) -> Any:
    """The store of `store_path`; Unusable where there is none."""
    module = require_core()
    path = store_path(directory)
    if not path.is_dir():
        raise Unusable(f"there is no store at {path}; name one with --dir or EAGERCACHE_DIR")
    if not store_directory.has_utf8_name(path):
        raise Unusable(f"{str(path)!r} has a name that is not UTF-8; use another one")
    limit = config.read_settings().max_bytes if max_bytes is None else max_bytes
    try:
        return module.Store(str(path), environment_text(), read_only=read_only, max_bytes=limit)
    except module.StoreError as error:
        raise Unusable(f"the store at {path} cannot be used: {error}") from error


def print_json(value: Any, *, err: bool = False) -> None:
    """Prints a value as JSON; ``err``: on standard error, where standard output is a program's."""
    click.echo(json.dumps(value, indent=2, sort_keys=True), err=err)


def entries_as_json(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Entries of a store for `print_json`: see `facts_as_json`."""
    return [{**row, "facts": facts_as_json(row["facts"])} for row in rows]


def facts_as_json(facts: Mapping[str, str]) -> dict[str, Any]:
    """Facts are text: here numbers are numbers, and what is JSON itself is what it says."""
    return {name: _fact(text) for name, text in facts.items()}


# As facts have them: an exponent has its sign, and no digest is that short.
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d+)?(e[+-]\d+)?", re.ASCII)


def _fact(text: str) -> Any:
    if _NUMBER.fullmatch(text):
        number = float(text)
        whole = text.removeprefix("-").isdigit()
        return int(text) if whole else number if math.isfinite(number) else text
    if text[:1] in ("{", "["):
        # A store may hold anything: what could not be printed again stays text.
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
            json.dumps([[[[[[value]]]]]], indent=2, allow_nan=False)  # it is printed deep in a list
            return value
    return text


def size_text(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def microseconds(facts: dict[str, str], name: str) -> str:
    """A time of an entry in microseconds, "" where it has none."""
    try:
        return f"{float(facts[name]) / 1000:.2f}"
    except (KeyError, ValueError):
        return ""


def call_text(facts: dict[str, str]) -> str:
    """A call in one short line: tensors as dtype[sizes], the other arguments by name.

    "" for a text that describes none.
    """
    try:
        return ", ".join(argument_texts(json.loads(facts.get("call", ""))["args"]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""


def table(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; columns are (name, "right" or "")."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table, markup=False)


def directory_option(function: Any) -> Any:
    """`--dir`."""
    return click.option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path),
        help="The store; EAGERCACHE_DIR or the default directory if not given.",
    )(function)


def json_option(function: Any) -> Any:
    """`--json`."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=_wishes_json,
        help="Print JSON, of errors too.",
    )(function)


def _wishes_json(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    Wish.json = value
    return value


def read_expiry(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> datetime.datetime | datetime.timedelta | None:
    """Of an option that says when what is signed stops to be of use."""
    from eagercache.base.signed_file import parse_expiry

    if text is None:
        return None
    try:
        return parse_expiry(text)
    except ValueError:
        raise click.BadParameter("use a day, as 2027-01-31, or days from now, as 90d") from None
