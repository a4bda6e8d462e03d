"""Options of the commands that run a program, and what they say as arguments of `enable()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from eagercache.base import config
from eagercache.cli import program
from eagercache.cli.common import Unusable, directory_option

# What follows the program is the program's own.
PROGRAM: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def _with(function: Callable[..., None], *options: Any) -> Callable[..., None]:
    for option in options:
        function = option(function)
    return function


def enable_options(function: Callable[..., None]) -> Callable[..., None]:
    """Which program it is, and which operators of it."""
    return _with(
        function,
        click.option(
            "-m", "module", is_flag=True, help="The program is a module, as of python -m."
        ),
        click.option("--op", "ops", multiple=True, help='Hook only these operators; "all": all.'),
        click.option("--skip", multiple=True, help="Leave these operators alone."),
        click.option(
            "--device", "devices", multiple=True, type=click.Choice(["cpu", "cuda"]), help="Only."
        ),
        directory_option,
    )


def policy_options(function: Callable[..., None]) -> Callable[..., None]:
    """How kernels are made and chosen."""
    return _with(
        function,
        click.option(
            "--training", is_flag=True, help="With --modules: calls that need gradients, too."
        ),
        click.option("--modules", help="Answer whole modules too: auto, or a module class."),
        click.option("--numerics", type=click.Choice(config.NUMERICS), help="accurate by default."),
        click.option("--choose", type=click.Choice(config.CHOOSE), help="faster by default."),
        click.option("--on-miss", type=click.Choice(config.ON_MISS), help="background by default."),
    )


def enable_arguments(
    ops: tuple[str, ...], skip: tuple[str, ...], devices: tuple[str, ...], directory: Path | None
) -> dict[str, Any]:
    """What `enable_options` were given. Unusable where an operator does not exist."""
    arguments: dict[str, Any] = {"skip": list(skip)}
    if ops:
        arguments["ops"] = "all" if "all" in ops else list(ops)
    if devices:
        arguments["devices"] = list(devices)
    if directory is not None:
        arguments["cache_dir"] = str(directory.absolute())
    named = arguments["skip"] + (arguments["ops"] if "all" not in ops and ops else [])
    if named:
        _require_operators(named)
    return arguments


def _require_operators(names: list[str]) -> None:
    """A misspelt operator is an error of the command, not a warning of every process."""
    # Both import torch, which a program without such names need not wait for here.
    from eagercache.base import load, operators

    if load.core is None:
        return  # the program says why, where it runs without
    try:
        operators.resolve_all(names)
    except ValueError as error:
        raise Unusable(str(error)) from error


def policy_arguments(
    on_miss: str | None,
    choose: str | None,
    numerics: str | None,
    modules: str | None,
    training: bool,
) -> dict[str, Any]:
    """What `policy_options` were given. Unusable where they contradict each other."""
    chosen = {"on_miss": on_miss, "choose": choose, "numerics": numerics, "modules": modules}
    arguments: dict[str, Any] = {k: v for k, v in chosen.items() if v is not None}
    if training:
        if modules is None:
            raise Unusable("--training is about whole modules; say which, as with --modules auto")
        arguments["training"] = True
    return arguments


def chosen_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the options of both kinds were given, by the names that click gives them."""
    named = {name: options[name] for name in ("ops", "skip", "devices", "directory")}
    policy = ("on_miss", "choose", "numerics", "modules", "training")
    return {
        **enable_arguments(**named),
        **policy_arguments(**{name: options[name] for name in policy}),
    }


def command_of(words: tuple[str, ...], module: bool) -> list[str]:
    """What to start for the words of a command line. Unusable where there is no such program."""
    rest = list(words[1:] if words[0] == "--" else words)
    if not rest:
        raise Unusable("there is no program; name a script, or a module with -m")
    if rest[0] == "-m" and not module:
        rest, module = rest[1:], True
    if not rest:
        raise Unusable("-m needs the name of a module")
    if rest[:1] == ["-c"] and len(rest) == 1:
        raise Unusable("-c needs a program's text")
    if not module and rest[0].startswith("-") and rest[0] not in ("-c", "-"):
        context = click.get_current_context()
        where = context.command_path
        if any(rest[0] in parameter.opts for parameter in context.command.params):
            raise Unusable(f"{rest[0]} comes too late; name it first; see `{where} --help`")
        raise Unusable(f"there is no option {rest[0]}; see `{where} --help`")
    try:
        return program.command_of(rest, module=module)
    except program.CannotStart as error:
        raise Unusable(str(error)) from error
