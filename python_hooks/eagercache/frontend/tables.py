"""Tables of what the frontend answers, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# A notebook keeps all that is shown; --json and the objects themselves have the rest.
MOST_ROWS = 200


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as HTML; numbers stand to the right. It takes the colours that are around it."""
    shown = list(rows)
    head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in shown[:MOST_ROWS])
    left = len(shown) - MOST_ROWS
    more = f"<p>and {left:,} more</p>" if left > 0 else ""
    return (
        f"<p>{escape(title)}</p><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>{more}"
    )


def _cell(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td style="text-align:right">{_number(value)}</td>'
    return f'<td style="text-align:left">{escape("" if value is None else str(value))}</td>'


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    # Two places would say of a small number that it is nothing.
    return f"{value:.2g}" if 0 < abs(value) < 0.095 else f"{value:,.2f}"
