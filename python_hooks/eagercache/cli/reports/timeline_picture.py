"""The timelines of a report as pictures that the page holds itself (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from eagercache.calls.texts import NOT_YET, counted
from eagercache.cli.reports.page_tables import compile_table
from eagercache.cli.reports.ticks import tick
from eagercache.cli.reports.timeline import lanes, rates, step_lengths

# Of a program of many processes the longest are shown.
MOST_PROCESSES = 4
_WIDTH, _LEFT, _RIGHT = 1000.0, 90.0, 985.0
_CALLS_HEIGHT, _STEPS_HEIGHT, _LANE, _GAP = 110.0, 70.0, 14.0, 26.0
_MOST_LANES = 12
_MOST_STRETCHES = 300
_CLASSES = {"kernel": "kernels", "native": "native", "failed": "failed"}


def timelines(found: Sequence[Mapping[str, Any]]) -> str:
    """The section of the page; "" where no process has one."""
    shown = [one for one in found if one["compiles"] or len(one["samples"]) > 2][:MOST_PROCESSES]
    if not shown:
        return ""
    parts = ["<h2>What happened when</h2>"]
    first = min(one["began_at"] for one in shown)
    for number, one in enumerate(shown, 1):
        parts.append(_process(one, number if len(shown) > 1 else 0, one["began_at"] - first))
    if left := len(found) - len(shown):
        parts.append(
            f'<p class="soft">{counted(left, "shorter process", "shorter processes")}'
            " without a picture.</p>"
        )
    return "".join(parts)


def _process(one: Mapping[str, Any], number: int, later: float) -> str:
    said = [f"process {number}, from {later:.1f} s on"] if number else []
    left = sum(compiled["verdict"] == NOT_YET for compiled in one["compiles"])
    said.append(counted(len(one["compiles"]) - left, "compile"))
    if left:
        said.append(f"{left:,} not done when the program ended")
    if one["step_count"]:
        said.append(counted(one["step_count"], "step") + " of the optimizer")
    caption = "; ".join(said)
    table = (
        f"<details><summary>What was compiled, as a table</summary>"
        f"{compile_table(one['compiles'])}</details>"
        if one["compiles"]
        else ""
    )
    keys = "".join(
        f'<span><i class="{name}"></i>{text}</span>'
        for name, text in (
            ("kernels", "by kernels; became a kernel"),
            ("native", "by native; native won"),
            ("failed", "no kernel could be made"),
            ("open", "not done when the program ended"),
        )
    )
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption>{_picture(one)}"
        f'<div class="key">{keys}</div></figure>{table}'
    )


def _picture(one: Mapping[str, Any]) -> str:
    scale = _Scale(max(one["seconds"], 1e-3))
    top = 18.0
    parts = [*_calls(one["samples"], scale, top)]
    top += _CALLS_HEIGHT + _GAP
    if stretches := step_lengths(one["steps"], _MOST_STRETCHES):
        parts += _steps(stretches, scale, top)
        top += _STEPS_HEIGHT + _GAP
    if one["compiles"]:
        rows = lanes(one["compiles"])
        parts += _compiles(rows, scale, top)
        top += min(len(rows), _MOST_LANES) * _LANE + _GAP
    parts += _axis(scale, top - _GAP + 6)
    height = top + 14
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="what happened in which second">{"".join(parts)}</svg>'
    )


class _Scale:
    """Seconds as places from left to right."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def at(self, seconds: float) -> float:
        share = min(1.0, max(0.0, seconds / self.seconds))
        return _LEFT + share * (_RIGHT - _LEFT)


def _rect(name: str, left: float, right: float, top: float, height: float, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect class="{name}" x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0.8):.1f}" '
        f'height="{height:.1f}">{inside}</rect>'
    )


def _label(text: str, top: float, most: str) -> str:
    return (
        f'<text x="{_LEFT:.0f}" y="{top - 5:.0f}">{escape(text)}</text>'
        f'<text x="{_LEFT - 8:.0f}" y="{top + 10:.0f}" text-anchor="end">{escape(most)}</text>'
    )


def _calls(samples: Sequence[Sequence[float]], scale: _Scale, top: float) -> Iterator[str]:
    found = rates(samples)
    most = max((kernels + native for _, _, kernels, native in found), default=0.0) or 1.0
    yield _label("hooked calls a second", top, f"{most:,.0f}")
    for begin, end, kernels, native in found:
        left, right = scale.at(begin), scale.at(end)
        title = f"{begin:.2f} s: {kernels:,.0f} a second by kernels, {native:,.0f} by native"
        low, high = kernels / most * _CALLS_HEIGHT, native / most * _CALLS_HEIGHT
        bottom = top + _CALLS_HEIGHT
        if high >= 0.1:
            yield _rect("native", left, right, bottom - low - high, high, title)
        if low >= 0.1:
            yield _rect("kernels", left, right, bottom - low, low, title)
    yield _line(top + _CALLS_HEIGHT)


def _steps(
    stretches: Sequence[tuple[float, float, float]], scale: _Scale, top: float
) -> Iterator[str]:
    most = max(seconds for _, _, seconds in stretches) or 1.0
    yield _label("length of a step", top, _duration(most))
    points = []
    for begin, end, seconds in stretches:
        height = top + _STEPS_HEIGHT * (1 - seconds / most)
        points += [f"{scale.at(begin):.1f},{height:.1f}", f"{scale.at(end):.1f},{height:.1f}"]
    yield f'<polyline class="steps" points="{" ".join(points)}"/>'
    yield _line(top + _STEPS_HEIGHT)


def _compiles(
    rows: Sequence[Sequence[Mapping[str, Any]]], scale: _Scale, top: float
) -> Iterator[str]:
    yield _label("compiles in other processes", top, "")
    for place, row in enumerate(rows):
        for one in row:
            took = one["ended"] - one["began"]
            title = f"{one['op']}: {one['verdict']}, {one['began']:.2f} s, took {took:.2f} s"
            yield _rect(
                _CLASSES.get(one["verdict"], "open"),
                scale.at(one["began"]),
                scale.at(one["ended"]) - 0.5,
                top + min(place, _MOST_LANES - 1) * _LANE,
                _LANE - 3,
                title,
            )


def _line(height: float) -> str:
    return f'<path class="axis" d="M{_LEFT:.0f} {height:.1f}H{_RIGHT:.0f}"/>'


def _axis(scale: _Scale, top: float) -> Iterator[str]:
    yield _line(top)
    step = tick(scale.seconds)
    for number in range(int(scale.seconds / step + 1e-6) + 1):
        place = scale.at(number * step)
        yield (
            f'<text x="{place:.1f}" y="{top + 16:.0f}" text-anchor="middle">'
            f"{number * step:g}{' s' if not number else ''}</text>"
        )


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
