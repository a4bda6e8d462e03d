"""The table: `scripts/attack [--quick] [--only WORD] [--seed N] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attack import crowds, formats, limits, planted, signals, tampered
from attack.arena import Arena, Row

SCENES: tuple[Callable[[Arena], Row], ...] = (
    *planted.SCENES,
    *tampered.SCENES,
    *formats.SCENES,
    *signals.SCENES,
    *limits.SCENES,
    *crowds.SCENES,
)
_COLUMNS = ("tried", "hangs", "foreign", "wrong", "permanent", "leftovers", "died")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/attack", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute, for every day")
    parser.add_argument("--only", default="", help="scenes whose name has this word")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path, help="a file for the rows")
    return parser.parse_args()


def _play(arena: Arena, scene: Callable[[Arena], Row], console: Console) -> tuple[Row, float]:
    begin = time.monotonic()
    try:
        row = scene(arena)
    except Exception as error:
        row = Row(scene.__name__, died=1, note=f"the scene failed: {error!r}"[:110])
    seconds = time.monotonic() - begin
    console.print(f"{row.name}: {row.findings()} findings of {row.tried}, {seconds:.0f} s")
    return row, seconds


def _table(rows: list[tuple[Row, float]], title: str) -> Table:
    table = Table(title=title)
    table.add_column("what was tried")
    for name in (*_COLUMNS, "seconds"):
        table.add_column(name, justify="right")
    table.add_column("note", overflow="fold")
    for row, seconds in rows:
        note = "; ".join(filter(None, ["known" if row.known and row.findings() else "", row.note]))
        numbers = [str(getattr(row, name)) for name in _COLUMNS]
        table.add_row(row.name, *numbers, f"{seconds:.0f}", note)
    return table


def main() -> int:
    """1 when something was found that SECURITY.md does not name."""
    options = _options()
    errors = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="eagercache-attack-") as name:
        arena = Arena(Path(name), options.seed, quick=options.quick)
        try:
            scenes = [scene for scene in SCENES if options.only in scene.__name__]
            rows = [_play(arena, scene, errors) for scene in scenes]
        finally:
            arena.close()
    title = f"attack, {'quick' if options.quick else 'whole'}, seed {options.seed}"
    Console(width=None if sys.stdout.isatty() else 150).print(_table(rows, title))
    if options.json:
        body = [{**asdict(row), "seconds": round(seconds, 1)} for row, seconds in rows]
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    return 1 if any(row.findings() and not row.known for row, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
