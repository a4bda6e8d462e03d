"""Bundles: used where there is no compiler, and refused with the reason where they may not be."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import eagercache
import pytest
from click.testing import CliRunner, Result
from conftest import (
    SHARED_CALLS,
    SHARED_OPS,
    clean_environment,
    run_program,
    run_python,
)
from eagercache import _C
from eagercache.base import environment
from eagercache.cli import main as cli

pytestmark = pytest.mark.once

KEYS = [f"{digit}" * 64 for digit in "123"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["bundle", *map(str, arguments)])


def expect_one_line(result: Result, *texts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1
    for text in texts:
        assert text in result.output, result.output


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The folder of the pairs `mine` and `other`."""
    for name in ("mine", "other"):
        assert run("keygen", tmp_path / name).exit_code == 0
    return tmp_path


@pytest.fixture
def store(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three decisions for native."""
    monkeypatch.setenv("EAGERCACHE_DIR", str(cache))
    monkeypatch.delenv("EAGERCACHE_CXX", raising=False)
    opened = _C.Store(str(cache), environment.environment_text())
    for key in KEYS:
        opened.publish({"key": key, "kind": "native", "facts": {"op": "aten::cat"}})
    return cache


@pytest.fixture
def packed(store: Path, keys: Path) -> Path:
    path = keys / "kernels.bundle"
    exported = run("export", path, "--key", keys / "mine.pem")
    assert exported.exit_code == 0, exported.output
    assert "0 kernels, 3 decisions for native" in exported.output
    return path


def test_a_bundle_answers_every_call_where_no_compiler_is_to_be_found(
    warm_cache: Path, tmp_path: Path, keys: Path
) -> None:
    path = tmp_path / "kernels.bundle"
    exported = run("export", path, "--key", keys / "mine.pem", "--dir", warm_cache, "--json")
    assert exported.exit_code == 0, exported.output
    kernels = json.loads(exported.output)["kernels"]
    assert kernels >= 6

    nothing = tmp_path / "bin"
    nothing.mkdir()
    elsewhere = tmp_path / "elsewhere"
    variables = {"PATH": str(nothing), "CXX": "", "EAGERCACHE_DIR": str(elsewhere)}
    imported = subprocess.run(
        [sys.executable, "-m", "eagercache", "bundle", "import", path, "--key", keys / "mine.pub"],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert imported.returncode == 0, imported.stderr
    assert f"{kernels} kernels" in imported.stdout
    result = run_program(
        """
import sys
started = []
def hook(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork"):
        # Importing Triton beside torch 2.15 asks the linker's cache for libcuda.
        if "ldconfig" not in str(arguments[0]):
            started.append([event, str(arguments[0])])
sys.addaudithook(hook)
"""
        + SHARED_CALLS
        + f"""
import eagercache
eagercache.enable({SHARED_OPS}, on_miss="native", choose="always")
for _ in range(3): shared_calls()
s = eagercache.stats()
report(hits=s.hits, rest=[s.misses, s.pending, s.native], compiles=s.compiles, started=started)
""",
        elsewhere,
        PATH=str(nothing),
        CXX="",
    )
    assert result["hits"] == 15
    assert result["rest"] == [0, 0, 0]
    assert result["started"] == [] and result["compiles"] == 0


def _clean_environment(folder: Path) -> Path:
    """The interpreter of a new virtual environment with torch and a copy of eagercache."""
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    # Linked one by one, because a .pth file would bring this tree's package with it.
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"_?eagercache|.*\.pth$|__pycache__", entry.name):
            (packages / entry.name).symlink_to(entry)
    installed = Path(eagercache.__file__).parent
    shutil.copytree(
        installed, packages / "eagercache", ignore=shutil.ignore_patterns("lib", "__pycache__")
    )
    return folder / "bin" / "python"


def test_a_bundle_hits_in_a_clean_virtual_environment_and_starts_no_compiler(
    warm_cache: Path, tmp_path: Path, keys: Path
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("NOT RUN: strace not found")
    path = tmp_path / "kernels.bundle"
    assert run("export", path, "--key", keys / "mine.pem", "--dir", warm_cache).exit_code == 0
    python = _clean_environment(tmp_path / "venv")
    (tmp_path / "program.py").write_text(
        SHARED_CALLS
        + f"""
import eagercache, json, sys
eagercache.enable({SHARED_OPS}, on_miss="native", choose="always")
for _ in range(3): shared_calls()
s = eagercache.stats()
rest = s.misses + s.pending + s.native
print(json.dumps([sys.prefix, eagercache.__file__, s.hits, rest, s.compiles]))
"""
    )
    variables = clean_environment(EAGERCACHE_DIR=str(tmp_path / "deployed"))
    variables.pop("PYTHONPATH")
    log = tmp_path / "trace"
    strace = ("strace", "-f", "--seccomp-bpf", "-o", log, "-e", "trace=execve,execveat")
    words = ["bundle", "import", path, "--key", keys / "mine.pub"]
    for command in ((python, "-m", "eagercache", *words), (*strace, python, "program.py")):
        done = subprocess.run(
            list(map(str, command)), env=variables, cwd=tmp_path, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    prefix, package, *counts = json.loads(done.stdout)
    assert prefix == str(tmp_path / "venv") and package.startswith(prefix)
    assert counts == [15, 0, 0]
    started = re.findall(
        r'exec\w+\("([^"]*)", \["[^"]*"\.*(.*?)\]', log.read_text(errors="replace")
    )
    assert started[0][0] == str(python)
    # A compiler that is there is asked who it is, and compiles nothing. Importing Triton beside
    # torch 2.15 asks the linker's cache for libcuda.
    compiling = [each for each in started[1:] if each[1] != ', "-v"' and "ldconfig" not in each[0]]
    assert compiling == []


def test_verify_tells_who_signed_and_that_all_is_intact(packed: Path, keys: Path) -> None:
    verified = run("verify", packed, "--key", keys / "other.pub", "--key", keys / "mine.pub")
    assert verified.exit_code == 0, verified.output
    assert f"signed by {_C.public_key(str(keys / 'mine.pub'))}" in verified.output
    said = json.loads(run("verify", packed, "--key", keys / "mine.pub", "--json").output)
    assert (said["decisions"], said["mismatches"]) == (3, [])
    assert f"digest {said['digest']}" in verified.output
    assert "never expires" in verified.output
    assert said["expires"] is None


def test_a_bundle_expires(keys: Path, store: Path, tmp_path: Path) -> None:
    path, key = tmp_path / "kernels.bundle", ("--key", keys / "mine.pub", "--dir", tmp_path / "d")
    for when, days in (("90d", 90), ("2999-01-01", 300_000)):
        done = run("export", path, "--key", keys / "mine.pem", "--expires", when)
        assert done.exit_code == 0, done.output
        said = json.loads(run("verify", path, *key[:2], "--json").output)
        made, ends = (
            datetime.datetime.fromisoformat(said[name]) for name in ("created", "expires")
        )
        assert (ends - made).days >= days - 1
    for when in ("tomorrow", "-3d", "90", "2026-13-01"):
        assert (
            "use a day" in run("export", path, "--key", keys / "mine.pem", "--expires", when).output
        )
    past = run("export", tmp_path / "no", "--key", keys / "mine.pem", "--expires", "2020-01-01")
    expect_one_line(past, "must expire after it was made")
    text, now = environment.environment_text(), int(time.time())
    opened = _C.Store(str(store), text, read_only=True)
    _C.write_bundle(str(path), opened, text, str(keys / "mine.pem"), now - 9, now - 99)
    expect_one_line(run("import", path, *key), "expired on", "get a newer one")
    assert not (tmp_path / "d").exists()


def test_what_is_revoked_is_refused_and_what_it_brought_is_not_used(
    packed: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, listed = tmp_path / "target", tmp_path / "revoked"
    key = ("--key", keys / "mine.pub", "--dir", target)
    assert run("import", packed, *key).exit_code == 0
    said = json.loads(run("verify", packed, *key[:2], "--json").output)
    for name in ("signer", "digest"):
        listed.write_text(f"{said[name]} lost\n")
        expect_one_line(run("import", packed, *key, "--revoked", listed), "is revoked", said[name])
        with monkeypatch.context() as patch:
            patch.setenv("EAGERCACHE_REVOKED", str(listed))
            expect_one_line(run("verify", packed, *key[:2]), "is revoked", said[name])
        heeding = _C.Store(str(target), environment.environment_text(), revoked=str(listed))
        assert all(heeding.find(digest) is None for digest in KEYS)
    assert _C.Store(str(target), environment.environment_text()).find(KEYS[0]) is not None
    listed.write_text("mine\n")
    expect_one_line(run("verify", packed, *key[:2], "--revoked", listed), "line 1")
    expect_one_line(run("verify", packed, *key[:2], "--revoked", tmp_path / "no"), "cannot be read")


_ENABLE = (
    SHARED_CALLS
    + """
import os, sys, warnings
import eagercache
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    on = eagercache.enable({ops}, on_miss="native", choose="always", revoked={revoked!r})
    for _ in range(3): shared_calls()
s = eagercache.stats()
report(active=on.active, hits=s.hits, warned=[str(one.message) for one in caught])
"""
)


def test_enable_uses_no_kernel_of_a_revoked_bundle_and_warns_once(
    warm_cache: Path, tmp_path: Path, keys: Path
) -> None:
    path, target, listed = tmp_path / "kernels.bundle", tmp_path / "target", tmp_path / "revoked"
    assert run("export", path, "--key", keys / "mine.pem", "--dir", warm_cache).exit_code == 0
    assert run("import", path, "--key", keys / "mine.pub", "--dir", target).exit_code == 0
    listed.write_text(_C.public_key(str(keys / "mine.pub")) + "\n")
    code = _ENABLE.format(ops=SHARED_OPS, revoked=None)
    assert run_program(code, target)["hits"] == 15
    refusing = _ENABLE.format(ops=SHARED_OPS, revoked=str(listed))
    refused = run_program(refusing, target)
    assert (refused["active"], refused["hits"], refused["warned"]) == (True, 0, [])
    said = run_python(
        "def report(**_): pass\n" + refusing, clean_environment(EAGERCACHE_DIR=str(target))
    ).stderr
    assert said.count("are not used any more: the key that signed it") == 1
    assert said.count("\n") == 1
    set_by_variable = run_program(code, target, EAGERCACHE_REVOKED=str(listed))
    assert set_by_variable["hits"] == 0
    broken = run_program(code, target, EAGERCACHE_REVOKED=str(tmp_path / "nowhere"))
    assert (broken["active"], broken["hits"]) == (False, 0)
    (warning,) = broken["warned"]
    assert "nowhere" in warning
    assert "cannot be read" in warning
    assert "everything stays native" in warning


def test_what_a_store_has_stays(packed: Path, keys: Path, store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    first = run("import", packed, "--key", keys / "mine.pub", "--dir", other)
    assert first.exit_code == 0 and "0 of them were there" in first.output
    opened = _C.Store(str(other), environment.environment_text(), read_only=True)
    assert sorted(row["key"] for row in opened.entries()) == KEYS
    again = run("import", packed, "--key", keys / "mine.pub", "--dir", other)
    assert again.exit_code == 0 and "3 of them were there" in again.output


def test_altered_truncated_unsigned_and_foreign_bundles_are_refused_with_the_reason(
    packed: Path, keys: Path, tmp_path: Path
) -> None:
    whole = packed.read_bytes()
    target = tmp_path / "target"
    key = ("--key", keys / "mine.pub", "--dir", target)

    packed.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    expect_one_line(run("import", packed, *key), "was altered or cut off")
    packed.write_bytes(whole[: len(whole) // 2])
    expect_one_line(run("import", packed, *key), "was altered or cut off")
    packed.write_bytes(whole[:20] + bytes(96) + whole[116:])
    expect_one_line(run("import", packed, *key), "signed by the key 0000", "not among those")
    packed.write_bytes(whole)
    foreign = run("import", packed, "--key", keys / "other.pub", "--dir", target)
    expect_one_line(foreign, "which is not among those that are trusted")
    packed.write_text("import torch\n")
    expect_one_line(run("import", packed, *key), "is no whole bundle")
    assert not target.exists()


def test_a_bundle_for_another_torch_names_the_field_and_is_not_imported(
    keys: Path, store: Path, tmp_path: Path
) -> None:
    here = environment.environment_text()
    version = environment.parse(here)["torch.version"]
    text = here.replace(f"torch.version: {version}\n", "torch.version: 1.0\n")
    text = text.replace("compiler.version: ", "compiler.version: another ")
    opened = _C.Store(str(tmp_path / "old"), text)
    opened.publish({"key": KEYS[0], "kind": "native", "facts": {}})
    path = tmp_path / "old.bundle"
    _C.write_bundle(str(path), opened, text, str(keys / "mine.pem"))
    verified = run("verify", path, "--key", keys / "mine.pub")
    assert verified.exit_code == 1
    assert f"torch.version: 1.0 in the bundle, {version} here" in verified.output
    assert "compiler" not in verified.output  # it made the kernels and is not needed to run them
    target = tmp_path / "target"
    refused = run("import", path, "--key", keys / "mine.pub", "--dir", target)
    expect_one_line(refused, f"torch.version is {version} and the bundle was made with 1.0")
    assert not target.exists()


def test_every_field_that_a_kernel_meets_is_one_of_the_environment() -> None:
    assert set(environment.RUNNING_FIELDS) <= {field.name for field in environment.FIELDS}


def test_keys_and_files_that_cannot_be_used_are_one_line_and_exit_code_2(
    keys: Path, store: Path, packed: Path, tmp_path: Path
) -> None:
    (tmp_path / "no.pem").write_text("secret")
    out = tmp_path / "out.bundle"
    expect_one_line(run("export", out, "--key", tmp_path / "no.pem"), "is no private key")
    expect_one_line(run("export", out, "--key", keys / "mine.pub"), "is no private key")
    expect_one_line(run("export", out, "--key", tmp_path / "nowhere"), "cannot be read")
    expect_one_line(run("verify", packed, "--key", keys / "mine.pem"), "is no public key")
    expect_one_line(run("verify", tmp_path / "nowhere", "--key", keys / "mine.pub"), "nowhere")
    expect_one_line(run("keygen", keys / "mine"), "mine.pem")
    nowhere = tmp_path / "no" / "store"
    expect_one_line(run("export", out, "--key", keys / "mine.pem", "--dir", nowhere), "no store at")
    empty = tmp_path / "empty"
    _C.Store(str(empty), environment.environment_text())
    expect_one_line(
        run("export", out, "--key", keys / "mine.pem", "--dir", empty), "has no kernel or decision"
    )
    assert run("export", out).exit_code == 2 and run("import", packed).exit_code == 2
    assert not out.exists()
