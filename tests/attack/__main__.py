"""The table: `scripts/attack [--quick] [--only WORD] [--seed N] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from attack import crowds, endings, formats, limits, machines, planted, remotes, signals, tampered
from attack.arena import Arena, Row

SCENES: tuple[Callable[[Arena], Row], ...] = (
    *planted.SCENES,
    *tampered.SCENES,
    *remotes.SCENES,
    *formats.SCENES,
    *signals.SCENES,
    *limits.SCENES,
    *machines.SCENES,
    *endings.SCENES,
    *crowds.SCENES,
)
_COLUMNS = ("tried", "hangs", "foreign", "wrong", "permanent", "leftovers", "died")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/attack", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three minutes, for every day")
    parser.add_argument("--only", default="", help="scenes whose name has this word")
    parser.add_argument("--jobs", type=int, default=2, help="scenes at a time")
    parser.add_argument("--part", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path, help="a file for the rows")
    options = parser.parse_args()
    if not _scenes(options.only):
        names = ", ".join(scene.__name__ for scene in SCENES)
        parser.error(f"no scene's name has {options.only!r} in it; there are: {names}")
    return options


def _scenes(word: str) -> list[Callable[[Arena], Row]]:
    return [scene for scene in SCENES if word in scene.__name__]


def _play(arena: Arena, scene: Callable[[Arena], Row], console: Console) -> tuple[Row, float]:
    begin = time.monotonic()
    try:
        row = scene(arena)
    except Exception as error:
        row = Row(scene.__name__, died=1, note=f"the scene failed: {error!r}"[:200])
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
        known = "known" if row.known and row.findings() else ""
        used = f"kernels answered in {row.used} of {row.programs} programs" if row.programs else ""
        note = "; ".join(filter(None, [known, used, row.note]))
        numbers = [str(getattr(row, name)) for name in _COLUMNS]
        table.add_row(row.name, *numbers, f"{seconds:.0f}", note)
    return table


def _in_words(row: Row) -> str:
    """The row's numbers that are not 0, and what it says of them, on one line."""
    numbers = [f"{name} {getattr(row, name)}" for name in _COLUMNS if getattr(row, name)]
    return "; ".join(filter(None, [f"{row.name}: {', '.join(numbers)}", row.note]))


def _play_all(options: argparse.Namespace) -> list[tuple[Row, float]]:
    """The scenes of this process: all that are asked for, or every one of ``jobs`` of them."""
    scenes = _scenes(options.only)
    if options.part >= 0:
        scenes = scenes[options.part :: options.jobs]
    with tempfile.TemporaryDirectory(prefix="eagercache-attack-") as name:
        Path(name).chmod(0o711)  # some programs are another user's
        arena = Arena(Path(name), options.seed, quick=options.quick)
        try:
            return [_play(arena, scene, Console(stderr=True)) for scene in scenes]
        finally:
            arena.close()


def _play_in_parts(options: argparse.Namespace) -> list[tuple[Row, float]]:
    """The same in several processes, each with stores and children of its own."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / str(part) for part in range(options.jobs)]
        own = [*(["--quick"] if options.quick else []), "--only", options.only]
        own += ["--seed", str(options.seed), "--jobs", str(options.jobs)]
        command = [sys.executable, "-m", "attack", *own]
        processes = [
            subprocess.Popen(
                [*command, "--part", str(part), "--json", str(path)], stdout=subprocess.DEVNULL
            )
            for part, path in enumerate(files)
        ]
        for process in processes:
            process.wait()
        parts = [json.loads(path.read_text()) for path in files]
    rows = []
    for place in range(max(map(len, parts), default=0)):
        for part in parts:
            rows += [_read(body) for body in part[place : place + 1]]
    return rows


def _read(body: dict[str, Any]) -> tuple[Row, float]:
    seconds = body.pop("seconds")
    return Row(**body), seconds


def main() -> int:
    """1 when something was found that SECURITY.md does not name."""
    options = _options()
    alone = options.part >= 0 or options.jobs < 2
    begin = time.monotonic()
    rows = _play_all(options) if alone else _play_in_parts(options)
    seconds = time.monotonic() - begin
    form = "quick" if options.quick else "whole"
    title = f"attack, {form}, seed {options.seed}, {seconds:.0f} s"
    Console(width=None if sys.stdout.isatty() else 150).print(_table(rows, title))
    for row, _ in rows:
        if row.findings() and not row.known:
            print(f"found: {_in_words(row)}")
    if options.json:
        body = [{**asdict(row), "seconds": round(seconds, 1)} for row, seconds in rows]
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    return 1 if any(row.findings() and not row.known for row, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
