"""Results computed from files are remembered exactly as long as the files are the same."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import run_program
from eagercache.base import environment, facts, private_file
from eagercache.base.facts import Facts

pytestmark = pytest.mark.once


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private store directory, in which a file counts as settled at once."""
    monkeypatch.setattr(facts, "_SETTLED", 0)
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    return path


class Computed:
    """Computes a file's length, and counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times = 0

    def __call__(self) -> str:
        self.times += 1
        return self.path.read_text()


def recall(folder: Path, compute: Computed) -> str:
    """What a process of its own would get and leave behind."""
    remembered = Facts(folder)
    result: str = remembered.recall("content", [str(compute.path)], compute)
    remembered.save()
    return result


def write(path: Path, text: str) -> None:
    path.write_text(text)
    deadline = time.monotonic() + 60
    while path.stat().st_ctime_ns % 1_000_000_000 == 0 and time.monotonic() < deadline:
        path.chmod(0o600)


def test_a_result_is_computed_once_for_all_processes(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "file"
    write(file, "one")
    compute = Computed(file)
    assert [recall(folder, compute) for _ in range(3)] == ["one"] * 3
    assert compute.times == 1


@pytest.mark.parametrize("how", ["in place", "by another file", "by a link"])
def test_other_content_of_the_same_size_and_time_is_seen(
    tmp_path: Path, folder: Path, how: str
) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    write(file, "one")
    compute = Computed(file)
    assert recall(folder, compute) == "one"
    before = file.stat()
    if how == "in place":
        write(file, "two")
    else:
        write(other, "two")
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        if how == "by another file":
            other.rename(file)
        else:
            file.unlink()
            file.symlink_to(other)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert recall(folder, compute) == "two"


def test_what_changed_a_moment_ago_is_not_remembered(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "_SETTLED", 3600 * 10**9)
    file = tmp_path / "file"
    write(file, "one")
    compute = Computed(file)
    assert recall(folder, compute) == recall(folder, compute) == "one"
    assert compute.times == 2


def test_what_changes_while_it_is_read_is_not_remembered(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "file"
    write(file, "one")

    class Changes(Computed):
        def __call__(self) -> str:
            result = super().__call__()
            write(file, "two")
            return result

    assert recall(folder, Changes(file)) == "one"
    assert recall(folder, Computed(file)) == "two"


def _whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files have times as an image builder writes them."""
    real = os.fstat

    def fstat(descriptor: int) -> Any:
        status = real(descriptor)
        names = ("st_dev", "st_size", "st_mode", "st_uid")
        same = {name: getattr(status, name) for name in names}
        return SimpleNamespace(st_ino=1, st_mtime_ns=10**9, st_ctime_ns=10**9, **same)

    monkeypatch.setattr(facts.os, "fstat", fstat)


