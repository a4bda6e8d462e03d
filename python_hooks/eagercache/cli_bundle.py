"""`eagercache bundle`: kernels as one signed file, for machines that have no compiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from eagercache import bundle
from eagercache.cli_common import (
    Unusable,
    directory_option,
    json_option,
    print_json,
    size_text,
    store_path,
)

_FILE = click.argument("path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
_KEYS = click.option(
    "--key",
    "keys",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="A public key to trust; may be given more than once.",
)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except bundle.BundleError as error:
        raise Unusable(str(error)) from error


@click.group("bundle")
def bundle_group() -> None:
    """Kernels and decisions of one environment as one signed file."""


@bundle_group.command("keygen")
@json_option
@click.argument("name", type=click.Path(path_type=Path))
def keygen_command(as_json: bool, name: Path) -> None:
    """Makes a pair of Ed25519 keys: NAME.pem to sign with, NAME.pub to trust.

    Keys that OpenSSL makes (openssl genpkey -algorithm ed25519) will do as well.
    """
    with _one_line():
        private, public = bundle.keygen(name)
    if as_json:
        print_json({"private": str(private), "public": str(public)})
    else:
        click.echo(
            f"{private} signs bundles: keep it to yourself; {public} is for who imports them"
        )


@bundle_group.command("export")
@directory_option
@json_option
@click.option(
    "--key", required=True, type=click.Path(path_type=Path), help="The private key to sign with."
)
@_FILE
def export_command(directory: Path | None, as_json: bool, key: Path, path: Path) -> None:
    """Writes all kernels and decisions of this environment into FILE."""
    with _one_line():
        counts = bundle.export(path, store=store_path(directory), key=key)
    if as_json:
        print_json({name: counts[name] for name in ("kernels", "decisions", "bytes")})
    else:
        click.echo(
            f"{path}: {counts['kernels']} kernels, {counts['decisions']} decisions for native, "
            f"{size_text(counts['bytes'])}"
        )


@bundle_group.command("import")
@directory_option
@json_option
@_KEYS
@_FILE
def import_command(
    directory: Path | None, as_json: bool, keys: tuple[Path, ...], path: Path
) -> None:
    """Checks all of FILE, then takes its kernels and decisions into the store.

    Signature, entries, objects and the fields of the environment that kernels meet when they run
    are checked before anything is written. No compiler is needed, here or later. What the store
    has stays.
    """
    with _one_line():
        info = bundle.import_into(path, store=store_path(directory), keys=keys)
    if as_json:
        print_json(info.as_dict())
    else:
        decisions = len(info.entries) - info.kernels
        click.echo(
            f"{info.kernels} kernels and {decisions} decisions for native; "
            f"{info.present} of them were there"
        )


@bundle_group.command("verify")
@json_option
@_KEYS
@_FILE
def verify_command(as_json: bool, keys: tuple[Path, ...], path: Path) -> None:
    """Checks all of FILE and whether this machine can use it. Exit code 1 when it cannot."""
    with _one_line():
        info = bundle.verify(path, keys=keys)
    if as_json:
        print_json(info.as_dict())
    else:
        decisions = len(info.entries) - info.kernels
        click.echo(f"signed by {info.signer}")
        click.echo(f"{info.kernels} kernels and {decisions} decisions for native, all intact")
        for field, theirs, ours in info.mismatches:
            click.echo(f"{field}: {theirs} in the bundle, {ours} here")
    if info.mismatches:
        sys.exit(1)
