"""Stores whose files were altered, with digests that are wrong and right."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

from attack.arena import VICTIM, Arena, Row, permanent_failures

_ODD = (b"", b"0", b"-1", b"1", b"4294967297", b"9223372036854775808", b"x", b"null", b"1e999")


def _flip(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 2, 16))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def _grow(data: bytearray, chance: random.Random) -> None:
    data += chance.randbytes(chance.choice((1, 64, 1 << 20)))


def _replace_by(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(bytes(1 << 20))
        os.truncate(path, 1 << 40)


def spoil(path: Path, chance: random.Random) -> str:
    """Alters a file so that its digest is wrong; says how."""
    how = chance.choice(("flip", "flip", "cut", "grow", "link", "pipe", "folder", "huge"))
    if how in ("flip", "cut", "grow"):
        data = bytearray(path.read_bytes())
        {"flip": _flip, "cut": _cut, "grow": _grow}[how](data, chance)
        mode = path.stat().st_mode
        path.chmod(0o600)
        path.write_bytes(data)
        path.chmod(mode)
    else:
        _replace_by(path, how)
    return how


def edit_rightly(path: Path, chance: random.Random) -> None:
    """Alters a value of a manifest and gives it the digest that fits."""
    lines = path.read_bytes().split(b"\n")[:-2]
    facts = [i for i, line in enumerate(lines) if line.startswith((b"fact ", b"cpu ", b"object "))]
    for _ in range(chance.choice((1, 1, 2))):
        place = chance.choice(facts)
        words = lines[place].split(b" ")
        word = chance.randrange(2, len(words)) if len(words) > 2 else 1
        text = words[word]
        digits = [i for i in range(len(text)) if text[i : i + 1].isdigit()]
        if digits and chance.random() < 0.8:
            at = chance.choice(digits)
            words[word] = text[:at] + chance.choice(_ODD) + text[at + 1 :]
        else:
            words[word] = chance.choice(_ODD)
        lines[place] = b" ".join(words)
    body = b"\n".join(lines) + b"\n"
    path.chmod(0o600)
    path.write_bytes(body + b"digest " + hashlib.sha256(body).hexdigest().encode() + b"\n")
    path.chmod(0o444)


def _files(store: Path) -> list[Path]:
    return sorted(
        path for path in store.glob("v1/**/*") if path.is_file() and path.stat().st_size > 0
    )


def wrong_digests(arena: Arena) -> Row:
    """Any file of the store."""
    row = Row("altered files of a store, wrong digests")
    for _ in range(16 if arena.quick else 400):
        store = arena.warm_copy()
        for path in arena.random.sample(_files(store), arena.random.choice((1, 2))):
            spoil(path, arena.random)
        row.count(arena.fork(VICTIM, store, "native", "2"))
        row.permanent += permanent_failures(store)
    return row


def right_digests(arena: Arena) -> Row:
    """Manifests whose digest was made again: whoever writes a store can run code anyway."""
    row = Row("altered manifests, right digests", known=True)
    for _ in range(16 if arena.quick else 2000):
        store = arena.warm_copy()
        for path in store.glob("v1/*/m/*/*"):
            edit_rightly(path, arena.random)
        row.count(arena.fork(VICTIM, store, "native", "2"))
    return row


SCENES = (wrong_digests, right_digests)
