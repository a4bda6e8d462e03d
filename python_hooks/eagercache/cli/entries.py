"""`eagercache ls`, `show`, `verify` and `prune`: the entries of a store."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import click

from eagercache.base import config, entry_facts
from eagercache.base.machine_kind import UNTRIED
from eagercache.calls.texts import counted
from eagercache.cli.common import (
    LENGTH,
    Unusable,
    call_text,
    directory_option,
    entries_as_json,
    json_option,
    microseconds,
    open_store,
    print_json,
    require_core,
    size_text,
    table,
)


@click.command("ls")
@directory_option
@json_option
@click.option("--all", "everything", is_flag=True, help="Entries of every environment.")
@click.option("--op", default="", help="Only operators whose name contains this.")
def ls_command(directory: Path | None, as_json: bool, everything: bool, op: str) -> None:
    """Lists entries: kernels, decisions for native, failures."""
    store = open_store(directory, read_only=True)
    rows = [row for row in store.entries(all=everything) if op in row["facts"].get("op", "")]
    rows.sort(key=lambda row: (row["facts"].get("op", ""), row["key"]))
    if as_json:
        print_json(entries_as_json(rows))
        return
    if not rows:
        click.echo(_none_found(store, everything, op))
        return
    table(
        f"{counted(len(rows), 'entry', 'entries')} in {store.root}",
        [
            ("key", ""),
            ("operator", ""),
            ("call", ""),
            ("decision", ""),
            ("native us", "right"),
            ("kernel us", "right"),
            ("size", "right"),
            ("why", ""),
        ],
        [
            (
                row["key"][:12],
                row["facts"].get("op", "?"),
                call_text(row["facts"]),
                UNTRIED if UNTRIED in row["facts"] else row["kind"],
                microseconds(row["facts"], "native_ns"),
                microseconds(row["facts"], "kernel_ns"),
                size_text(row["bytes"]),
                row["facts"].get("reason", ""),
            )
            for row in rows
        ],
    )


def _none_found(store: Any, everything: bool, op: str) -> str:
    if op:
        return f"no entry in {store.root} is of an operator whose name contains {op!r}"
    others = 0 if everything else len(store.entries(all=True))
    if not others:
        return f"0 entries in {store.root}"
    more = counted(others, "entry", "entries")
    return f"0 entries of this environment in {store.root}; --all lists {more} of others"


@click.command("show")
@directory_option
@json_option
@click.argument("key")
def show_command(directory: Path | None, as_json: bool, key: str) -> None:
    """Shows one entry whole; KEY is its digest or the beginning of it."""
    store = open_store(directory, read_only=True)
    found = [row for row in store.entries(all=True) if row["key"].startswith(key.lower())]
    if len(found) != 1:
        raise Unusable(
            f"no entry begins with {key!r}; `eagercache ls --all` lists them"
            if not found
            else f"{len(found)} entries begin with {key!r}; give more of the one that is meant"
        )
    entry = found[0]
    if as_json:
        print_json(entries_as_json([entry])[0])
        return
    for name in ("key", "environment", "kind", "bytes", "created", "last_used", "cpu_features"):
        click.echo(f"{name:14} {_shown(name, entry[name])}")
    for item in entry["objects"]:
        click.echo(f"{'object':14} {item['digest']}.{item['kind']} ({size_text(item['size'])})")
    for name, value in sorted(entry["facts"].items()):
        click.echo(f"{name:24} {value}")
    if (share := entry_facts.share_of_copy(entry["facts"])) is not None:
        speed = entry_facts.gigabytes_per_second(entry["facts"])
        click.echo(f"{'speed':24} {speed:.1f} GB/s, {share:.0%} of a copy's")


def _shown(name: str, value: Any) -> str:
    if name in ("created", "last_used") and value:
        with contextlib.suppress(OverflowError, ValueError, OSError):  # no day that a clock knows
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return " ".join(value) if isinstance(value, list) else str(value)


@click.command("verify")
@directory_option
@json_option
@click.option("--all", "everything", is_flag=True, help="Entries of every environment.")
@click.option(
    "--repair", is_flag=True, help="Put damaged entries aside, so that they are made anew."
)
def verify_command(directory: Path | None, as_json: bool, everything: bool, repair: bool) -> None:
    """Reads every object and compares it with its hash. Exit code 1 when one is damaged."""
    store = open_store(directory, read_only=not repair)
    rows = store.verify(all=everything)
    damaged = [
        {"key": key, "environment": environment, "problem": problem}
        for key, environment, problem in rows
        if problem
    ]
    if as_json:
        print_json({"checked": len(rows), "damaged": damaged})
    else:
        for item in damaged:
            click.echo(f"{item['key'][:12]}: {item['problem']}")
        checked = counted(len(rows), "entry", "entries")
        click.echo(f"{checked} of {store.root} checked, {len(damaged)} damaged")
        if damaged and not repair:
            click.echo("remedy: `eagercache verify --repair` puts them aside; they are made anew")
        if not rows and not everything:
            click.echo("there is none of this environment; --all takes those of all")
    if damaged:
        sys.exit(1)


@click.command("prune")
@directory_option
@json_option
@click.option("--max-bytes", help="Bring the store below this size, such as 500M.")
@click.option("--max-age", type=LENGTH, help="Remove entries not used for this many days.")
@click.option("--native", is_flag=True, help="Remove decisions for native and failures too.")
def prune_command(
    directory: Path | None,
    as_json: bool,
    max_bytes: str | None,
    max_age: float | None,
    native: bool,
) -> None:
    """Removes what is not needed: stale temporary files, unused objects, entries past a limit."""
    module = require_core()
    try:
        limit = config.parse_size(max_bytes) if max_bytes else None
    except config.BadValue as error:
        raise Unusable(f"--max-bytes {max_bytes}: {error}") from error
    store = open_store(directory, read_only=False, max_bytes=limit)
    removed = _remove_entries(store, max_age, native)
    try:
        counts = store.evict(force=True)
    except module.StoreError as error:
        raise Unusable(f"the store could not be pruned: {error}") from error
    counts["entries_removed"] += removed
    if as_json:
        print_json(counts)
    else:
        click.echo(
            f"removed {counted(counts['entries_removed'], 'entry', 'entries')}, "
            f"{counted(counts['objects_removed'], 'object')}, "
            f"{counted(counts['temporaries_removed'], 'temporary file')}: "
            f"{size_text(counts['bytes_removed'])}"
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
