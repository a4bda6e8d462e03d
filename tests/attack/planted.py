"""Somebody else's code where a worker might import or include it."""

from __future__ import annotations

from pathlib import Path

from attack.arena import VICTIM, Arena, Row

_CODE = "open({mark!r}, 'a').write('ran\\n')\nraise ImportError('planted')\n"
_MODULES = ("resource", "torch", "ctypes", "sitecustomize", "usercustomize", "numpy", "json")
_LATE = """
import os, sys
sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
"""


def _plant(folder: Path, mark: Path) -> None:
    for name in _MODULES:
        (folder / f"{name}.py").write_text(_CODE.format(mark=str(mark)))


def current_folder(arena: Arena) -> Row:
    """Modules in a folder that all may write, where the program is."""
    row = Row("planted modules in the current folder")
    shared, mark = arena.new_folder(), arena.new_folder() / "mark"
    _plant(shared, mark)
    shared.chmod(0o1777)
    store = arena.new_store()
    body = f"import os, sys\nos.chdir({str(shared)!r})\n{_LATE}{VICTIM}"
    with arena.watching(row):
        ran = arena.start(body, store, "wait", "1", CUDA_VISIBLE_DEVICES="").finish(120)
    row.count(ran)
    row.foreign += mark.exists()
    row.permanent += permanent(store)
    return row


def store_folders(arena: Arena) -> Row:
    """Files in PYTHON and HEADERS of a store that all could write for a while."""
    row = Row("planted PYTHON and HEADERS")
    mark = arena.new_folder() / "mark"
    for place in ("PYTHON", "HEADERS"):
        store = arena.new_store()
        folder = store / place
        folder.mkdir()
        folder.chmod(0o777)
        _plant(folder, mark)
        (folder / "header.h").write_text('#error "planted"\n')
        (folder / "header.h.gch").write_bytes(b"gpch" + bytes(4096))
        for name in ("bits", "cpp_prefix.h"):
            (folder / name).write_text('#error "planted"\n')
        with arena.watching(row):
            row.count(arena.fork(VICTIM, store, "wait", "1", workers=True, timeout=120))
        row.foreign += mark.exists()
        row.permanent += permanent(store)
    return row


def permanent(store: Path) -> int:
    """Failures that are for good."""
    from attack.arena import permanent_failures

    return permanent_failures(store)


SCENES = (current_folder, store_folders)