def test_times_of_an_image_builder_are_not_trusted(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    _whole_seconds(monkeypatch)
    compute = Computed(file)
    for text in ("one", "one", "two"):
        file.write_text(text)
        assert recall(folder, compute) == text
    assert compute.times == 2


def test_a_program_is_known_by_its_build_id(tmp_path: Path) -> None:
    module = Path(str(environment.core.__file__)) if environment.core is not None else None
    assert module is not None
    program = Path(sys.executable).resolve()
    with program.open("rb") as one, module.open("rb") as other:
        ids = [facts._build_id(file.fileno()) for file in (one, other)]
        marks = [facts._mark(file.fileno(), 64) for file in (one, other)]
    assert all(mark.startswith(("build id ", "crc ")) for mark in marks)
    assert ids[0] != ids[1] or ids == ["", ""]
    text = tmp_path / "text"
    text.write_text("one")
    with text.open("rb") as file:
        assert facts._mark(file.fileno(), 3).startswith("crc ")


def test_the_build_id_is_the_one_that_the_linker_wrote(tmp_path: Path) -> None:
    note = b"\x04\0\0\0" + b"\x14\0\0\0" + b"\x03\0\0\0" + b"GNU\0" + bytes(range(20))
    other = b"\x04\0\0\0" + b"\x04\0\0\0" + b"\x01\0\0\0" + b"GNU\0" + b"abcd"
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    header[32] = 64  # where the program headers begin
    header[54], header[56] = 56, 2
    load = facts._SEGMENT.pack(1, 5, 0, 0, 0, 0, 0, 0)
    notes = facts._SEGMENT.pack(4, 4, 64 + 112, 0, 0, len(other + note), 0, 0)
    path = tmp_path / "program"
    path.write_bytes(bytes(header) + load + notes + other + note)
    with path.open("rb") as file:
        assert facts._build_id(file.fileno()) == "build id " + bytes(range(20)).hex()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_neither_read_nor_written(
    tmp_path: Path, folder: Path, mode: int
) -> None:
    file = tmp_path / "file"
    write(file, "one")
    recall(folder, Computed(file))
    (folder / facts.NAME).rename(tmp_path / "kept")
    folder.chmod(mode)
    recall(folder, Computed(file))
    assert list(folder.iterdir()) == []
    (tmp_path / "kept").rename(folder / facts.NAME)
    compute = Computed(file)
    recall(folder, compute)
    assert compute.times == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1, "facts": 3}', '{"version": 9}'])
def test_a_file_that_is_no_record_counts_for_nothing(
    tmp_path: Path, folder: Path, content: str
) -> None:
    (folder / facts.NAME).write_text(content)
    file = tmp_path / "file"
    write(file, "one")
    compute = Computed(file)
    assert recall(folder, compute) == recall(folder, compute) == "one"
    assert compute.times == 1


def test_a_record_that_somebody_else_planted_as_a_link_is_not_followed(
    tmp_path: Path, folder: Path
) -> None:
    file = tmp_path / "file"
    write(file, "one")
    recall(folder, Computed(file))
    (folder / facts.NAME).rename(tmp_path / "elsewhere")
    (folder / facts.NAME).symlink_to(tmp_path / "elsewhere")
    compute = Computed(file)
    recall(folder, compute)
    assert compute.times == 1


def test_the_environment_key_is_the_same_computed_and_remembered(folder: Path) -> None:
    plain = environment.environment_text()
    first = Facts(folder)
    assert environment.environment_text(facts=first) == plain
    first.save()
    known = json.loads((folder / facts.NAME).read_text())["facts"]
    assert {name.split("\n")[0] for name in known} >= {"sha256", "record", "sources"}
    assert environment.environment_text(facts=Facts(folder)) == plain


def test_a_second_process_runs_no_program_and_makes_no_service_before_it_compiles(
    warm_cache: Path,
) -> None:
    code = """
    import sys, torch
    started = []
    sys.addaudithook(lambda name, _: started.append(name) if name == "subprocess.Popen" else None)
    import eagercache
    report(active=eagercache.enable("var").active, started=started,
           service="eagercache.service.service" in sys.modules)
    """
    result = run_program(code, warm_cache)
    assert (result["active"], result["started"], result["service"]) == (True, [], False)


def test_what_a_killed_process_left_blocks_nobody_and_goes_after_an_hour(folder: Path) -> None:
    left = {name: folder / f"{facts.NAME}.new{name}" for name in ("", "0f", "1e", "fresh")}
    for path in left.values():
        path.write_text("{")
    for name, hours in (("", 2000), ("0f", -2), ("1e", 2000)):
        when = time.time() + 3600 * hours
        os.utime(left[name], (when, when))
    private_file.write(folder, facts.NAME, {"known": 1})
    assert private_file.read(folder, facts.NAME) == {"known": 1}
    assert sorted(path.name for path in folder.iterdir()) == ["FACTS", "FACTS.newfresh"]


def test_what_cannot_be_written_leaves_nothing(folder: Path) -> None:
    with pytest.raises(TypeError):
        private_file.write(folder, facts.NAME, {"known": object()})
    assert list(folder.iterdir()) == []
