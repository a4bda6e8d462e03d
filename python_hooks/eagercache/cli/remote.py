"""`eagercache pull`, `push` and `sync`: a store's entries from remotes, and to them."""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagercache.base import config, signed_file
from eagercache.cli.common import (
    Unusable,
    directory_option,
    environment_text,
    json_option,
    print_json,
    read_expiry,
    require_core,
    size_text,
    store_path,
)

if TYPE_CHECKING:
    from eagercache.remote.entries import Exchange
    from eagercache.remote.tier import Tier
    from eagercache.remote.transfer import OnProgress, Transfer


@dataclass(frozen=True)
class _Named:
    """What a command line names: the store, the remotes, whom to trust, and who signs."""

    directory: Path | None
    urls: tuple[str, ...]
    trust: tuple[Path, ...]
    key: Path | None


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of all three: a `_Named`, ``as_json``, and its own."""

    @functools.wraps(command)
    def called(
        directory: Path | None,
        urls: tuple[str, ...],
        trust: tuple[Path, ...],
        key: Path | None,
        **others: Any,
    ) -> None:
        command(_Named(directory, urls, trust, key), **others)

    for option in (
        click.option(
            "--key",
            type=click.Path(path_type=Path),
            help="The private key to sign with; EAGERCACHE_REMOTE_KEY if not given.",
        ),
        click.option(
            "--trust",
            multiple=True,
            type=click.Path(path_type=Path),
            help="A public key to trust, may be given more than once; EAGERCACHE_REMOTE_TRUST if "
            "not given.",
        ),
        click.option(
            "--remote",
            "urls",
            metavar="URL",
            multiple=True,
            help="A remote, may be given more than once; EAGERCACHE_REMOTE if not given.",
        ),
        json_option,
        directory_option,
    ):
        called = option(called)
    return called


@click.command("pull")
@_options
def pull_command(named: _Named, as_json: bool) -> None:
    """Takes into the store what remotes list for machines like this one.

    Each entry is used when a key that you name has signed it. Exit code 1 when a remote did not
    answer or is not there, or when an entry was refused. Programs that only use kernels
    (`on_miss="native"`) look nothing up by themselves: this is for them.
    """
    from eagercache.remote import transfer

    tiers, exchange = _open(named, sends=False)
    with _progress("pull", as_json) as progress:
        outcome = transfer.pull(tiers, exchange, progress)
    _end(_pulled(outcome), outcome, as_json)


@click.command("push")
@_options
@click.option(
    "--expires",
    metavar="WHEN",
    callback=read_expiry,
    help="When what is sent stops to be of use: a day (2027-01-31, its beginning in UTC) or days "
    "from now (90d). Never if not given.",
)
def push_command(
    named: _Named, as_json: bool, expires: datetime.datetime | datetime.timedelta | None
) -> None:
    """Signs the store's kernels and decisions of this environment, and puts them into remotes.

    What a remote has stays there, unless this machine would refuse it. Exit code 1 when a remote
    did not take something.
    """
    from eagercache.remote import transfer

    try:
        ends = signed_file.seconds_of(expires)
    except ValueError as error:
        raise Unusable(str(error)) from error
    tiers, exchange = _open(named, sends=True)
    with _progress("push", as_json) as progress:
        outcome = transfer.push(tiers, exchange, progress, expires=ends)
    _end(_pushed(outcome), outcome, as_json)


@click.command("sync")
@_options
def sync_command(named: _Named, as_json: bool) -> None:
    """`pull`, then `push`: afterwards the store and the remotes have the same entries."""
    from eagercache.remote import transfer

    tiers, exchange = _open(named, sends=True)
    with _progress("pull", as_json) as progress:
        outcome = transfer.pull(tiers, exchange, progress, may_be_missing=True)
    with _progress("push", as_json) as progress:
        pushed = transfer.push(tiers, exchange, progress)
    outcome.sent = pushed.sent
    outcome.bytes_read += pushed.bytes_read
    outcome.bytes_sent = pushed.bytes_sent
    outcome.errors += [error for error in pushed.errors if error not in outcome.errors]
    _end(f"{_pushed(outcome)}; {_pulled(outcome)}", outcome, as_json)


def _open(named: _Named, *, sends: bool) -> tuple[list[Tier], Exchange]:
    core = require_core()
    from eagercache.remote.entries import Exchange
    from eagercache.remote.plan import Remote, RemoteError, plan_of
    from eagercache.remote.tier import COMMAND_SECONDS, Tier

    settings = config.read_settings()
    try:
        plan = plan_of(Remote(named.urls or settings.remote, named.trust, named.key), settings)
    except RemoteError as error:
        raise Unusable(str(error)) from error
    if plan is None:
        raise Unusable("no remote is named; use --remote URL or EAGERCACHE_REMOTE")
    if sends and plan.key is None:
        raise Unusable("what is sent has to be signed; name a private key with --key")
    path, text = store_path(named.directory), environment_text()
    if sends and not path.is_dir():
        raise Unusable(f"there is no store at {path}; name one with --dir or EAGERCACHE_DIR")
    try:
        store = core.Store(
            str(path),
            text,
            max_bytes=settings.max_bytes,
            allow_untrusted=settings.allow_untrusted,
            revoked=settings.revoked_text,
        )
    except (core.StoreError, UnicodeEncodeError) as error:
        raise Unusable(f"the store at {path} cannot be used: {error}") from error
    tiers = [Tier(url, seconds=COMMAND_SECONDS) for url in plan.urls]
    return tiers, Exchange(store, text, plan)


@contextlib.contextmanager
def _progress(what: str, as_json: bool) -> Iterator[OnProgress]:
    """Draws how far it is, on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    shows = sys.stderr.isatty() and not as_json
    with Progress(console=Console(stderr=True), transient=True, disable=not shows) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _pulled(outcome: Transfer) -> str:
    """How much of the remotes is of use here, and why the rest is not."""
    groups: dict[str, int] = {}
    for one in outcome.unusable:
        fields = "; ".join(
            f"{field} differs ({theirs}, {ours})" for field, theirs, ours in one.fields
        )
        groups[fields] = groups.get(fields, 0) + one.entries
    count = sum(groups.values())
    text = f"{outcome.used} used"
    if outcome.untried:
        text += f" ({outcome.untried} of another kind of machine: tried here before they answer)"
    text += f", {count} unusable here"
    if len(groups) == 1:
        text += f", because {next(iter(groups))}"
    elif groups:
        text += ": " + ", ".join(f"{n} because {fields}" for fields, n in groups.items())
    if outcome.refused:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(outcome.refused.items()))
        text += f"; refused: {kinds}"
    if outcome.missing:
        text += f"; {outcome.missing} listed and not there"
    return text


def _pushed(outcome: Transfer) -> str:
    return f"{outcome.sent} sent ({size_text(outcome.bytes_sent)})"


def _end(text: str, outcome: Transfer, as_json: bool) -> None:
    """Says what came of it; exit code 1 where something is wrong."""
    if as_json:
        print_json(outcome.as_dict())
    else:
        for error in outcome.errors:
            click.echo(error, err=True)
        click.echo(text)
    if outcome.errors or outcome.refused:
        sys.exit(1)
