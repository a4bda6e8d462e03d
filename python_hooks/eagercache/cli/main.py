"""The command line: programs with kernels, kernels ahead of time, and what is in a store.

Every command takes --json. Exit codes: 0 all is well, 1 something was found wrong, 2 bad usage or a
store that cannot be opened (one line says why).
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import Any

import click

from eagercache.base import config
from eagercache.cli.bundle import bundle_group
from eagercache.cli.clear import clear_command
from eagercache.cli.common import (
    OneLine,
    Unusable,
    call_text,
    directory_option,
    environment_text,
    json_option,
    microseconds,
    open_store,
    print_json,
    require_core,
    size_text,
    store_path,
    table,
)
from eagercache.cli.inspect import bench_command, explain_command
from eagercache.cli.programs import record_command, run_command
from eagercache.cli.stats import stats_command
from eagercache.cli.warm import warm_command
from eagercache.version import __version__


@click.group(cls=OneLine, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="eagercache")
def main() -> None:
    """Runs programs with compiled kernels, makes kernels ahead of time, looks after their store."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be text
            stream.reconfigure(errors="backslashreplace")


main.add_command(run_command)
main.add_command(record_command)
main.add_command(warm_command)
main.add_command(bundle_group)
main.add_command(stats_command)
main.add_command(explain_command)
main.add_command(bench_command)
main.add_command(clear_command)


@main.command("ls")
@directory_option
@json_option
@click.option("--all", "everything", is_flag=True, help="Entries of every environment.")
@click.option("--op", default="", help="Only operators whose name contains this.")
def list_entries(directory: Path | None, as_json: bool, everything: bool, op: str) -> None:
    """Lists entries: kernels, decisions for native, failures."""
    store = open_store(directory, read_only=True)
    rows = [row for row in store.entries(all=everything) if op in row["facts"].get("op", "")]
    rows.sort(key=lambda row: (row["facts"].get("op", ""), row["key"]))
    if as_json:
        print_json(rows)
        return
    table(
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
                call_text(row["facts"]),
                row["kind"],
                microseconds(row["facts"], "native_ns"),
                microseconds(row["facts"], "kernel_ns"),
                size_text(row["bytes"]),
            )
            for row in rows
        ],
    )


@main.command()
@directory_option
@json_option
@click.argument("key")
def show(directory: Path | None, as_json: bool, key: str) -> None:
    """Shows one entry whole; KEY is its digest or the beginning of it."""
    store = open_store(directory, read_only=True)
    found = [row for row in store.entries(all=True) if row["key"].startswith(key.lower())]
    if len(found) != 1:
        raise Unusable(
            f"no entry begins with {key!r}"
            if not found
            else f"{len(found)} entries begin with {key!r}"
        )
    entry = found[0]
    if as_json:
        print_json(entry)
        return
    for name in ("key", "environment", "kind", "bytes", "created", "last_used", "cpu_features"):
        click.echo(f"{name:14} {_shown(name, entry[name])}")
    for item in entry["objects"]:
        click.echo(f"{'object':14} {item['digest']}.{item['kind']} ({size_text(item['size'])})")
    for name, value in sorted(entry["facts"].items()):
        click.echo(f"{name:24} {value}")


def _shown(name: str, value: Any) -> str:
    if name in ("created", "last_used") and value:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return " ".join(value) if isinstance(value, list) else str(value)


@main.command()
@directory_option
@json_option
@click.option("--all", "everything", is_flag=True, help="Entries of every environment.")
@click.option(
    "--repair", is_flag=True, help="Put damaged entries aside, so that they are made anew."
)
def verify(directory: Path | None, as_json: bool, everything: bool, repair: bool) -> None:
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
        click.echo(f"{len(rows)} entries checked, {len(damaged)} damaged")
    if damaged:
        sys.exit(1)


@main.command()
@directory_option
@json_option
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
            f"removed {counts['entries_removed']} entries, {counts['objects_removed']} objects, "
            f"{counts['temporaries_removed']} temporary files: "
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


@main.command("bisect", context_settings={"ignore_unknown_options": True})
@directory_option
@json_option
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
    from eagercache.cli import bisection

    store = open_store(directory, read_only=True)
    runner = bisection.StoreWithout(
        require_core(),
        Path(store.root),
        environment_text(),
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
            print_json({"problem": str(problem), "runs": runner.runs})
        else:
            click.echo(f"{problem} ({runner.runs} runs)")
        sys.exit(1)
    if as_json:
        print_json(
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
        click.echo(f"  {entry['key'][:12]}  {facts.get('op', '?')}  {call_text(facts)}")
    click.echo(f"remedy: EAGERCACHE_SKIP={','.join(found.operators)}, and a report of the bug")


@main.command()
@directory_option
@json_option
def doctor(directory: Path | None, as_json: bool) -> None:
    """Checks directory, permissions, toolchain and torch.

    Says which field of the environment differs when a store that should hit does not. Exit code 1
    when something needs a remedy.
    """
    from eagercache.cli.diagnosis import diagnose

    checks = diagnose(store_path(directory))
    if as_json:
        print_json([check.as_dict() for check in checks])
    else:
        for check in checks:
            click.echo(f"{check.state:8} {check.name}: {check.text}")
            if check.remedy:
                click.echo(f"{'':8} remedy: {check.remedy}")
    if any(check.state == "problem" for check in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()
