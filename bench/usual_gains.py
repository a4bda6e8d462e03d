"""Writes the table of usual gains that `eagercache estimate` reads, from measured results.

    python bench/usual_gains.py [--check]

Sources are tables of bench/results that are named below, each with the commit that was measured.
Of an operator there is one row for each call that was measured: what native took, and what the call
took with eagercache as a share of that, with its interval; 1 where native answers. Of whole modules
there are the least, the median and the largest ratio of the models. ``--check`` writes nothing, and
ends with 1 where the file is not what the tables say.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
RESULTS = ROOT / "bench" / "results"
TARGET = ROOT / "python_hooks" / "eagercache" / "cli" / "estimates" / "usual_gains.json"
OPERATORS = ("2026-11-22-default-set-cpu.md", "0131afd")
# File, heading that the table follows, and commit, of calls without gradients and of training.
MODULES = {
    "inference": ("2026-11-22-modules-cpu.md", "## Ten models", "beaa786"),
    "training": ("2026-11-23-training-cpu.md", "## The benchmark itself", "1f5e277"),
}
_RATIO = re.compile(r"x(\d+\.\d+)")


def _tables(text: str) -> list[list[str]]:
    """The cells of each row of the first table in ``text``, without its head."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def operators() -> dict[str, list[list[float]]]:
    """[native in us, share of native's time, its least, its most] of each call, by operator."""
    name, commit = OPERATORS
    text = (RESULTS / name).read_text()
    assert f"commit {commit}" in text, f"{name} is of another commit"
    found: dict[str, list[list[float]]] = {}
    for operator, _, answers, native, _, ratio, interval in _tables(text):
        low, high = (float(number) for number in interval.split(" to "))
        shares = [float(ratio), low, high] if answers == "kernel" else [1.0, 1.0, 1.0]
        found.setdefault(f"aten::{operator}", []).append([float(native), *shares])
    return {operator: sorted(rows) for operator, rows in sorted(found.items())}


def modules() -> dict[str, dict[str, Any]]:
    """How many times as fast models were with kernels of whole modules."""
    found = {}
    for kind, (name, heading, commit) in MODULES.items():
        text = (RESULTS / name).read_text()
        section = text[text.index(heading) :]
        assert f"at {commit}" in text, f"{name} is of another commit"
        ratios = {row[0]: float(_RATIO.search(row[3])[1]) for row in _tables(section)}  # type: ignore[index]
        found[kind] = {
            "source": f"bench/results/{name}",
            "commit": commit,
            "models": len(ratios),
            "low": min(ratios.values()),
            "middle": round(statistics.median(ratios.values()), 3),
            "high": max(ratios.values()),
        }
    return found


def table() -> str:
    """The file's text."""
    name, commit = OPERATORS
    rows = operators()
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items())
    source = json.dumps({"source": f"bench/results/{name}", "commit": commit})
    return (
        f'{{\n  "made by": "bench/usual_gains.py",\n  "operators of": {source},\n'
        f'  "operators": {{\n{lines}\n  }},\n  "modules": {json.dumps(modules())}\n}}\n'
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    options = parser.parse_args()
    text = table()
    if not options.check:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        sys.exit(f"{TARGET} is not what the tables say: run bench/usual_gains.py")


if __name__ == "__main__":
    main()
