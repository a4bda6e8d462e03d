"""The tables of the report's page; each is sorted by a click on a head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from eagercache.calls.texts import ASIDE_RULES, NOT_YET
from eagercache.cli.reports.program_report import Report, Row

# What a cell shows, and what it is sorted by.
Cell = tuple[str, object]


def _table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, words: int = 1) -> str:
    """The first ``words`` columns hold words, and the others numbers."""
    head = "".join(
        f"<th{' class=text' if place < words else ''}><button>{escape(name)}</button></th>"
        for place, name in enumerate(columns)
    )
    body = "".join(
        f"<tr>{''.join(_cell(*cell, word=place < words) for place, cell in enumerate(row))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _cell(text: str, value: object, *, word: bool) -> str:
    kind = " class=text" if word else " class=lost" if text.startswith("-") else ""
    return f'<td data-value="{escape(str(value))}"{kind}>{escape(text)}</td>'


def _word(text: str) -> Cell:
    return text, text


def _number(value: int) -> Cell:
    return f"{value:,}", value


def _seconds(value: float) -> Cell:
    return (f"{value:.4f}" if value else ""), value


def _share(value: float | None) -> Cell:
    return ("" if value is None else f"{value:.0%}"), value or 0.0


_VERDICTS = ("kernel", "native", "failed", NOT_YET)


def operator_table(rows: Sequence[Row]) -> str:
    """Where time goes, by operator. Bandwidth has columns where a kernel is bound by it."""
    columns = ("operator", "calls", "on kernels", "native s", "now s", "saved s")
    moves = any(row.moved_seconds for row in rows)
    return _table(
        (*columns, "kernels", *_VERDICTS[1:], *(("GB/s", "of a copy") if moves else ())),
        [
            [
                _word(row.op),
                _number(row.calls),
                _share(row.hits / row.calls if row.calls else None),
                _seconds(row.native),
                _seconds(row.now),
                _seconds(row.saved - row.lost),
                *(_number(row.decisions.get(name, 0)) for name in _VERDICTS),
                *(_bandwidth(row) if moves else ()),
            ]
            for row in rows
        ],
    )


def _bandwidth(row: Row) -> tuple[Cell, Cell]:
    speed = row.gigabytes_per_second
    return (("" if speed is None else f"{speed:.1f}"), speed or 0.0), _share(row.share_of_copy)


def module_table(report: Report) -> str:
    """Calls of whole modules, by class."""
    return _table(
        ("class", "modules", "by kernel", "by forward", "saved s", "refused", NOT_YET),
        [
            [
                _word(name),
                *(_number(sums[field]) for field in ("modules", "hits", "native")),
                _seconds(sums["seconds_saved"]),
                *(_number(sums[field]) for field in ("refused", "not_yet")),
            ]
            for name, sums in report.modules.items()
        ],
    )


def aside_table(report: Report) -> str:
    """Calls that no kernel may answer, by rule and operator."""
    return _table(
        ("rule", "because", "operator", "calls", "timed", "about s"),
        [
            [
                *(_word(text) for text in (row.rule, ASIDE_RULES.get(row.rule, ""), row.op)),
                *(_number(count) for count in (row.calls, row.timed)),
                _seconds(row.seconds or 0.0),
            ]
            for row in report.asides
        ],
        words=3,
    )


def native_table(report: Report) -> str:
    """What native answers for good, by operator and reason."""
    return _table(
        ("operator", "verdict", "why", "calls"),
        [
            [_word(op), _word(verdict), _word(reason), _number(calls)]
            for (op, verdict, reason), calls in report.why_native.items()
        ],
        words=3,
    )


def difference_table(report: Report) -> str:
    """Kernels whose answer differed from native's."""
    rows = [
        [_word(one["op"] or one["digest"][:12]), _word(one["reason"])] for one in report.differences
    ]
    return _table(("kernel", "what was found"), rows, words=2)


def compile_table(compiles: Iterable[Mapping[str, Any]]) -> str:
    """What was compiled, in the order in which it began."""
    return _table(
        ("operator or module", "verdict", "why", "began s", "took s", "CPU s"),
        [
            [
                *(_word(one[name]) for name in ("op", "verdict", "reason")),
                *(
                    (f"{seconds:.2f}", seconds)
                    for seconds in (one["began"], one["ended"] - one["began"], one["cpu_seconds"])
                ),
            ]
            for one in compiles
        ],
        words=3,
    )
