"""Groups of commands: bad usage in one line, commands that are imported when they are asked for."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from eagercache.cli.common import Unusable, Wish

# What a group without a command raises to print its help; click has it since 8.2.
_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
# Commands whose standard output is a program's, and those that are followed by a program too.
_OF_PROGRAMS = ("run", "record", "estimate")
_BEFORE_PROGRAMS = (*_OF_PROGRAMS, "compare", "bisect")


class OneLine(click.Group):
    """Commands whose bad usage is told in one line, without the usage before it."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Runs the command line."""
        words = list(sys.argv[1:] if args is None else args)
        name = next((word for word in words if not word.startswith("-")), "")
        Wish.err = name in _OF_PROGRAMS
        # Bad usage is found before options are read. What follows a program is the program's.
        Wish.json = "--json" in words and (
            name not in _BEFORE_PROGRAMS or "--json" in self._before_program(name, words)
        )
        return super().main(words, *more, **extra)

    def _before_program(self, name: str, words: Sequence[str]) -> list[str]:
        """The words of a command that runs a program which are options of its own."""
        command = self.get_command(click.Context(self, resilient_parsing=True), name)
        with_value = {
            option
            for parameter in (command.params if command is not None else ())
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for option in parameter.opts
        }
        own: list[str] = []
        rest = iter(words[words.index(name) + 1 :])
        for word in rest:
            if not word.startswith("-") or word in ("-m", "-c", "-", "--"):
                break
            own.append(word)
            if word in with_value:
                next(rest, None)
        return own

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Reads this command's own options."""
        with _one_line():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Reads a command's options and runs it."""
        with _one_line(ctx):
            return super().invoke(ctx)


class Lazy(OneLine):
    """Commands of other modules, which are imported when one of them is asked for.

    ``places``: by name of the command the module and what it is called there. ``elsewhere``: what
    people look for here, and where it is.
    """

    def __init__(
        self,
        *args: Any,
        places: Mapping[str, tuple[str, str]],
        elsewhere: Mapping[str, str],
        **extra: Any,
    ) -> None:
        super().__init__(*args, **extra)
        self.places, self.elsewhere = places, elsewhere

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command. What it raises where it could not work is one line."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if reason := _not_the_commands_fault(error):
                raise Unusable(reason) from error
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, for help."""
        return sorted({*self.places, *super().list_commands(ctx)})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands, each with its first sentence, which click would cut off."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(limit=1000))
                    for name in self.list_commands(ctx)
                    if (command := self.get_command(ctx, name)) is not None
                ]
            )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        if cmd_name in self.elsewhere:
            place = self.elsewhere[cmd_name]
            raise click.UsageError(f"No such command {cmd_name!r}, but `eagercache {place}`", ctx)
        if cmd_name not in self.places:
            found = super().get_command(ctx, cmd_name)
            near = difflib.get_close_matches(cmd_name, self.list_commands(ctx), n=1)
            if found is None and near and not ctx.resilient_parsing:
                raise click.UsageError(
                    f"No such command {cmd_name!r}. Did you mean {near[0]}?", ctx
                )
            return found
        module, attribute = self.places[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


def _not_the_commands_fault(error: Exception) -> str:
    """Of what a command raised: that nobody can read its output, or that there is no torch."""
    if isinstance(error, OSError) and error.errno in _NOT_WRITTEN and error.filename is None:
        with contextlib.suppress(OSError):  # what is left in buffers is not tried again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # type: ignore[union-attr]
        return f"standard output cannot be written: {error.strerror}"
    from eagercache.base import load

    return load.refusal


_NOT_WRITTEN = (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)


@contextlib.contextmanager
def _one_line(outer: click.Context | None = None) -> Iterator[None]:
    try:
        yield
    except _HELP as error:
        click.echo(error.format_message())
        raise click.exceptions.Exit(0) from error
    except click.UsageError as error:
        command = "eagercache"
        if error.ctx is not None:
            command = error.ctx.command_path
        elif outer is not None and outer.invoked_subcommand:
            command = f"{outer.command_path} {outer.invoked_subcommand}"
        message = " ".join(error.format_message().split()).removesuffix(".")
        link = " See" if message.endswith("?") else "; see"
        raise Unusable(f"{message}{link} `{command} --help`") from error
