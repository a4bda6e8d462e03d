"""Somebody else's code where a worker might import, include or load it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import py_compile
from collections.abc import Callable
from pathlib import Path

import torch

from attack.arena import VICTIM, Arena, Row, permanent_failures

_FOREIGN_USER = 12345
_CODE = "open({mark!r}, 'a').write('ran\\n')\nraise ImportError('planted')\n"
_MODULES = ("resource", "torch", "ctypes", "sitecustomize", "usercustomize", "numpy", "json")
# As a program that does not import from the folder that it is in: its worker must not either.
_SAFE = """
import os, sys
sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
"""
# As in an image whose packages have no bytecode: workers keep it in the store's folder PYTHON.
_NO_BYTECODE = 'import sys\nsys.pycache_prefix = "/nowhere"\n'
_HEADER = """
#include <fcntl.h>
__attribute__((constructor)) static void planted() {{ creat({mark}, 0600); }}
"""
_LATER = (("exp", "abs"), ("tanh",), ("log1p",), ("tanh",))
# More calls, so that the header of bare kernels is made, and used.
_SIZES = """
import json, sys
import torch
torch.set_num_threads(1)
x = torch.randn(64, 96)
functions = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid,
             "tanh": torch.tanh, "_softmax": lambda x: torch.softmax(x, -1),
             "exp": torch.exp, "abs": torch.abs, "log1p": torch.log1p,
             "var.correction": lambda x: torch.var(x, -1)}
names = sys.argv[1:]
expected = [functions[name](x) for name in names]
import eagercache
eagercache.enable(names, on_miss="wait", choose="always")
right = all([torch.allclose(functions[name](x), y, rtol=1e-5, atol=1e-6, equal_nan=True)
             for name, y in zip(names * 2, expected * 2)])
print("ATTACK " + json.dumps({"right": right, "hits": eagercache.stats().hits}))
"""


def current_folder(arena: Arena) -> Row:
    """Modules in a folder that all may write, where the program is."""
    row = Row("planted modules in the current folder")
    shared, mark = arena.new_folder(), arena.new_folder() / "mark"
    for name in _MODULES:
        (shared / f"{name}.py").write_text(_CODE.format(mark=str(mark)))
    shared.chmod(0o1777)
    store = arena.new_store()
    body = f"import os, sys\nos.chdir({str(shared)!r})\n{_SAFE}{VICTIM}"
    with arena.watching(row):
        row.count(arena.start(body, store, "wait", "2").finish())
    row.foreign += mark.exists()
    row.permanent += permanent_failures(store)
    return row


def _give_away(folder: Path) -> None:
    """All below a folder looks as if another user had put it there."""
    for path in [folder, *folder.rglob("*")]:
        if os.geteuid() == 0:
            os.chown(path, _FOREIGN_USER, _FOREIGN_USER)
        else:
            path.chmod(0o777 if path.is_dir() else 0o666)


def bytecode(arena: Arena) -> Row:
    """Compiled sources in PYTHON that somebody else put there while all could write."""
    row = Row("planted bytecode in PYTHON")
    store, mark = arena.new_store(), arena.new_folder() / "mark"
    source = arena.new_folder() / "planted.py"
    source.write_text(_CODE.format(mark=str(mark)))
    package = Path(importlib.util.find_spec("eagercache").origin or "").parent
    for module in (Path(torch.__file__).parent / "_inductor/lowering.py", package / "base/log.py"):
        target = store / "PYTHON" / str(module.parent).lstrip("/")
        target.mkdir(parents=True)
        name = Path(importlib.util.cache_from_source(str(module))).name
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(source), str(target / name), invalidation_mode=mode)
    _give_away(store / "PYTHON")
    with arena.watching(row):
        started = arena.start(
            _NO_BYTECODE + VICTIM, store, "wait", "2", PYTHONDONTWRITEBYTECODE="1"
        )
        row.count(started.finish())
    row.foreign += mark.exists()
    return row


def _spoil_text(folder: Path, mark: Path) -> None:
    header = folder / "bare.h"
    header.write_text(header.read_text() + _HEADER.format(mark=json.dumps(str(mark))))


def _spoil_compiled(folder: Path, mark: Path) -> None:
    _spoil_text(folder, mark)
    (folder / "bare.h.gch").unlink()
    (folder / "bare.h.gch").write_bytes((folder / "bare.h").read_bytes())


def headers(arena: Arena) -> Row:
    """A header in HEADERS with a line more, by another user, or with a digest that does not fit."""
    row = Row("planted HEADERS")
    store, mark = arena.new_store(), arena.new_folder() / "mark"
    with arena.watching(row):
        row.count(
            arena.start(_SIZES, store, "silu", "sigmoid", "_softmax", "var.correction").finish()
        )
        made = sorted(path.parent for path in store.glob("HEADERS/*/bare.h"))
        if not made:
            row.note = "no header was made, so none was planted"
            return row
        spoils: list[tuple[Callable[[Path, Path], None], bool]] = [(_spoil_compiled, True)]
        if not arena.quick:
            spoils += [(_spoil_text, True), (_spoil_text, False), (_spoil_compiled, False)]
        for number, (spoil, foreign) in enumerate(spoils):
            for folder in [header.parent for header in store.glob("HEADERS/*/bare.h")]:
                spoil(folder, mark)
                if foreign:
                    _fit_digests(folder)
                    _give_away(folder)
            row.count(arena.start(_SIZES, store, *_LATER[number]).finish())
            row.foreign += mark.exists()
    row.permanent += permanent_failures(store)
    return row


def _fit_digests(folder: Path) -> None:
    """Who writes the header writes its digests too."""
    known = json.loads((folder / "sources").read_text())
    for name in known["digests"]:
        known["digests"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "sources").write_text(json.dumps(known))


SCENES = (current_folder, bytecode, headers)
