"""Edits of a manifest that know its structure: well formed, and with a right digest."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

_NUMBERS = (0, -1, 1, 2, 3, 7, 64, 255, 4096, 1 << 16, 1 << 31, 1 << 40, 1 << 62)
_NUMBERS += ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63))
_DTYPES = ("bool", "uint8", "int16", "int64", "float16", "float32", "float64", "complex128")
_WORDS = ("", "bare", "scalars", "shapes", "container", "cuda", "module", "module_sizes", "system")
_ODD = (None, True, False, 1.5, "", [], {}, [[]], "\\x00")

Rows = list[tuple[str, str]]  # (word, rest) of each line but the digest's


def read(text: str) -> Rows:
    """The lines of a manifest, without its digest."""
    rows = []
    for line in text.splitlines()[:-1]:
        word, _, rest = line.partition(" ")
        rows.append((word, rest))
    return rows


def write(rows: Rows) -> str:
    """A manifest's text, with a right digest; facts are sorted, as the format wants it."""
    facts = sorted(row for row in rows if row[0] == "fact")
    lines = [f"{word} {rest}\n" for word, rest in (*(r for r in rows if r[0] != "fact"), *facts)]
    body = "".join(lines)
    return f"{body}digest {hashlib.sha256(body.encode()).hexdigest()}\n"


