"""The command line: what is in a store, whether it is sound, and why it does not hit.

Every command takes --json. Exit codes: 0 all is well, 1 something was found wrong, 2 bad usage or a
store that cannot be opened (one line says why).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from eagercache import config, store_directory
from eagercache._load import core
from eagercache.version import __version__

BAD_USAGE = 2


class Unusable(click.ClickException):
    """Bad usage, or a store that cannot be opened: one line, exit code 2."""

    exit_code = BAD_USAGE


def _require_core() -> Any:
    if core is None:
        raise Unusable("eagercache works on Linux x86-64 only")
    return core


def _environment_text() -> str:
    from eagercache import environment

    return environment.environment_text(cxx=config.read_settings().cxx)


def _store_path(directory: Path | None) -> Path:
    """The named directory, EAGERCACHE_DIR, or the first default that exists."""
    if directory is not None:
        return directory.absolute()
    settings = config.read_settings()
    if settings.directory is not None:
        return settings.directory.absolute()
    defaults = store_directory.candidates(os.environ, os.getuid())
    return next((path for path in defaults if path.exists()), defaults[0])


def _open(directory: Path | None, *, read_only: bool, max_bytes: int | None = None) -> Any:
    module = _require_core()
    path = _store_path(directory)
    if not path.is_dir():
        raise Unusable(f"there is no store at {path}; name one with --dir or EAGERCACHE_DIR")
    limit = config.read_settings().max_bytes if max_bytes is None else max_bytes
    try:
        return module.Store(str(path), _environment_text(), read_only=read_only, max_bytes=limit)
    except module.StoreError as error:
        raise Unusable(f"the store at {path} cannot be used: {error}") from error


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, sort_keys=True))


def _size_text(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def _microseconds(facts: dict[str, str], name: str) -> str:
    try:
        return f"{float(facts[name]) / 1000:.2f}"
    except (KeyError, ValueError):
        return ""


def _call_text(facts: dict[str, str]) -> str:
    """A call in one short line: tensors as dtype[sizes], the other arguments by name."""
    try:
        call = json.loads(facts.get("call", ""))
    except ValueError:
        return ""
    return ", ".join(_argument_texts(call.get("args", [])))


def _argument_texts(arguments: Sequence[dict[str, Any]]) -> Iterator[str]:
    for argument in arguments:
        kind = argument.get("kind")
        if kind == "tensor":
            sizes = "x".join(map(str, argument["sizes"])) or "0-dim"
            yield f"{argument['dtype']}[{sizes}]"
        elif kind == "tensor_list":
            yield f"[{', '.join(_argument_texts(argument['elements']))}]"
        elif kind not in ("none", "undefined_tensor"):
            value = argument.get("value", argument.get("values", argument.get("dtype", "")))
            yield f"{argument.get('name', '')}={value}"


def _table(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table, markup=False)


def _directory_option(function: Any) -> Any:
    return click.option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path),
        help="The store; EAGERCACHE_DIR or the default directory if not given.",
    )(function)


def _json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="eagercache")
def main() -> None:
    """Looks into, checks and cleans a store of compiled kernels."""


@main.command("ls")
@_directory_option
@_json_option
@click.option("--all", "everything", is_flag=True, help="Entries of every environment.")
@click.option("--op", default="", help="Only operators whose name contains this.")
def list_entries(directory: Path | None, as_json: bool, everything: bool, op: str) -> None:
    """Lists entries: kernels, decisions for native, failures."""
    store = _open(directory, read_only=True)
    rows = [row for row in store.entries(all=everything) if op in row["facts"].get("op", "")]
    rows.sort(key=lambda row: (row["facts"].get("op", ""), row["key"]))
    if as_json:
        _print_json(rows)
        return
    _table(
        f"{len(rows)} entries in {store.root}",
        [
            ("key", ""),
            ("operator", ""),
            ("call", ""),
            ("decision", ""),
            ("native us", "right"),
            ("kernel us", "right"),
            ("size", "right"),
        ],
        [
            (
                row["key"][:12],
                row["facts"].get("op", "?"),
                _call_text(row["facts"]),
                row["kind"],
                _microseconds(row["facts"], "native_ns"),
                _microseconds(row["facts"], "kernel_ns"),
                _size_text(row["bytes"]),
            )
            for row in rows
        ],
    )


@main.command()
@_directory_option
@_json_option
@click.argument("key")
def show(directory: Path | None, as_json: bool, key: str) -> None:
    """Shows one entry whole; KEY is its digest or the beginning of it."""
    store = _open(directory, read_only=True)
    found = [row for row in store.entries(all=True) if row["key"].startswith(key.lower())]
    if len(found) != 1:
        raise Unusable(
            f"no entry begins with {key!r}"
            if not found
            else f"{len(found)} entries begin with {key!r}"
        )
    entry = found[0]
    if as_json:
        _print_json(entry)
        return
    for name in ("key", "environment", "kind", "bytes", "created", "last_used", "cpu_features"):
        click.echo(f"{name:14} {_shown(name, entry[name])}")
    for item in entry["objects"]:
        click.echo(f"{'object':14} {item['digest']}.{item['kind']} ({_size_text(item['size'])})")
    for name, value in sorted(entry["facts"].items()):
        click.echo(f"{name:24} {value}")


def _shown(name: str, value: Any) -> str:
    if name in ("created", "last_used") and value:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return " ".join(value) if isinstance(value, list) else str(value)


@main.command()
@_directory_option
@_json_option
@click.option("--all", "everything", is_flag=True, help="Entries of every environment.")
@click.option(
    "--repair", is_flag=True, help="Put damaged entries aside, so that they are made anew."
)
def verify(directory: Path | None, as_json: bool, everything: bool, repair: bool) -> None:
    """Reads every object and compares it with its hash. Exit code 1 when one is damaged."""
    store = _open(directory, read_only=not repair)
    rows = store.verify(all=everything)
    damaged = [
        {"key": key, "environment": environment, "problem": problem}
        for key, environment, problem in rows
        if problem
    ]
    if as_json:
        _print_json({"checked": len(rows), "damaged": damaged})
    else:
        for item in damaged:
            click.echo(f"{item['key'][:12]}: {item['problem']}")
        click.echo(f"{len(rows)} entries checked, {len(damaged)} damaged")
    if damaged:
        sys.exit(1)


@main.command()
@_directory_option
@_json_option
@click.option("--max-bytes", help="Bring the store below this size, such as 500M.")
@click.option("--max-age", type=float, help="Remove entries not used for this many days.")
@click.option("--native", is_flag=True, help="Remove decisions for native and failures too.")
def prune(
    directory: Path | None,
    as_json: bool,
    max_bytes: str | None,
    max_age: float | None,
    native: bool,
) -> None:
    """Removes what is not needed: stale temporary files, unused objects, entries past a limit."""
    module = _require_core()
    try:
        limit = config.parse_size(max_bytes) if max_bytes else None
    except config.BadValue as error:
        raise Unusable(f"--max-bytes {max_bytes}: {error}") from error
    store = _open(directory, read_only=False, max_bytes=limit)
    removed = _remove_entries(store, max_age, native)
    try:
        counts = store.evict(force=True)
    except module.StoreError as error:
        raise Unusable(f"the store could not be pruned: {error}") from error
    counts["entries_removed"] += removed
    if as_json:
        _print_json(counts)
    else:
        click.echo(
            f"removed {counts['entries_removed']} entries, {counts['objects_removed']} objects, "
            f"{counts['temporaries_removed']} temporary files: "
            f"{_size_text(counts['bytes_removed'])}"
        )


def _remove_entries(store: Any, max_age: float | None, native: bool) -> int:
    removed = 0
    now = time.time()
    for row in store.entries(all=False):
        too_old = max_age is not None and now - row["last_used"] > max_age * 86_400
        if too_old or (native and row["kind"] != "kernel"):
            store.remove(row["key"])
            removed += 1
    return removed


@main.command("bisect", context_settings={"ignore_unknown_options": True})
@_directory_option
@_json_option
@click.option("--op", "ops", multiple=True, help="Suspect only operators whose name contains this.")
@click.option("--timeout", type=float, help="A run that takes longer fails (seconds).")
@click.option("--show", is_flag=True, help="Let the command's output through.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def bisect_command(
    directory: Path | None,
    as_json: bool,
    ops: tuple[str, ...],
    timeout: float | None,
    show: bool,
    command: tuple[str, ...],
) -> None:
    """Finds the operator, then the kernel, without which COMMAND passes.

    COMMAND is run with fewer and fewer of the store's kernels; it fails when its exit status is not
    0. Write -- before it. Exit code 1 when kernels are not the reason.
    """
    from eagercache import bisection

    store = _open(directory, read_only=True)
    runner = bisection.StoreWithout(
        _require_core(),
        Path(store.root),
        _environment_text(),
        command,
        timeout=timeout,
        quiet=not show,
    )
    entries = [
        row
        for row in store.entries(all=False)
        if not ops or any(op in row["facts"].get("op", "") for op in ops)
    ]
    try:
        found = bisection.bisect(entries, runner.passes, lambda text: click.echo(text, err=True))
    except bisection.NothingToFind as problem:
        if as_json:
            _print_json({"problem": str(problem), "runs": runner.runs})
        else:
            click.echo(f"{problem} ({runner.runs} runs)")
        sys.exit(1)
    if as_json:
        _print_json(
            {
                "operators": found.operators,
                "kernels": [dict(entry) for entry in found.kernels],
                "runs": runner.runs,
            }
        )
        return
    click.echo(f"COMMAND passes without these kernels ({runner.runs} runs):")
    for entry in found.kernels:
        facts = entry["facts"]
        click.echo(f"  {entry['key'][:12]}  {facts.get('op', '?')}  {_call_text(facts)}")
    click.echo(f"remedy: EAGERCACHE_SKIP={','.join(found.operators)}, and a report of the bug")


@main.command()
@_directory_option
@_json_option
def doctor(directory: Path | None, as_json: bool) -> None:
    """Checks directory, permissions, toolchain and torch.

    Says which field of the environment differs when a store that should hit does not. Exit code 1
    when something needs a remedy.
    """
    from eagercache.diagnosis import diagnose

    checks = diagnose(_store_path(directory))
    if as_json:
        _print_json([check.as_dict() for check in checks])
    else:
        for check in checks:
            click.echo(f"{check.state:8} {check.name}: {check.text}")
            if check.remedy:
                click.echo(f"{'':8} remedy: {check.remedy}")
    if any(check.state == "problem" for check in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()
