"""Makes C++ of the table of denied operators: denied_operators.py TABLE.json OUTPUT.cc."""

from __future__ import annotations

import json
import sys
from pathlib import Path

FIELDS = ("op", "dispatch_key", "dtype", "reason")
ALL = {*FIELDS, "case", "upstream"}


def main(table: str, output: str) -> None:
    """Writes the rows as a constant array; a malformed table ends the build."""
    rows = json.loads(Path(table).read_text(encoding="utf-8"))
    lines = []
    for row in rows:
        if set(row) != ALL or not row["op"] or not row["reason"] or not row["case"]:
            sys.exit(f"{table}: a row must have {sorted(ALL)}, and an op, a reason and a case")
        # A JSON string is a C++ string literal where it has neither control nor other characters.
        texts = [row[field] for field in FIELDS]
        if not all(text.isascii() and text.isprintable() for text in texts):
            sys.exit(f"{table}: {row['op']}: only printable ASCII")
        lines.append("    {" + ", ".join(json.dumps(text) for text in texts) + "},\n")
    text = (
        "// Generated from denied_operators.json.\n"
        '#include "dispatcher/operators/denied_operators.h"\n\n'
        "#include <array>\n\n"
        "namespace eagercache {\n\n"
        "std::span<const DeniedRow> denied_rows() noexcept {\n"
        # A constant: a thread may ask while static objects are destroyed.
        f"  static constexpr std::array<DeniedRow, {len(rows)}> kRows{{{{\n"
        + "".join(lines)
        + "  }};\n"
        "  return kRows;\n"
        "}\n\n"
        "}  // namespace eagercache\n"
    )
    Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