class Editor:
    """Draws edits. ``others`` are the lines of other entries, of which parts may be taken."""

    def __init__(self, chance: random.Random, others: Sequence[Rows]) -> None:
        self._chance = chance
        self._others = others

    def edited(self, rows: Rows) -> tuple[Rows, str]:
        """The lines with one to three edits, and what was done."""
        edited, said = [*rows], []
        for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
            edit = self._chance.choices(
                (self._fact, self._taken_fact, self._line, self._object, self._body),
                (10, 3, 2, 3, 1),
            )[0]
            edited, what = edit(edited)
            said.append(what)
        return edited, "; ".join(said)

    # ---- values inside of facts ------------------------------------------------------------------

    def _fact(self, rows: Rows) -> tuple[Rows, str]:
        """Changes something inside of a fact: of launch data more often than of the others."""
        places = [at for at, (word, _) in enumerate(rows) if word == "fact"]
        weights = [12 if _is_launch_data(rows[at][1]) else 1 for at in places]
        at = self._chance.choices(places, weights)[0]
        name, _, value = rows[at][1].partition(" ")
        try:
            parsed = json.loads(value)
        except ValueError:
            changed = self._word(value)
        else:
            parsed = self._changed(parsed)
            changed = json.dumps(parsed, sort_keys=True, separators=(",", ":"))
        changed = "".join(c if c.isprintable() and c != "\\" else f"\\x{ord(c) & 127:02x}"
                          for c in changed)  # fmt: skip
        return _replaced(rows, at, f"{name} {changed}"), f"{name} is {changed[:200]}"

    def _word(self, value: str) -> str:
        return self._chance.choice((*_WORDS, *_DTYPES, value[1:], value + "0", value[::-1]))

    def _changed(self, value: Any) -> Any:
        """A copy with one thing changed, somewhere inside."""
        if isinstance(value, dict) and value and self._chance.random() < 0.9:
            key = self._chance.choice(list(value))
            if self._chance.random() < 0.1:
                return {name: inside for name, inside in value.items() if name != key}
            return {**value, key: self._changed(value[key])}
        if isinstance(value, list) and self._chance.random() < 0.85:
            return self._changed_list(value)
        if isinstance(value, bool):
            return self._chance.choice((not value, 0, 1, 2))
        if isinstance(value, int):
            near = (value - 1, value + 1, value * 2, value // 2, -value, value * 8)
            return self._chance.choice((*near, *near, *_NUMBERS))
        if isinstance(value, str):
            if value in _DTYPES:
                return self._chance.choice(_DTYPES)
            return self._word(value)
        return self._chance.choice(_ODD)

    def _changed_list(self, value: list[Any]) -> list[Any]:
        if not value:
            return [self._chance.choice(_NUMBERS)]
        at = self._chance.randrange(len(value))
        how: Callable[[], list[Any]] = self._chance.choice(
            (
                lambda: [*value[:at], self._changed(value[at]), *value[at + 1 :]],
                lambda: [*value[:at], self._changed(value[at]), *value[at + 1 :]],
                lambda: [*value[:at], self._changed(value[at]), *value[at + 1 :]],
                lambda: [*value, value[at]],
                lambda: [*value[:at], *value[at + 1 :]],
                lambda: value[::-1],
                lambda: [],
            )
        )
        return how()

    # ---- lines -----------------------------------------------------------------------------------

    def _taken_fact(self, rows: Rows) -> tuple[Rows, str]:
        """Another entry's value of a fact."""
        other = self._chance.choice(self._others)
        mine = {
            rest.partition(" ")[0]: at for at, (word, rest) in enumerate(rows) if word == "fact"
        }
        taken = [rest for word, rest in other if word == "fact" and rest.partition(" ")[0] in mine]
        launch = [rest for rest in taken if _is_launch_data(rest)] or taken
        if not launch:
            return self._line(rows)
        rest = self._chance.choice(launch)
        name = rest.partition(" ")[0]
        return _replaced(rows, mine[name], rest), f"{name} of another entry: {rest[:200]}"

    def _line(self, rows: Rows) -> tuple[Rows, str]:
        """A line left out or doubled: a fact, a feature of the processor, an object."""
        places = [at for at, (word, _) in enumerate(rows) if word in ("fact", "cpu", "object")]
        at = self._chance.choice(places)
        name = " ".join(rows[at])[:40]
        if self._chance.random() < 0.6:
            return [*rows[:at], *rows[at + 1 :]], f"without {name}"
        return [*rows[: at + 1], *rows[at:]], f"twice {name}"

    def _object(self, rows: Rows) -> tuple[Rows, str]:
        """Another entry's object, another kind or size, or the objects in another order."""
        places = [at for at, (word, _) in enumerate(rows) if word == "object"]
        if not places:
            return self._fact(rows)
        at = self._chance.choice(places)
        kind, digest, size = rows[at][1].split()
        theirs = [rest for rows in self._others for word, rest in rows if word == "object"]
        how = self._chance.randrange(5)
        if how < 2 and theirs:
            taken = self._chance.choice(theirs)
            return _replaced(rows, at, taken), f"object is {taken}"
        if how == 2:
            size = str(max(0, int(size) + self._chance.choice((-1, 1, -int(size), 1 << 40))))
        elif how == 3:
            kind = "cubin" if kind == "so" else "so"
        elif len(places) > 1:
            swapped = [*rows]
            swapped[places[0]], swapped[places[1]] = rows[places[1]], rows[places[0]]
            return swapped, "objects in another order"
        else:
            digest = digest[::-1]
        return _replaced(rows, at, f"{kind} {digest} {size}"), f"object is {kind} {digest} {size}"

    def _body(self, rows: Rows) -> tuple[Rows, str]:
        """All of another entry, below this one's key."""
        other = self._chance.choice(self._others)
        own = next(rest for word, rest in rows if word == "key")
        taken = [(word, own if word == "key" else rest) for word, rest in other]
        key = next(rest for word, rest in other if word == "key")
        return taken, f"all of the entry {key}"


def _is_launch_data(rest: str) -> bool:
    name = rest.partition(" ")[0]
    return name in ("form", "launch_plan", "output_strides", "inputs", "ranges", "outputs",
                    "writes", "checks", "sizes", "choice", "training", "guards")  # fmt: skip


def _replaced(rows: Rows, at: int, rest: str) -> Rows:
    return [*rows[:at], (rows[at][0], rest), *rows[at + 1 :]]
