"""`eagercache stats`: what a store knows, operator by operator."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagercache.base import entry_facts
from eagercache.calls.texts import counted
from eagercache.cli.common import (
    directory_option,
    environment_text,
    json_option,
    open_store,
    print_json,
    size_text,
    table,
)

if TYPE_CHECKING:
    from eagercache.service.lingering import Lingering


@click.command("stats")
@directory_option
@json_option
@click.option("--all", "everything", is_flag=True, help="Entries of every environment.")
def stats_command(directory: Path | None, as_json: bool, everything: bool) -> None:
    """Sums a store up: by operator kernels, decisions, failures, speed-up and what it cost.

    Says also what ended programs left to be compiled, and which process goes on with it.

    What a running process did is eagercache.stats(), or the end of `eagercache run --report`.
    """
    from eagercache.service import lingering

    store = open_store(directory, read_only=True)
    entries = store.entries(all=everything)
    rows = operator_rows(entries)
    total = _row("all", entries)
    pending, linger = _pending(store), lingering.running(store.root)
    if as_json:
        print_json(
            {
                "store": store.root,
                "operators": rows,
                "total": total,
                "pending": pending,
                "lingering": asdict(linger) if linger is not None else None,
            }
        )
        return
    table(
        f"{counted(len(entries), 'entry', 'entries')} in {store.root}",
        [
            ("operator", ""),
            ("kernels", "right"),
            ("native", "right"),
            ("failed", "right"),
            ("speed-up", "right"),
            ("compile s", "right"),
            ("size", "right"),
        ],
        [_cells(row) for row in [*rows, total]],
    )
    _say_what_is_pending(pending, linger)


def _pending(store: Any) -> dict[str, int]:
    """Requests that ended programs left: those of this environment, and of others."""
    from eagercache.service.pending import PendingFolder

    here, all_of_them = PendingFolder(store.root).count(environment_text())
    return {"here": here, "elsewhere": all_of_them - here}


def _say_what_is_pending(pending: Mapping[str, int], linger: Lingering | None) -> None:
    if pending["here"]:
        click.echo(
            f"{counted(pending['here'], 'request')} of programs that have ended; "
            "`eagercache warm` compiles them now"
        )
    if pending["elsewhere"]:
        requests = counted(pending["elsewhere"], "request")
        click.echo(f"{requests} of programs that have ended, of other environments")
    if linger is not None:
        named = f"process {linger.pid}" if linger.pid else "a process"
        click.echo(f"{named} goes on with them: {linger.does}; `kill` ends it")


def operator_rows(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each operator; those with most kernels first."""
    by_operator = defaultdict(list)
    for entry in entries:
        by_operator[entry["facts"].get("op", "?")].append(entry)
    rows = [_row(op, of_operator) for op, of_operator in by_operator.items()]
    return sorted(rows, key=lambda row: (-row["kernels"], -row["native"], row["op"]))


def _row(op: str, entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """``speed_up`` is the median over kernels of native's time over the kernel's, or None."""
    row: dict[str, Any] = {"op": op, "kernels": 0, "native": 0, "failed": 0, "bytes": 0}
    seconds = 0.0
    ratios = []
    objects: dict[str, int] = {}
    for entry in entries:
        known = entry["facts"]
        row["kernels" if entry["kind"] == "kernel" else entry["kind"]] += 1
        row["bytes"] += entry["bytes"] - sum(item["size"] for item in entry["objects"])
        objects.update({item["digest"]: item["size"] for item in entry["objects"]})
        seconds += entry_facts.compile_seconds(known) or 0.0
        gain = entry_facts.gain(known) if entry["kind"] == "kernel" else None
        if gain is not None:
            ratios.append(gain)
    row["bytes"] += sum(objects.values())  # kernels that were built together share a file
    row["compile_seconds"] = round(seconds, 3)
    row["speed_up"] = round(statistics.median(ratios), 3) if ratios else None
    return row


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["op"],
        str(row["kernels"]),
        str(row["native"]),
        str(row["failed"]),
        f"x{row['speed_up']:.2f}" if row["speed_up"] is not None else "",
        f"{row['compile_seconds']:.1f}",
        size_text(row["bytes"]),
    )
