"""The report of `eagercache run --report` as one HTML page that needs no network."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from eagercache.calls.texts import counted
from eagercache.cli.reports.program_report import Report, Row
from eagercache.frontend.gains import NOT_YET
from eagercache.frontend.remedies import remedy_of_short_programs

_STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --soft: #5d6675; --back: #ffffff;
  --line: #d9dee6; --band: #f3f5f8; --kernels: #2563a8; --native: #9aa5b4; --open: #c98a1b;
  --rest: #dfe4eb; --lost: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e8ef; --soft: #98a3b3; --back: #14181f;
  --line: #313945; --band: #1c222b; --kernels: #5b9de0; --native: #6b7787; --open: #d9a441;
  --rest: #2b333f; --lost: #f2857d; } }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--text); background: var(--back); }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p.soft, caption, .key { color: var(--soft); } p.soft { margin: .2rem 0 1rem; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin: 1rem 0; }
.figures b { display: block; font-size: 1.7rem; font-variant-numeric: tabular-nums; }
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden;
  background: var(--rest); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; margin-top: .5rem; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.kernels { background: var(--kernels); } .native { background: var(--native); }
.open { background: var(--open); } .rest { background: var(--rest); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } tbody tr:hover { background: var(--band); }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.lost { color: var(--lost); }
code { background: var(--band); padding: .1em .3em; border-radius: 3px; }
"""

_SCRIPT = """
for (const head of document.querySelectorAll("th")) head.firstElementChild.onclick = () => {
  const up = head.ariaSort === "descending", place = head.cellIndex;
  for (const other of head.parentNode.children) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
  const body = head.closest("table").tBodies[0];
  const of = row => row.cells[place].dataset.value;
  const rows = [...body.rows].sort((a, b) => place ? of(a) - of(b) : of(a).localeCompare(of(b)));
  body.append(...(up ? rows : rows.reverse()));
};
"""


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
        f"{counted(report.processes, 'process', 'processes')}</p>",
        _figures(report),
        _bar(report),
        "<h2>What to do next</h2>",
        "<ul>" + "".join(f"<li>{_with_code(step)}</li>" for step in next_steps(report)) + "</ul>",
        "<h2>Operators</h2>",
        _operator_table(report.rows),
    ]
    if report.modules:
        parts += ["<h2>Whole modules</h2>", _module_table(report)]
    if report.aside_reasons:
        parts += ["<h2>Calls that stepped aside by rule</h2>", _aside_table(report)]
    facts = (f"{escape(name)} {escape(str(value))}" for name, value in report.environment.items())
    parts += ["<h2>Environment</h2>", f"<p>{', '.join(facts)}</p>"]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>eagercache: {escape(program)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + f"<script>{_SCRIPT}</script></body></html>\n"
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
    rest = max(0.0, report.process_seconds - total.now)
    parts = [
        ("kernels", "answered by kernels", total.by_kernels),
        ("native", "hooked, native for good", total.by_native),
        ("open", "hooked, no verdict yet or not asked for", total.undecided),
        ("rest", "all else: other operators, whole modules, Python, waiting", rest),
    ]
    whole = sum(seconds for _, _, seconds in parts) or 1.0
    bars = "".join(
        f'<span class="{name}" style="width:{seconds / whole:.3%}" title="{text}"></span>'
        for name, text, seconds in parts
    )
    keys = "".join(
        f'<span><i class="{name}"></i>{text}: {seconds:.2f} s</span>'
        for name, text, seconds in parts
    )
    return f'<h2>Where the time goes</h2><div class="bar">{bars}</div><div class="key">{keys}</div>'


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
            f"No kernel could be made for {counted(failed, 'kind')} of calls: `eagercache ls` has "
            "the reasons."
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


def _table(columns: Sequence[str], rows: Sequence[Sequence[tuple[str, object]]]) -> str:
    """Cells are (what is shown, what it is sorted by)."""
    head = "".join(f"<th><button>{escape(name)}</button></th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-value="{escape(str(value))}"'
            f"{' class=lost' if text.startswith('-') else ''}>{escape(text)}</td>"
            for text, value in row
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _number(value: int) -> tuple[str, object]:
    return f"{value:,}", value


def _seconds(value: float) -> tuple[str, object]:
    return (f"{value:.4f}" if value else ""), value


_VERDICTS = ("kernel", "native", "failed", NOT_YET)


def _operator_table(rows: Sequence[Row]) -> str:
    columns = ("operator", "calls", "on kernels", "native s", "now s", "saved s")
    return _table(
        (*columns, "kernels", *_VERDICTS[1:]),
        [
            [
                (row.op, row.op),
                _number(row.calls),
                (f"{row.hits / row.calls:.0%}" if row.calls else "", row.hits / (row.calls or 1)),
                _seconds(row.native),
                _seconds(row.now),
                _seconds(row.saved - row.lost),
                *(_number(row.decisions.get(name, 0)) for name in _VERDICTS),
            ]
            for row in rows
        ],
    )


def _module_table(report: Report) -> str:
    return _table(
        ("class", "modules", "by kernel", "by forward", "saved s", "refused", NOT_YET),
        [
            [
                (name, name),
                *(_number(sums[field]) for field in ("modules", "hits", "native")),
                _seconds(sums["seconds_saved"]),
                *(_number(sums[field]) for field in ("refused", "not_yet")),
            ]
            for name, sums in report.modules.items()
        ],
    )


def _aside_table(report: Report) -> str:
    rows = report.aside_reasons.items()
    return _table(("rule", "calls"), [[(name, name), _number(count)] for name, count in rows])
