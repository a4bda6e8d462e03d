"""The report of `eagercache run --report` as a picture: native time and time now, by operator.

It is drawn here as SVG, which takes milliseconds; other formats are matplotlib's, which takes a
second or two to draw them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from eagercache.cli.reports.program_report import MOST_ROWS, Report, Row
from eagercache.cli.reports.ticks import tick

TITLE = "hooked operators: all native, and as they ran"
AXIS = "milliseconds in the run"
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 900, 250, 870, 64, 26
_STYLE = """
svg { background: #ffffff; font: 13px system-ui, sans-serif; } text { fill: #1c2330; }
.soft { fill: #5d6675; } .axis { stroke: #d9dee6; }
.native { fill: #c8c8c8; } .now { fill: #2b6cb0; }
@media (prefers-color-scheme: dark) { svg { background: #14181f; } text { fill: #e3e8ef; }
  .soft { fill: #98a3b3; } .axis { stroke: #313945; } .native { fill: #59636f; }
  .now { fill: #5b9de0; } }
"""


def save_picture(report: Report, path: Path) -> str:
    """Draws where the time goes. What hinders it, with the remedy, or "" when it is drawn."""
    rows = [row for row in report.shown_rows() if row.native > 0][:MOST_ROWS]
    if not rows:
        return "no picture was drawn: no call of a hooked operator was timed"
    try:
        if path.suffix.lower() == ".svg":
            path.write_text(picture_of(rows), encoding="utf-8")
            return ""
        return _draw_with_matplotlib(rows, path)
    except OSError as error:
        return f"no picture was drawn: {path} cannot be written ({error.strerror})"


def picture_of(rows: Sequence[Row]) -> str:
    """The text of the SVG."""
    height = _TOP + _ROW * len(rows) + 44
    most = max(max(row.native, row.now) for row in rows) * 1e3
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}"><style>{_STYLE}</style>'
        + "".join((*_head(), *_axis(most, height - 40), *_bars(rows, most)))
        + "</svg>\n"
    )


def _head() -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="24" font-size="16">{TITLE}</text>'
    for place, name in ((_LEFT, "native"), (_LEFT + 90, "now")):
        yield f'<rect class="{name}" x="{place}" y="36" width="12" height="12"/>'
        yield f'<text class="soft" x="{place + 18}" y="47">{name}</text>'


def _axis(most: float, bottom: int) -> Iterator[str]:
    step = tick(most)
    for number in range(int(most / step + 1e-6) + 1):
        place = _LEFT + number * step / most * (_RIGHT - _LEFT)
        yield f'<path class="axis" d="M{place:.1f} {_TOP - 6}V{bottom}"/>'
        yield (
            f'<text class="soft" x="{place:.1f}" y="{bottom + 17}" text-anchor="middle">'
            f"{number * step:g}</text>"
        )
    yield f'<text class="soft" x="{_RIGHT}" y="{bottom + 34}" text-anchor="end">{AXIS}</text>'


def _bars(rows: Sequence[Row], most: float) -> Iterator[str]:
    for number, row in enumerate(rows):
        top = _TOP + number * _ROW
        place = f'x="{_LEFT - 8}" y="{top + 15}" text-anchor="end"'
        yield f"<text {place}>{escape(_short(row.op))}</text>"
        for name, seconds, thick in (("native", row.native, 20), ("now", row.now, 10)):
            length = seconds * 1e3 / most * (_RIGHT - _LEFT)
            yield (
                f'<rect class="{name}" x="{_LEFT}" y="{top + (20 - thick) / 2:g}" '
                f'width="{length:.1f}" height="{thick}"><title>{escape(row.op)} {name}: '
                f"{seconds * 1e3:,.1f} ms</title></rect>"
            )


def _short(name: str, most: int = 34) -> str:
    """A name that has room beside the bars."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _draw_with_matplotlib(rows: Sequence[Row], path: Path) -> str:
    try:
        import matplotlib as mpl
    except ImportError:
        return (
            "no picture was drawn: matplotlib is not installed (pip install matplotlib), or name a "
            "file that ends in .svg"
        )
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(rows)))
    places = range(len(rows))
    axes.barh(places, [1e3 * row.native for row in rows], color="#c8c8c8", label="native")
    axes.barh(places, [1e3 * row.now for row in rows], height=0.45, color="#2b6cb0", label="now")
    axes.set_yticks(list(places), [row.op for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(AXIS)
    axes.set_title(TITLE)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        return f"no picture was drawn: {error}"
    finally:
        pyplot.close(figure)
    return ""
