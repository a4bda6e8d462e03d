"""Commands that look into a store, on small ones made by hand: good input, damage, bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import clean_environment, run_python
from eagercache import _C
from eagercache.base import environment
from made_store import CALL, key_of, run, store

__all__ = ["store"]

pytestmark = pytest.mark.once


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
        json.loads(run("show", "--json", key_of("a")).output)["facts"],
        json.loads(run("ls", "--json", "--op", "cat").output)[0]["facts"],
    ):
        assert (facts["native_ns"], facts["kernel_ns"]) == (2500, 1250)
        assert facts["call"] == CALL


def test_show_prints_one_entry_whole(store: Any) -> None:
    text = run("show", key_of("a")[:10])
    assert text.exit_code == 0
    assert key_of("a") in text.output and "aten::var.correction" in text.output
    entry = json.loads(run("show", "--json", key_of("c")).output)
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
    assert [item["key"] for item in json.loads(found.output)["damaged"]] == [key_of("a")]
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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("prune --max-age=-1", "Invalid value for '--max-age'"),
        ("prune --max-age=nan", "Invalid value for '--max-age'"),
        ("bisect --timeout=nan -- true", "Invalid value for '--timeout'"),
        ("bisect -- no-such-command", "no-such-command cannot be started: No such file"),
        ("bisect --op softmax -- true", "environment whose operator's name contains softmax"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: str, text: str, store: Any) -> None:
    before = run("ls", "--json").output
    done = run(*words.split())
    assert done.exit_code in (1, 2) and text in done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert run("ls", "--json").output == before


@pytest.mark.parametrize(
    "command", [["ls"], ["stats"], ["bench"], ["verify"], ["prune"], ["show", "aa"]]
)
def test_a_store_that_is_not_there_is_one_line_and_exit_code_2(
    command: list[str], tmp_path: Path
) -> None:
    result = run(*command, "--dir", str(tmp_path / "nothing"))
    assert result.exit_code == 2
    assert result.output.count("\n") == 1 and "there is no store at" in result.output


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
    other.publish({"key": key_of("d"), "kind": "native", "facts": {"op": "aten::mul"}})
    assert "of this environment" in run("ls", "--dir", str(cache)).output
    assert "--all takes those of all" in run("verify", "--dir", str(cache)).output
    assert "1 entry of" in run("verify", "--all", "--dir", str(cache)).output
