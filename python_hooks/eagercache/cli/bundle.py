"""`eagercache bundle`: kernels as one signed file, for machines that have no compiler.

Or a module with its kernels and weights (deploy.py).
"""

from __future__ import annotations

import datetime
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from eagercache.calls.texts import counted
from eagercache.cli.common import (
    Unusable,
    directory_option,
    environment_text,
    json_option,
    print_json,
    read_expiry,
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


_REVOKED = click.option(
    "--revoked",
    type=click.Path(path_type=Path),
    help="A list of keys, bundles and artifacts that are not to be used any more, one a line: the "
    "64 digits that `verify` prints. EAGERCACHE_REVOKED if not given.",
)


@contextmanager
def _one_line() -> Iterator[None]:
    from eagercache.ahead import bundle
    from eagercache.deploy.errors import DeployError

    try:
        yield
    except (bundle.BundleError, DeployError) as error:
        raise Unusable(str(error)) from error


@click.group("bundle")
def bundle_group() -> None:
    """Kernels and decisions of one environment, or a module with its weights, as a signed file."""


@bundle_group.command("keygen")
@json_option
@click.argument("name", type=click.Path(path_type=Path))
def keygen_command(as_json: bool, name: Path) -> None:
    """Makes a pair of Ed25519 keys: NAME.pem to sign with, NAME.pub to trust.

    Keys that OpenSSL makes (openssl genpkey -algorithm ed25519) will do as well.
    """
    from eagercache.ahead import bundle

    with _one_line():
        private, public = bundle.keygen(name)
        identity = bundle.key_id(public)
    if as_json:
        print_json({"private": str(private), "public": str(public), "id": identity})
    else:
        click.echo(
            f"{private} signs bundles: keep it to yourself; {public} is for who imports them. "
            f"Its id, by which it can be revoked, is {identity}"
        )


@bundle_group.command("export")
@directory_option
@json_option
@click.option(
    "--key", required=True, type=click.Path(path_type=Path), help="The private key to sign with."
)
@click.option(
    "--with-weights",
    "source",
    metavar="FILE.py:FUNCTION",
    help="Write the module that FUNCTION() returns, as (module, args) or (module, args, kwargs) of "
    "one call, with its weights, instead of a cache's kernels. Also PACKAGE.MODULE:FUNCTION.",
)
@click.option(
    "--open",
    "open_sizes",
    metavar="INPUT:DIMENSION",
    multiple=True,
    help="With --with-weights: a size that is left open; may be given more than once.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="With --with-weights: torch's threads in the compiled code; those of this process if not "
    "given.",
)
@click.option(
    "--expires",
    metavar="WHEN",
    callback=read_expiry,
    help="When FILE stops to be of use: a day (2027-01-31, its beginning in UTC) or days from now "
    "(90d). Never if not given.",
)
@_FILE
def export_command(
    directory: Path | None,
    as_json: bool,
    key: Path,
    source: str | None,
    open_sizes: tuple[str, ...],
    threads: int | None,
    expires: datetime.datetime | datetime.timedelta | None,
    path: Path,
) -> None:
    """Writes all kernels and decisions of this environment into FILE.

    With --with-weights one module: compiled, compared with its forward, stored with its weights.
    `eagercache.load_module` and the C++ library open such a file; it is of no use to `import`.
    """
    if source is not None:
        options = {"open_sizes": _open_sizes(open_sizes), "threads": threads, "expires": expires}
        _export_module(source, path, key, options, as_json)
        return
    if open_sizes or threads is not None:
        raise Unusable("--open and --threads are for --with-weights")
    from eagercache.ahead import bundle

    with _one_line():
        counts = bundle.export(path, store=store_path(directory), key=key, expires=expires)
    if as_json:
        shown = ("kernels", "decisions", "bytes", "digest")
        print_json({name: counts[name] for name in shown})
    else:
        click.echo(
            f"{path}: {counted(counts['kernels'], 'kernel')}, "
            f"{counted(counts['decisions'], 'decision')} for native, "
            f"{size_text(counts['bytes'])}"
        )


def _export_module(
    source: str, path: Path, key: Path, options: Mapping[str, Any], as_json: bool
) -> None:
    from eagercache.deploy.export import export_module

    module, args, kwargs = _made_by(source)
    with _one_line():
        made = export_module(module, args, kwargs, path=path, key=key, **options)
    if as_json:
        print_json(
            {
                "bytes": made.bytes,
                "constants": made.constants,
                "folded": made.folded,
                "numerics": made.numerics,
                "native_ns": made.native_ns,
                "kernel_ns": made.kernel_ns,
                "proved_sizes": list(made.proved_sizes),
            }
        )
    else:
        click.echo(
            f"{path}: {counted(made.constants, 'constant')}, {made.folded} of them folded, "
            f"{size_text(made.bytes)}; {made.numerics}, x{made.native_ns / made.kernel_ns:.2f} of "
            "the module's own forward"
        )


def _open_sizes(texts: Sequence[str]) -> dict[str, list[int]]:
    sizes: dict[str, list[int]] = {}
    for text in texts:
        name, _, dimension = text.rpartition(":")
        if not name or not dimension.isdigit():
            raise Unusable(f"--open {text}: use INPUT:DIMENSION, as x:0")
        sizes.setdefault(name, []).append(int(dimension))
    return sizes


def _made_by(source: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the user's function returns: module, args, kwargs."""
    place, _, name = source.rpartition(":")
    if not place or not name:
        raise Unusable(f"--with-weights {source}: use FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
    file = Path(place)
    if file.suffix == ".py":
        if not file.is_file():
            raise Unusable(f"there is no file {place}")
        # By its name, so that a compile worker finds its classes too.
        sys.path.insert(0, str(file.absolute().parent))
        place = file.stem
    else:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(place), name)()
    except Exception as error:
        raise Unusable(f"{source}: {type(error).__name__}: {error}") from error
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[1], (tuple, list)):
        kwargs = made[2] if len(made) == 3 else {}
        if isinstance(kwargs, Mapping):
            return made[0], tuple(made[1]), dict(kwargs)
    raise Unusable(f"{source} must return (module, args) or (module, args, kwargs)")


@bundle_group.command("import")
@directory_option
@json_option
@_KEYS
@_REVOKED
@_FILE
def import_command(
    directory: Path | None, as_json: bool, keys: tuple[Path, ...], revoked: Path | None, path: Path
) -> None:
    """Checks all of FILE, then takes its kernels and decisions into the store.

    Signature, entries, objects and the fields of the environment that kernels meet when they run
    are checked before anything is written. No compiler is needed, here or later. What the store
    has stays.
    """
    from eagercache.ahead import bundle
    from eagercache.deploy import artifact

    if artifact.is_artifact(path):
        raise Unusable(f"{path} is a module with its weights: open it with eagercache.load_module")
    with _one_line():
        info = bundle.import_into(path, store=store_path(directory), keys=keys, revoked=revoked)
    if as_json:
        print_json(info.as_dict())
    else:
        decisions = len(info.entries) - info.kernels
        click.echo(
            f"{counted(info.kernels, 'kernel')} and {counted(decisions, 'decision')} for native; "
            f"{info.present} of them were there"
        )


@bundle_group.command("verify")
@json_option
@_KEYS
@_REVOKED
@_FILE
def verify_command(as_json: bool, keys: tuple[Path, ...], revoked: Path | None, path: Path) -> None:
    """Checks all of FILE and whether this machine can use it. Exit code 1 when it cannot.

    Of a module with its weights every weight is read and compared, too.
    """
    from eagercache.ahead import bundle
    from eagercache.deploy import artifact

    if artifact.is_artifact(path):
        _verify_module(path, keys, revoked, as_json)
        return
    with _one_line():
        info = bundle.verify(path, keys=keys, revoked=revoked)
    if as_json:
        print_json(info.as_dict())
    else:
        decisions = len(info.entries) - info.kernels
        _say_origin(info)
        click.echo(
            f"{counted(info.kernels, 'kernel')} and {counted(decisions, 'decision')} for native, "
            "all intact"
        )
        for field, theirs, ours in info.mismatches:
            click.echo(f"{field}: {theirs} in the bundle, {ours} here")
    if info.mismatches:
        sys.exit(1)


def _say_origin(info: Any) -> None:
    """Who signed a file, how it is called in a list of what is revoked, and when it holds."""
    click.echo(f"signed by {info.signer}")
    click.echo(f"digest {info.digest}")
    made, ends = (
        f"{time:%Y-%m-%d %H:%M} UTC" if time else "" for time in (info.created, info.expires)
    )
    click.echo(
        f"made {made or 'at no known time'}, {f'expires {ends}' if ends else 'never expires'}"
    )


def _verify_module(path: Path, keys: tuple[Path, ...], revoked: Path | None, as_json: bool) -> None:
    from eagercache.deploy import artifact

    with _one_line():
        info = artifact.verify_module(path, keys=keys, revoked=revoked)
    if as_json:
        print_json(info.as_dict())
    else:
        _say_origin(info)
        click.echo(
            f"{info.facts.get('module', 'a module')}: {counted(len(info.constants), 'constant')}, "
            f"{size_text(info.bytes)}, all intact"
        )
        for constant in info.constants:
            dtype = str(constant.dtype).removeprefix("torch.")
            click.echo(f"  {constant.kind:9} {constant.name} {dtype} {list(constant.sizes)}")
        for field, theirs, ours in info.mismatches:
            click.echo(f"{field}: {theirs} in the artifact, {ours} here")
    if info.mismatches:
        sys.exit(1)


@bundle_group.command("push")
@json_option
@_FILE
@click.argument("artifact", metavar="oci://HOST/REPOSITORY[:TAG]")
def push_command(as_json: bool, path: Path, artifact: str) -> None:
    """Puts FILE into an OCI registry, and prints its address by digest.

    Without a TAG it gets this environment's name, so that machines of one kind find it. Credentials
    are those of `docker login` or `oras login`. Needs oras.
    """
    from eagercache.ahead import registry

    with _one_line():
        address = registry.push(path, artifact, _environment_tag())
    print_json({"address": address}) if as_json else click.echo(address)


@bundle_group.command("pull")
@json_option
@click.argument("artifact", metavar="oci://HOST/REPOSITORY[:TAG|@sha256:DIGEST]")
@_FILE
def pull_command(as_json: bool, artifact: str, path: Path) -> None:
    """Writes a registry's bundle into FILE. By digest it is the one that was pushed, or none."""
    from eagercache.ahead import registry

    with _one_line():
        registry.pull(artifact, path, _environment_tag())
    size = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "bytes": size})
    else:
        click.echo(f"{path}, {size_text(size)}; `eagercache bundle import` checks who signed it")


def _environment_tag() -> str:
    from eagercache.remote import catalogue

    return catalogue.environment_id(environment_text())
