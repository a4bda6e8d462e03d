"""Used functions and guards, which a kernel was traced from, as the text of an entry's fact."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

# A model of many layers reads the same of each: as text that passes a manifest's 64 KiB.
_PLAIN_CHARACTERS = 4096
_COMPRESSED = "zlib:"
_MOST_BYTES = 1 << 24


def rows_text(rows: list[list[str]]) -> str:
    """What a kernel was traced from (used functions and guards), as an entry's fact has it."""
    text = json.dumps(rows, separators=(",", ":"))
    if len(text) <= _PLAIN_CHARACTERS:
        return text
    return _COMPRESSED + base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


def rows_in(text: str) -> list[list[str]]:
    """The inverse of `rows_text`. Raises ValueError for something else."""
    if text.startswith(_COMPRESSED):
        try:
            packed = base64.b64decode(text[len(_COMPRESSED) :], validate=True)
            inflate = zlib.decompressobj()
            text = inflate.decompress(packed, _MOST_BYTES).decode()
        except (binascii.Error, zlib.error) as error:
            raise ValueError(f"no rows of used functions: {error}") from error
        if not inflate.eof:
            raise ValueError("the rows of used functions end early, or are too many")
    rows = json.loads(text)
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise ValueError("no rows of used functions")
    return rows


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 4 and all(isinstance(part, str) for part in row)
