"""The command line, on small stores made by hand: good input, damage, bad input."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import PACKAGE_ROOT, clean_environment, run_python
from eagercache import _C
from eagercache.base import environment
from eagercache.cli import main as cli

pytestmark = pytest.mark.once

CALL = {
    "args": [
        {"kind": "tensor", "name": "self", "dtype": "float32", "sizes": [8, 4], "strides": [4, 1]},
        {"kind": "int_list", "name": "dim", "values": [-1]},
        {"kind": "none", "name": "dtype"},
    ]
}


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shared_object(folder: Path) -> Path:
    """A shared object that needs no library and holds one function."""
    source, target = folder / "one.c", folder / "one.so"
    source.write_text("int one(void) { return 1; }")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-nostdlib", "-Wl,-z,noexecstack", "-o", target, source],
        check=True,
    )
    return target


@pytest.fixture
def store(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel, a decision for native and a failure in this environment; one entry in another."""
    monkeypatch.setenv("EAGERCACHE_DIR", str(cache))
    monkeypatch.delenv("EAGERCACHE_CXX", raising=False)
    opened = _C.Store(str(cache), environment.environment_text(cxx=None))
    artifact = _shared_object(cache.parent)
    facts = {"call": json.dumps(CALL), "native_ns": "2500", "kernel_ns": "1250"}
    opened.publish(
        {"key": _key("a"), "kind": "kernel", "facts": {**facts, "op": "aten::var.correction"}},
        [("so", str(artifact))],
    )
    opened.publish({"key": _key("b"), "kind": "native", "facts": {**facts, "op": "aten::cat"}})
    opened.publish(
        {"key": _key("c"), "kind": "failed", "facts": {"op": "aten::abs", "reason": "no compiler"}}
    )
    other = _C.Store(str(cache), "format: 1\ntorch.version: 1.0\n")
    other.publish({"key": _key("d"), "kind": "native", "facts": {"op": "aten::mul"}})
    return opened


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), input=input)


def test_ls_lists_this_environment_and_all_of_them(store: Any) -> None:
    mine = run("ls")
    assert mine.exit_code == 0, mine.output
    assert "3 entries" in mine.output
    assert "float32[8x4], dim=[-1]" in mine.output
    assert "2.50" in mine.output and "1.25" in mine.output
    assert "aten::mul" not in mine.output
    assert "aten::mul" in run("ls", "--all").output
    assert "no compiler" in mine.output  # why there is no kernel
    none = run("ls", "--op", "sinh").output
    assert "whose name contains 'sinh'" in none and none.count("\n") == 1
    rows = json.loads(run("ls", "--json", "--op", "cat").output)
    assert [(row["kind"], row["facts"]["op"]) for row in rows] == [("native", "aten::cat")]


def test_stats_sums_up_by_operator(store: Any) -> None:
    done = run("stats")
    assert done.exit_code == 0, done.output
    assert "3 entries" in done.output and "x2.00" in done.output
    said = json.loads(run("stats", "--json").output)
    assert [row["op"] for row in said["operators"]] == [
        "aten::var.correction",
        "aten::cat",
        "aten::abs",
    ]
    total = said["total"]
    assert (total["kernels"], total["native"], total["failed"]) == (1, 1, 1)
    assert total["speed_up"] == 2.0 and total["bytes"] > 1000
    assert "aten::mul" in run("stats", "--all").output


def test_numbers_of_entries_are_numbers_in_json(store: Any) -> None:
    for facts in (
        json.loads(run("show", "--json", _key("a")).output)["facts"],
        json.loads(run("ls", "--json", "--op", "cat").output)[0]["facts"],
    ):
        assert (facts["native_ns"], facts["kernel_ns"]) == (2500, 1250)
        assert facts["call"] == CALL


def test_show_prints_one_entry_whole(store: Any) -> None:
    text = run("show", _key("a")[:10])
    assert text.exit_code == 0
    assert _key("a") in text.output and "aten::var.correction" in text.output
    entry = json.loads(run("show", "--json", _key("c")).output)
    assert entry["kind"] == "failed" and entry["facts"]["reason"] == "no compiler"


def test_show_of_an_unknown_key_is_one_line_and_exit_code_2(store: Any) -> None:
    result = run("show", "ffff0000ffff")
    assert result.exit_code == 2
    said = "Error: no entry begins with 'ffff0000ffff'; `eagercache ls --all` lists them"
    assert result.output.strip() == said


