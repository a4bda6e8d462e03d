"""Draws the charts of docs/figures.md from the tables of bench/results, in light and dark.

    python bench/charts.py [--check]

Each chart names the table that it is drawn from, and carries the machine and the date below it; a
machine that the table's page does not name is an error. The same table makes the same bytes:
``--check`` writes nothing, and ends with 1 where a file of docs/charts is not what its table says.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).absolute().parent.parent
RESULTS = ROOT / "bench" / "results"
TARGET = ROOT / "docs" / "charts"

# Text, soft text, lines, and the sides: eagercache, torch.compile, eager.
THEMES = {
    "light": ("#1c2330", "#5d6675", "#d9dee6", "#2563a8", "#c98a1b", "#9aa5b4"),
    "dark": ("#e3e8ef", "#98a3b3", "#313945", "#5b9de0", "#d9a441", "#6b7787"),
}
_SIDES = ("eagercache", "torch.compile", "eager")


@dataclass(frozen=True)
class Chart:
    """One chart of bars.

    Attributes:
        name: of its files, without the theme.
        title: what the bars say.
        page: of bench/results.
        heading: the first table after this text is meant.
        machine: as the page has it.
        label: makes a bar's label of a row's cells; "" leaves the row out.
        sides: which column holds which side's number, by the side's name.
        line: (what it is, where) of a line across all bars.
    """

    name: str
    title: str
    page: str
    heading: str
    machine: str
    label: Callable[[Sequence[str]], str]
    sides: dict[str, int]
    line: tuple[str, float] | None = None


def _first_word(row: Sequence[str]) -> str:
    return re.split(r"[ (,]", row[0])[0]


def _whole(row: Sequence[str]) -> str:
    return row[0].rstrip(" *")


CHARTS = (
    Chart(
        "modules-cpu",
        "Inference with kernels of whole modules on CPU: times as fast as eager",
        "2026-11-22-modules-cpu.md",
        "## Ten models",
        "Two threads of a Xeon VM with 32 cores",
        _first_word,
        {"eagercache": 3},
        ("eager", 1.0),
    ),
    Chart(
        "programs-cpu",
        "Programs of many small operators on CPU: times as fast as native",
        "2026-11-22-overhead-cpu.md",
        "## Programs",
        "Xeon VM, 2 cores",
        lambda row: f"{row[0]}, load {row[1].removeprefix('about ')}",
        {"eagercache": 4},
        ("native", 1.0),
    ),
    Chart(
        "generate-cpu",
        "generate() of a small Llama-shaped model on CPU: ms a token",
        "2026-11-24-generate-cpu.md",
        "## ",
        "Intel(R) Xeon(R) Processor, cores 2",
        lambda row: row[1] if row[0] == "1" else "",
        {"": 2},
    ),
    Chart(
        "training-h100",
        "Training steps with kernels of whole modules: times as fast as eager",
        "2026-11-26-training-h100.md",
        "| model | eager ms",
        "NVIDIA H100 80GB HBM3",
        _whole,
        {"eagercache": 3, "torch.compile": 5},
        ("eager", 1.0),
    ),
    Chart(
        "decode-h100",
        "A decode step of Qwen2-0.5B's shape, static cache: ms a token",
        "2026-11-25-decode.md",
        "| program | side",
        "NVIDIA H100 80GB HBM3",
        lambda row: row[1] if row[0] == "static" else "",
        {"": 2},
    ),
    Chart(
        "bandwidth-h100",
        "Calls bound by memory, bfloat16, kernels searched before: GB/s",
        "2026-11-26-bandwidth.md",
        "Commit 8c36fe8",
        "NVIDIA H100 80GB HBM3",
        _whole,
        {"eagercache": 3, "torch.compile": 2, "eager": 1},
        ("a copy", 2988.0),
    ),
)


def table_after(text: str, heading: str) -> list[list[str]]:
    """The cells of each row of the first table that begins after, or with, ``heading``."""
    rows: list[list[str]] = []
    for line in text[text.find(heading) if heading in text else 0 :].splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def number(cell: str) -> str:
    """The first number of a cell as "**x1.65** (1.43..1.72)" or "2,878", as it stands there."""
    found = re.search(r"\d[\d,]*(?:\.\d+)?", cell)
    return found[0] if found else ""


def rows_of(chart: Chart) -> list[tuple[str, list[str]]]:
    """(label, the number of each side) of each bar."""
    text = (RESULTS / chart.page).read_text(encoding="utf-8")
    assert chart.machine in text, f"{chart.page} does not name the machine {chart.machine}"
    rows = [
        (label, [number(row[place]) for place in chart.sides.values()])
        for row in table_after(text, chart.heading)
        if (label := chart.label(row))
    ]
    assert rows, f"{chart.page} has no rows after {chart.heading}"
    return rows


def draw(chart: Chart, theme: str) -> str:
    """The chart as SVG."""
    text, soft, lines, *colours = THEMES[theme]
    rows, sides = rows_of(chart), list(chart.sides)
    settings = {
        "svg.hashsalt": "eagercache",
        "svg.fonttype": "none",
        "font.size": 10,
        "text.color": text,
        "axes.labelcolor": text,
        "xtick.color": soft,
        "ytick.color": text,
    }
    with mpl.rc_context(settings):
        each = 0.34 if len(sides) == 1 else 0.22 * len(sides)
        figure, axes = pyplot.subplots(figsize=(8.4, 1.2 + each * len(rows)))
        height = 0.8 / len(sides)
        for place, side in enumerate(sides):
            colour = dict(zip(_SIDES, colours, strict=True)).get(side)
            for row, (label, values) in enumerate(rows):
                if not values[place]:
                    continue
                value = float(values[place].replace(",", ""))
                middle = row + (place - (len(sides) - 1) / 2) * height
                own = colour or colours[_side_of(label)]
                axes.barh(middle, value, height * 0.92, color=own, label=side if not row else "")
                axes.text(value, middle, f" {values[place]}", va="center", fontsize=8, color=soft)
        _decorate(axes, chart, rows, (text, lines))
        if len(sides) > 1:
            figure.legend(
                frameon=False, loc="lower right", labelcolor=text, ncols=len(sides), fontsize=9
            )
        note = f"{chart.machine}, {chart.page[:10]} (bench/results/{chart.page})"
        figure.text(0.01, 0.01, note, fontsize=8, color=soft)
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        stream = io.StringIO()
        figure.savefig(
            stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _side_of(label: str) -> int:
    """Which side a bar is, where each has a row of its own."""
    if "torch.compile" in label:
        return 1
    return 2 if label == "eager" else 0


def _decorate(axes: Any, chart: Chart, rows: Sequence[Any], colours: tuple[str, str]) -> None:
    text, lines = colours
    axes.set_title(chart.title, loc="left", fontsize=11, color=text, x=0)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.xaxis.grid(visible=True, color=lines, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.09)
    if chart.line:
        what, where = chart.line
        axes.axvline(where, color=text, linewidth=1, linestyle="--")
        axes.set_xlabel(f"dashed: {what}", fontsize=8, loc="left")


def main() -> int:
    """Writes or checks; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    check = parser.parse_args().check
    TARGET.mkdir(exist_ok=True)
    stale = []
    for chart in CHARTS:
        for theme in THEMES:
            path = TARGET / f"{chart.name}-{theme}.svg"
            drawn = draw(chart, theme)
            if check and (not path.exists() or path.read_text(encoding="utf-8") != drawn):
                stale.append(path.name)
            elif not check:
                path.write_text(drawn, encoding="utf-8")
    for name in stale:
        print(f"docs/charts/{name} is not what its table says; bench/charts.py draws it")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
