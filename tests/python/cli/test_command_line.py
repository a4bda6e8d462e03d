"""The command line itself: versions and help without torch, and errors that name the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PACKAGE_ROOT, clean_environment
from made_store import run

pytestmark = pytest.mark.once


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