def test_verify_finds_damage_and_repair_puts_it_aside(store: Any, cache: Path) -> None:
    sound = run("verify")
    assert sound.exit_code == 0 and "3 entries of " in sound.output
    victim = next(cache.rglob("*.so"))
    victim.chmod(0o600)
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(bytes(content))
    victim.chmod(0o444)
    found = run("verify", "--json")
    assert found.exit_code == 1
    assert [item["key"] for item in json.loads(found.output)["damaged"]] == [_key("a")]
    assert run("verify", "--repair").exit_code == 1
    after = run("verify")
    assert after.exit_code == 0 and "2 entries of " in after.output


def test_prune_removes_decisions_and_what_passes_the_limit(store: Any, cache: Path) -> None:
    counts = json.loads(run("prune", "--json", "--native").output)
    assert counts["entries_removed"] == 2
    assert {row["kind"] for row in json.loads(run("ls", "--json").output)} == {"kernel"}
    assert run("prune", "--max-bytes", "1").exit_code == 0
    assert json.loads(run("ls", "--json").output) == []
    bad = run("prune", "--max-bytes", "lots")
    assert bad.exit_code == 2 and "500M" in bad.output


def test_doctor_names_the_field_that_differs(store: Any) -> None:
    result = run("doctor")
    assert "1 kernel, 1 decision for native and 1 failure" in result.output
    assert "torch.version (1.0, 2." in result.output
    checks = json.loads(run("doctor", "--json").output)
    assert {check["name"] for check in checks} >= {"platform", "torch", "compiler", "store"}
    assert result.exit_code == (1 if any(c["state"] == "problem" for c in checks) else 0)


