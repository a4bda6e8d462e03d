"""The command line where little works: no torch, no output, odd places, odd entries of a store."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import PACKAGE_ROOT, clean_environment
from eagercache import _C
from eagercache.base import environment
from eagercache.cli import main as cli

pytestmark = pytest.mark.once


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def command(
    folder: Path, *words: str, path: str = PACKAGE_ROOT, **more: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagercache", *words],
        env=clean_environment(PYTHONPATH=path, EAGERCACHE_DIR=str(folder / "store")),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **{"stdout": subprocess.PIPE, **more},
    )


# ---- a torch that cannot be imported -------------------------------------------------------------


@pytest.fixture(
    params=["raise OSError('libcudart.so.13: cannot open shared object file')", "", "x = ("]
)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A PYTHONPATH with a broken torch, or with something else of that name."""
    (tmp_path / "fake" / "torch").mkdir(parents=True)
    (tmp_path / "fake" / "torch" / "__init__.py").write_text(request.param)
    return os.pathsep.join([str(tmp_path / "fake"), PACKAGE_ROOT])


@pytest.mark.parametrize("options", [[], ["--report"]])
def test_a_program_is_as_without_us_beside_a_broken_torch(
    broken: str, tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "program.py").write_text(
        "import subprocess, sys\n"
        "try:\n    import torch\n"
        "except BaseException as error:\n    print(type(error).__name__)\n"
        "subprocess.run([sys.executable, '-c', 'import contextlib, sys\\n'\n"
        "    'with contextlib.suppress(BaseException): import torch'])\n"
        "print('runs')\nsys.exit(7)\n"
    )
    native = subprocess.run(
        [sys.executable, "program.py"],
        env=clean_environment(PYTHONPATH=broken),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    done = command(tmp_path, "run", *options, "program.py", path=broken)
    assert (done.returncode, done.stdout) == (7, native.stdout), done.stderr
    if native.stdout == "runs\n":  # it is imported, and is no torch: said once
        assert done.stderr.count("\n") == 1, done.stderr
        assert "eagercache: is not active: torch cannot be used" in done.stderr
    elif not options:
        assert done.stderr == ""


@pytest.mark.parametrize("options", [[], ["--report"], ["--modules", "auto"]])
def test_the_process_before_a_program_imports_no_torch(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "fake" / "torch").mkdir(parents=True)
    (tmp_path / "fake" / "torch" / "__init__.py").write_text("print('torch is imported')\n")
    (tmp_path / "program.py").write_text("print('runs')\n")
    path = os.pathsep.join([str(tmp_path / "fake"), PACKAGE_ROOT])
    done = command(tmp_path, "run", *options, "program.py", path=path)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


def test_doctor_names_a_broken_torch(broken: str, tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--json", path=broken)
    assert done.returncode == 1 and not done.stderr
    (problem,) = [check for check in json.loads(done.stdout) if check["state"] == "problem"]
    assert problem["name"] == "torch" and problem["text"].startswith("torch cannot be used: ")


def test_commands_say_in_one_line_that_torch_is_broken(broken: str, tmp_path: Path) -> None:
    (tmp_path / "trace").touch()
    for words in (["stats"], ["verify"], ["warm", "trace"], ["bundle", "keygen", "key"]):
        done = command(tmp_path, *words, path=broken)
        assert done.returncode == 2, (words, done.stderr)
        assert done.stderr.startswith("Error: torch cannot be used: "), words
        assert done.stderr.count("\n") == 1, words


# ---- output and places ---------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = command(tmp_path, "doctor", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: standard output cannot be written: ")
    assert done.stderr.count("\n") == 1


def _store_check(path: Path) -> dict[str, Any]:
    result = run("doctor", "--json", "--dir", str(path))
    return next(check for check in json.loads(result.output) if check["name"] == "store")


def test_doctor_says_where_no_store_can_be_made(tmp_path: Path) -> None:
    assert _store_check(tmp_path / "new")["state"] == "note"
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for path in (tmp_path / "loop/store", tmp_path / "file/store", tmp_path / "loop"):
        check = _store_check(path)
        assert check["state"] == "problem" and "is no folder" in check["text"], path
    odd = _store_check(tmp_path / os.fsdecode(b"\xff"))
    assert odd["state"] == "problem" and "not UTF-8" in odd["text"]


# ---- entries -------------------------------------------------------------------------------------

CALLS = (
    *("", "nothing", "null", "1", "[1, 2]", '{"args": null}', '{"args": [1]}', "[" * 20_000),
    *('{"args": [{"kind": "tensor"}]}', '{"args": [{"kind": "tensor", "sizes": 5}]}'),
    '{"args": [{"kind": "tensor_list", "elements": 7}]}',
)


def test_entries_that_describe_no_call_are_shown(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGERCACHE_DIR", str(cache))
    monkeypatch.delenv("EAGERCACHE_CXX", raising=False)
    store = _C.Store(str(cache), environment.environment_text(cxx=None))
    keys = [hashlib.sha256(call.encode()).hexdigest() for call in CALLS]
    for key, call in zip(keys, CALLS, strict=True):
        facts = {"op": "aten::var.correction", "call": call, "native_ns": "nan"}
        store.publish({"key": key, "kind": "native", "facts": facts})
    words = (["ls"], ["explain", "aten::var"], ["stats"], ["verify"], *(["show", k] for k in keys))
    for asked in words:
        result = run(*asked)
        assert result.exit_code == 0, (asked, result.exception, result.output)


def test_a_day_that_no_clock_knows_is_shown(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGERCACHE_DIR", str(cache))
    monkeypatch.delenv("EAGERCACHE_CXX", raising=False)
    store = _C.Store(str(cache), environment.environment_text(cxx=None))
    store.publish({"key": "a" * 64, "kind": "native", "facts": {"op": "aten::cat"}})
    (manifest,) = cache.glob("v1/*/m/*/*")
    lines = manifest.read_text().splitlines()[:-1]
    lines = ["created 99999999999999999" if x.startswith("created ") else x for x in lines]
    body = "".join(f"{x}\n" for x in lines)
    manifest.chmod(0o600)
    manifest.write_text(f"{body}digest {hashlib.sha256(body.encode()).hexdigest()}\n")
    shown = run("show", "aaaa")
    assert shown.exit_code == 0 and "99999999999999999" in shown.output, shown.exception


# ---- clear ---------------------------------------------------------------------------------------


def test_clear_leaves_what_is_only_named_alike(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGERCACHE_DIR", str(cache))
    _C.Store(str(cache), environment.environment_text(cxx=None))
    for name in ("FACTS.newspaper", "v1.cleared-by-hand"):
        (cache / name).mkdir()
        (cache / name / "file").touch()
    done = run("clear", "--yes", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["left"] == ["FACTS.newspaper", "v1.cleared-by-hand"]
    assert all((cache / name / "file").exists() for name in json.loads(done.output)["left"])


def test_clear_names_what_a_link_points_to(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _C.Store(str(cache), environment.environment_text(cxx=None))
    (tmp_path / "link").symlink_to(cache)
    done = run("clear", "--yes", "--dir", str(tmp_path / "link"))
    assert done.exit_code == 2 and f"is a link; name the folder that it points to, {cache}" in (
        done.output
    )
    assert (cache / "v1").is_dir()
