"""The table of torch releases is one table, and `make matrix` says of each cell what was seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from eagercache.base import torch_versions
from matrix import __main__ as matrix
from matrix import beside, side_by_side
from matrix.cells import CELLS, ROOT
from matrix.smoke import FILES

pytestmark = pytest.mark.once


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f". scripts/common.sh; {command}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_scripts_read_the_rows_that_python_has() -> None:
    rows = [line.split() for line in _shell("torch_table").stdout.splitlines()]
    assert rows == [list(row) for row in torch_versions.TRIED]
    assert _shell("python_floor_of 2.15.0").stdout == "3.11\n"
    assert _shell("python_floor_of 2.15").stdout == _shell("python_floor_of 2x15.0").stdout == ""


def test_each_release_has_requirements_and_stands_where_people_look() -> None:
    for row in torch_versions.TRIED:
        assert f"\ntorch=={row.torch}\n" in Path(
            ROOT, "requirements", f"torch-{row.torch}.in"
        ).read_text(encoding="utf-8")
        assert f"\ntorch=={row.torch} " in Path(
            ROOT, "requirements", f"torch-{row.torch}.txt"
        ).read_text(encoding="utf-8")
        assert row.torch in Path(ROOT, "Makefile").read_text(encoding="utf-8")
        install = Path(ROOT, "docs", "how-to", "install.md").read_text(encoding="utf-8")
        assert f"| {torch_versions.minor(row.torch)} |" in install


def test_requirements_of_no_other_release_lie_about() -> None:
    files = {path.stem for path in Path(ROOT, "requirements").glob("torch-*")}
    assert files == {f"torch-{row.torch}" for row in torch_versions.TRIED}


@pytest.mark.parametrize(
    ("version", "tried"),
    [
        ("2.11.0+cu130", True),
        ("2.12.9", True),
        ("2.13.0a0+git12ab", False),
        ("2.15.0rc2", False),
        ("2.15.1.dev20261101+cpu", False),
        ("2.16.0", False),
        ("3.11.0", False),
    ],
)
def test_releases_of_a_tried_minor_are_known_and_nothing_else(version: str, tried: bool) -> None:
    assert torch_versions.is_tried(version) == tried


def test_an_unknown_torch_or_column_is_named_with_those_that_there_are() -> None:
    with pytest.raises(SystemExit, match=r"2\.9\.0: no torch of the table; there are 2\.11\.0"):
        matrix.chosen("2.9.0", [row.torch for row in torch_versions.TRIED], "torch of the table")
    assert matrix.chosen("", list(CELLS), "such column") == list(CELLS)
    assert matrix.chosen("import, bundle", list(CELLS), "column") == ["import", "bundle"]


def test_a_cell_says_what_was_seen_or_why_it_failed() -> None:
    def cell(code: str, found: str = r"^SAW (.*)$", limit: float = 60) -> matrix.Cell:
        return matrix.attempt("0.0.0", "cell", [sys.executable, "-c", code], limit, found)

    good = cell("print('SAW 3 calls')")
    assert (good.ok, good.said) == (True, "3 calls")
    bad = cell("import sys; print('begins'); print('noise', file=sys.stderr); assert 0, 'no hits'")
    assert (bad.ok, bad.said) == (False, "AssertionError: no hits")
    assert not cell("print('SAW 3 calls'); raise SystemExit(1)").ok
    late = cell("import time; time.sleep(60)", limit=0.2)
    assert (late.ok, late.said) == (False, "no end within 0 s")
    matrix.log_of("0.0.0", "cell").unlink()


def test_the_table_has_a_row_for_each_torch_and_python_and_reasons_below() -> None:
    cells = [
        matrix.Cell("2.11.0", "3.11", "import", True, "188 operators", 1.0),
        matrix.Cell("2.11.0", "3.11", "module", False, "AssertionError: no hits", 1.0),
        matrix.Cell("2.11.0", "3.12", "import", True, "188 operators", 1.0),
    ]
    assert matrix.table(cells).splitlines() == [
        "| torch | Python | import | module |",
        "| --- | --- | --- | --- |",
        "| 2.11.0 | 3.11 | ok | no |",
        "| 2.11.0 | 3.12 | ok | not run |",
        "",
        "- torch 2.11.0, Python 3.11, module: AssertionError: no hits",
    ]


def test_what_lies_beside_torch_is_seen_and_nothing_of_eagercache(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("torch", "setuptools", "eagercache", "eagercache-0.1.0.dist-info", "pip"):
        (source / name).mkdir(parents=True)
    (source / "eagercache-dev.pth").touch()
    (target / "setuptools").mkdir(parents=True)
    beside.link_packages(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["setuptools", "torch"]
    assert (target / "torch").resolve() == source / "torch"
    assert not (target / "setuptools").is_symlink()


def test_a_torch_that_gets_nothing_from_the_shared_store_fails_and_so_does_a_wrong_answer() -> None:
    served = side_by_side.Visit("2.11.0", 200, 190, 0, 10, 0, 1.0)
    other = served._replace(torch="2.12.1", loaded=3, compiles=7)
    versions = ["2.11.0", "2.12.1"]
    assert not side_by_side.failed([served, served, other], versions)
    assert side_by_side.failed([served, other._replace(loaded=0)], versions)
    assert side_by_side.failed([served, other, other._replace(wrong=1)], versions)
    assert side_by_side.failed([served, other, other._replace(error="no end")], versions)
    assert side_by_side.table([served, served, other._replace(error="no end")]).splitlines() == [
        "| torch | processes | calls | by kernels | compiled | taken from the store | wrong |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 2.11.0 | 2 | 400 | 380 | 0 | 20 | 0 |",
        "| 2.12.1 | 1 | 200 | 190 | 7 | 3 | 0 |",
        "",
        "- torch 2.12.1: no end",
    ]


def test_on_a_machine_that_is_too_busy_each_torch_still_meets_what_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        side_by_side,
        "one_visit",
        lambda torch, python, store: side_by_side.Visit(torch, 200, 190, 10, 0, 0, 1.0),
    )
    pythons = {"2.11.0": Path("a"), "2.12.1": Path("b")}
    visits = side_by_side.load(pythons, Path("store"), seconds=0.0)
    assert sorted(each.torch for each in visits) == ["2.11.0", "2.11.0", "2.12.1", "2.12.1"]
    assert len(side_by_side.load({"2.11.0": Path("a")}, Path("store"), seconds=0.2)) > 2


def test_the_smoke_test_names_files_that_are_there() -> None:
    assert all(Path(ROOT, "tests", "python", name).is_file() for name in FILES)