def test_doctor_names_a_missing_compiler_and_open_permissions(
    store: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGERCACHE_CXX", "/nowhere/g++")
    cache.chmod(0o777)
    result = run("doctor")
    assert result.exit_code == 1
    assert "/nowhere/g++" in result.output and "remedy: install g++" in result.output
    assert str(cache) in result.output and "0700" in result.output


def test_doctor_says_whether_a_worker_has_to_compile_inductors_sources(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> str:
        checks = json.loads(run("doctor", "--json").output)
        (check,) = [check for check in checks if check["name"] == "bytecode"]
        return str(check["state"])

    folder = tmp_path / "torch/_inductor"
    monkeypatch.setattr("eagercache.service.worker_process.inductor_folder", lambda: folder)
    assert state() == "note"
    compiled = Path(importlib.util.cache_from_source(str(folder / "lowering.py")))
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert state() == "ok"


@pytest.mark.parametrize(
    "command", [["ls"], ["stats"], ["bench"], ["verify"], ["prune"], ["show", "aa"]]
)
def test_a_store_that_is_not_there_is_one_line_and_exit_code_2(
    command: list[str], tmp_path: Path
) -> None:
    result = run(*command, "--dir", str(tmp_path / "nothing"))
    assert result.exit_code == 2
    assert result.output.count("\n") == 1 and "there is no store at" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nonsense", "No such option '--nonsense'; see `main --help`"),
        ("nonsense", "No such command 'nonsense'; see `main --help`"),
        ("ls --nonsense", "No such option '--nonsense'; see `main ls --help`"),
        ("stats --jso", "No such option '--jso'. Did you mean '--json'? See `main stats --help`"),
        ("bench --op", "Option '--op' requires an argument; see `main bench --help`"),
        ("warm --op var", "--op is about traces; name one, made by `eagercache record`"),
        ("warm --budget 2GB", "the budget '2GB' is no time (120s, 10min, 2h)"),
        ("warm x --device tpu", "Invalid value for '--device': 'tpu' is not one of 'cpu', 'cuda';"),
        ("run", "Missing argument 'PROGRAM [ARGUMENTS]...'; see `main run --help`"),
        ("run --nonsense x.py", "there is no option --nonsense; see `main run --help`"),
        ("record x --nonsense x.py", "there is no option --nonsense; see `main record --help`"),
        ("explain", "Missing argument 'OPERATOR'; see `main explain --help`"),
        ("bundle nonsense", "No such command 'nonsense'; see `main bundle --help`"),
        ("bundle export", "Missing argument 'FILE'; see `main bundle export --help`"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(words: str, message: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2
    assert result.output.startswith(f"Error: {message}"), result.output
    assert result.output.count("\n") == 1


def test_explain_says_what_an_operator_can_have_and_what_was_decided(store: Any) -> None:
    done = run("explain", "var.correction", "--json")
    assert done.exit_code == 0, done.output
    (overload,) = json.loads(done.output)["overloads"]
    assert overload["op"] == "aten::var.correction"
    assert overload["eligible"] and overload["default"] and overload["reason"] == ""
    shown = run("explain", "var.correction").output
    assert "can have kernels; enable() hooks it" in shown
    assert "no verdict" in shown  # the entry at hand does not say at which dispatch key it is


@pytest.mark.parametrize(
    ("operator", "said"),
    [("mm", "library call"), ("layer_norm", "aten::native_layer_norm"), ("abs", "can have")],
)
def test_explain_names_the_reason_and_the_parts(store: Any, operator: str, said: str) -> None:
    done = run("explain", f"aten::{operator}")
    assert done.exit_code == 0 and said in done.output


def test_explain_takes_names_as_programs_write_them_and_prints_no_warning(
    store: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = run("explain", "torch.var").output
    assert shown.startswith("aten::var.correction at CPU: can have kernels")
    assert "aten::gelu at CPU" in run("explain", "torch.nn.functional.gelu").output
    assert capfd.readouterr().err == ""  # of the trials that find a composite operator's parts


def test_explain_of_no_operator_is_one_line(store: Any) -> None:
    done = run("explain", "no_such_operator")
    assert done.exit_code == 2
    assert done.output.count("\n") == 1 and "no_such_operator" in done.output


def test_explain_and_bench_on_real_kernels(warm_cache: Path) -> None:
    done = run("explain", "_softmax", "--dir", str(warm_cache), "--json")
    (row,) = json.loads(done.output)["entries"]
    assert (row["decision"], row["call"]) == (
        "kernel",
        "float32[64x96], dim=-1, half_to_float=False",
    )
    assert "x" in run("explain", "_softmax", "--dir", str(warm_cache)).output
    result = run_python(
        "from eagercache.cli.main import main; main()",
        clean_environment(),
        *("bench", "--dir", str(warm_cache), "--op", "softmax", "--json"),
    )
    (row,) = json.loads(result.stdout)["kernels"]
    assert row["problem"] == "" and row["native_us"] > 0 and row["kernel_us"] > 0


@pytest.mark.parametrize("words", [["--op", "nonsense"], []])
def test_bench_without_a_kernel_to_measure_is_one_line_and_exit_code_2(
    cache: Path, words: list[str]
) -> None:
    _C.Store(str(cache), environment.environment_text())
    done = run("bench", "--dir", str(cache), *words)
    assert done.exit_code == 2
    assert done.output.startswith("Error: ") and done.output.count("\n") == 1
    assert "has no CPU kernel" in done.output and all(word in done.output for word in words[1:])


def test_bench_names_a_kernel_that_cannot_be_measured(warm_cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(warm_cache, copy, copy_function=shutil.copy2)
    for thing in copy.glob("v1/o/*/*.so"):
        thing.chmod(0o600)
        thing.write_bytes(b"not a library")
    result = run_python(
        "from eagercache.cli.main import main; main()",
        clean_environment(),
        *("bench", "--dir", str(copy), "--op", "silu"),
    )
    assert result.returncode == 0, result.stderr
    assert "does not answer here" in result.stdout


def test_clear_removes_a_cache_and_nothing_else(store: Any, cache: Path, tmp_path: Path) -> None:
    own = cache / "notes.txt"
    own.write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine too")
    (cache / "HEADERS").symlink_to(elsewhere)
    (cache / "PYTHON/usr").mkdir(parents=True)
    (cache / "v1.cleared-0123").mkdir()
    for name in ("FACTS.new0123", "REMOTES", "REMOTES.lock", "REMOTES.new0123"):
        (cache / name).write_text("{")
    asked = run("clear", input="n\n")
    assert asked.exit_code == 1 and (cache / "v1").is_dir()
    done = run("clear", "--yes", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["left"] == ["notes.txt"]
    assert [path.name for path in cache.iterdir()] == ["notes.txt"]
    assert (elsewhere / "file").read_text() == "mine too"
    again = run("clear", "--yes")
    assert again.exit_code == 2 and "is no cache" in again.output


def test_clear_leaves_a_folder_alone_that_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v1").mkdir()
    monkeypatch.setenv("EAGERCACHE_DIR", str(tmp_path))
    assert run("clear", "--yes").exit_code == 2
    assert (tmp_path / "v1").is_dir()


@pytest.mark.parametrize(
    "broken",
    ["environment.environment_text", "shutil.disk_usage", "worker_process.bytecode_folder"],
)
def test_doctor_says_what_it_cannot_check(
    store: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr(f"eagercache.cli.diagnoses.diagnosis.{broken}", fail)
    result = run("doctor", "--json")
    assert result.exit_code == 1 and result.exception.__class__ is SystemExit
    checks = json.loads(result.output)
    assert any("cannot be checked: PermissionError" in check["text"] for check in checks)
    assert {"platform", "torch"} < {check["name"] for check in checks}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "eagercache", *words],
        env=clean_environment(PYTHONPATH=PACKAGE_ROOT),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--version"], "eagercache, version "),
        ([], "Usage: eagercache [OPTIONS] COMMAND"),
        (["--help"], "Usage: eagercache [OPTIONS] COMMAND"),
        (["bundle"], "Usage: eagercache bundle"),
        (["warm", "--help"], "Usage: eagercache warm"),
    ],
)
def test_version_and_help_come_without_torch_and_end_well(words: list[str], said: str) -> None:
    done = command(*words)
    assert (done.returncode, done.stdout[: len(said)]) == (0, said), done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "eagercache.version" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "numpy")}


def test_version_takes_a_fifth_of_a_second_at_most() -> None:
    def seconds() -> float:
        begin = time.perf_counter()
        command("--version")
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(5)) < 0.2


def test_completion_names_commands_and_options_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "eagercache"],
        env=clean_environment(
            PYTHONPATH=PACKAGE_ROOT,
            _EAGERCACHE_COMPLETE="bash_complete",
            COMP_WORDS="eagercache warm --bud",
            COMP_CWORD="2",
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "plain,--budget\n", done.stderr[-300:]
    assert "| torch" not in done.stderr.replace(" ", "|")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ls --json --dir /nowhere/at/all", "there is no store at /nowhere/at/all"),
        ("ls --nonsense --json", "No such option '--nonsense'; see"),
        ("explain no_such_operator --json", "no_such_operator"),
        ("run --json nothing.py", "there is no program nothing.py"),
        ("record --json trace nothing.py", "there is no program nothing.py"),
        ("run --op sin --json --choose never x.py", "'never' is not one of"),
        ("record --dir folder --json", "Missing argument 'TRACE'"),
    ],
)
def test_errors_are_json_where_json_is_asked_for(words: str, said: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2
    of_a_program = words.split()[0] in ("run", "record")
    error = json.loads(result.stderr if of_a_program else result.stdout)
    assert said in error["error"] and error["exit_code"] == 2
    assert (result.stdout if of_a_program else result.stderr) == ""


def test_a_programs_own_json_option_is_not_ours() -> None:
    for words in (["run"], ["run", "--op", "--json"], ["estimate"], ["compare", "--runs", "2"]):
        result = run(*words, "nothing.py", "--json")
        assert result.output.startswith("Error: there is no"), result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("keygen", "No such command 'keygen', but `eagercache bundle keygen`; see"),
        ("record trace --json", "--json comes too late; name it first; see"),
        ("run -c", "-c needs a program's text"),
        ("lss", "No such command 'lss'. Did you mean ls? See"),
        ("bundle keygen /nowhere/at/all", "there is no folder /nowhere/at; make it, or name"),
        ("clear --dir /nowhere/at/all", "there is no cache at /nowhere/at/all; name one with"),
    ],
)
def test_the_remedy_is_named(words: str, said: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2 and result.output.startswith(f"Error: {said}"), result.output


def test_keys_are_not_replaced(tmp_path: Path) -> None:
    assert run("bundle", "keygen", str(tmp_path / "mine")).exit_code == 0
    before = (tmp_path / "mine.pem").read_bytes()
    again = run("bundle", "keygen", str(tmp_path / "mine"))
    assert again.exit_code == 2 and "is there already and is not replaced" in again.output
    assert (tmp_path / "mine.pem").read_bytes() == before


def test_one_is_no_plural(store: Any, cache: Path) -> None:
    assert "1 entry in" in run("ls", "--op", "cat").output
    assert "2 entries, 0 objects" in run("prune", "--native").output


def test_clear_says_that_nobody_agreed(store: Any, cache: Path) -> None:
    for given in ("n\n", ""):
        asked = run("clear", "--json", input=given)
        assert asked.exit_code == 1 and "was left" in json.loads(asked.stdout)["error"]
    assert (cache / "v1").is_dir()


def test_verify_of_a_store_of_other_environments_says_so(cache: Path) -> None:
    other = _C.Store(str(cache), "format: 1\ntorch.version: 1.0\n")
    other.publish({"key": _key("d"), "kind": "native", "facts": {"op": "aten::mul"}})
    assert "of this environment" in run("ls", "--dir", str(cache)).output
    assert "--all takes those of all" in run("verify", "--dir", str(cache)).output
    assert "1 entry of" in run("verify", "--all", "--dir", str(cache)).output
