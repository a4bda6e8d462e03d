"""The report of `eagercache run --report` as one HTML page that needs no network."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

from eagercache.calls.texts import counted
from eagercache.cli.reports.page_style import SCRIPT, STYLE
from eagercache.cli.reports.page_tables import (
    aside_table,
    difference_table,
    module_table,
    native_table,
    operator_table,
)
from eagercache.cli.reports.program_report import Report
from eagercache.cli.reports.timeline_picture import timelines
from eagercache.frontend.remedies import remedy_of_short_programs


def save_page(report: Report, path: Path) -> str:
    """Writes the page. What hinders it, or "" when it is written."""
    try:
        path.write_text(page_of(report), encoding="utf-8")
    except OSError as error:
        return f"no page was written: {path} cannot be written ({error.strerror})"
    return ""


def page_of(report: Report) -> str:
    """The page's text."""
    program = " ".join(report.command) or "a program"
    parts = [
        f"<h1>{escape(program)}</h1>",
        f'<p class="soft">eagercache, {time.strftime("%Y-%m-%d %H:%M")}, '
        f"{escape(report.processes_text())}</p>",
        _figures(report),
        _bar(report),
        "<h2>What to do next</h2>",
        "<ul>" + "".join(f"<li>{_with_code(step)}</li>" for step in next_steps(report)) + "</ul>",
        timelines(report.timelines),
        "<h2>Operators</h2>",
        operator_table(report.rows),
    ]
    if any(row.moved_seconds for row in report.rows):
        parts.append(_BANDWIDTH)
    if report.modules:
        parts += ["<h2>Whole modules</h2>", module_table(report)]
    if report.why_native:
        parts += ["<h2>Native for good, and why</h2>", native_table(report)]
    if report.asides:
        parts += ["<h2>Calls that stepped aside by rule</h2>", _ASIDE, aside_table(report)]
    parts += ["<h2>Differences found</h2>", _differences(report)]
    facts = (f"{escape(name)} {escape(str(value))}" for name, value in report.environment.items())
    parts += ["<h2>Environment</h2>", f"<p>{', '.join(facts)}</p>"]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>eagercache: {escape(program)}</title><style>{STYLE}</style></head><body>"
        + "\n".join(parts)
        + f"<script>{SCRIPT}</script></body></html>\n"
    )


_BANDWIDTH = (
    '<p class="soft">GB/s: what kernels of an operator read and write in a second, in calls of '
    "8 MiB and more; beside it the share of a copy&rsquo;s speed on the same machine, which is the "
    "most that memory gives.</p>"
)


_ASIDE = (
    '<p class="soft">About a quarter of them is timed, drawn evenly, and the seconds are those of '
    "all at the mean of these. Calls on a GPU and of custom operators are not timed.</p>"
)


def _differences(report: Report) -> str:
    if report.differences:
        return difference_table(report)
    return (
        '<p class="soft">None. Each kernel was compared with native when it was made; '
        "<code>EAGERCACHE_VERIFY=0.01</code> compares that share of the program&rsquo;s calls "
        "too.</p>"
    )


def _figures(report: Report) -> str:
    saved = report.seconds_saved()
    figures = [
        ("natively, expected", f"{report.process_seconds + saved:.2f} s"),
        ("now", f"{report.process_seconds:.2f} s"),
        ("saved" if saved >= 0 else "lost", f"{abs(saved):.3f} s"),
        ("compiled, in other processes", f"{report.compile_seconds:.1f} s"),
    ]
    cells = "".join(f"<div><b>{value}</b>{name}</div>" for name, value in figures)
    return (
        f'<div class="figures">{cells}</div><p class="soft">What was saved is an estimate: calls '
        "that kernels answered, at the times that were measured when the kernels were made. "
        "<code>eagercache compare</code> measures the whole program.</p>"
    )


def _bar(report: Report) -> str:
    total = report.total()
    asides = report.seconds_aside()
    by_modules = report.seconds_by_modules()
    known = total.now + by_modules + sum(asides.values())
    rules = ", ".join(f"{rule} {seconds:.2f}" for rule, seconds in asides.items())
    parts = [
        ("kernels", "answered by kernels", total.by_kernels),
        ("modules", "whole modules, answered by kernels", by_modules),
        ("native", "hooked, native for good", total.by_native),
        ("open", "hooked, no verdict yet or not asked for", total.undecided),
        ("aside", f"stepped aside by rule, about ({rules})", sum(asides.values())),
        ("rest", _REST, max(0.0, report.process_seconds - known)),
    ]
    shown = [part for part in parts if part[2] or part[0] not in ("modules", "aside")]
    whole = sum(seconds for _, _, seconds in shown) or 1.0
    bars = "".join(
        f'<span class="{name}" style="width:{seconds / whole:.3%}" '
        f'title="{escape(text)}: {seconds:.2f} s"></span>'
        for name, text, seconds in shown
    )
    keys = "".join(
        f'<span><i class="{name}"></i>{escape(text)}: {seconds:.2f} s</span>'
        for name, text, seconds in shown
    )
    return f'<h2>Where the time goes</h2><div class="bar">{bars}</div><div class="key">{keys}</div>'


_REST = "not hooked: other operators, forwards of modules, Python, waiting"


def next_steps(report: Report) -> Iterator[str]:
    """What a user may do now, most useful first."""
    total = report.total()
    if report.processes == 0:
        yield "No process reported: none imported torch, or all were killed."
        return
    if remedy := remedy_of_short_programs(report.not_yet, " ".join(report.command)):
        yield f"{remedy[0].upper()}{remedy[1:]}."
    if not report.modules:
        yield (
            "Hooked operators are a part of the time; a kernel for a whole module saves more: try "
            "`eagercache run --modules auto`, with `--training` where gradients are needed."
        )
    if failed := total.decisions.get("failed", 0):
        yield (
            f"No kernel could be made for {counted(failed, 'kind')} of calls: the reasons are "
            "below, and nothing is to be done."
        )
    # What is undecided is timed again.
    decided = (one for one in report.why_native.items() if one[0][2] != "undecided")
    for (op, verdict, reason), calls in itertools.islice(decided, 1):
        because = {"": verdict, "slower": "its kernel was slower"}.get(reason, reason)
        yield (
            f"Native answers {counted(calls, 'call')} of `{op}` for good, and those of the table "
            f"below (here: {because}): nothing is to be done."
        )
    if report.aside:
        reason = next(iter(report.aside_reasons), "")
        yield (
            f"{counted(report.aside, 'call')} stepped aside by rule, most often by `{reason}`: "
            "`eagercache.explain` says of a call what the rule is about."
        )
    for row in report.rows:
        if row.lost > row.saved:
            yield f"Kernels of `{row.op}` took longer than native: leave it out with `--skip`."
    yield "`eagercache compare` says what the whole program gains, with an interval."


def _with_code(text: str) -> str:
    pieces = escape(text).split("`")
    return "".join(f"<code>{p}</code>" if n % 2 else p for n, p in enumerate(pieces))
