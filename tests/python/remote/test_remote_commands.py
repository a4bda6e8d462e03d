"""`eagercache pull`, `push`, `sync` and `doctor` say what came of it."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import remote_server
from click.testing import CliRunner, Result
from eagercache import _C
from eagercache.base import environment
from eagercache.cli import main as cli
from eagercache.remote import catalogue
from remote_server import RemoteServer
from remote_world import World, key_of, tier_of

pytestmark = pytest.mark.once


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [*map(str, arguments)])


def expect_one_line(result: Result, *texts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1
    for text in texts:
        assert text in result.output, result.output


@pytest.fixture(autouse=True)
def variables(world: World, server: RemoteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGERCACHE_CXX", raising=False)
    monkeypatch.setenv("EAGERCACHE_REMOTE", server.url)
    monkeypatch.setenv("EAGERCACHE_REMOTE_TRUST", str(world.folder / "own.pub"))


@pytest.fixture
def text() -> str:
    return environment.environment_text()


def keys_of(world: World, name: str, text: str) -> set[str]:
    return {entry["key"] for entry in world.store(name, text).entries()}


def test_what_is_pushed_is_pulled(world: World, server: RemoteServer, text: str) -> None:
    world.filled("a", 1, 2, 3, text=text)
    key = world.folder / "own.pem"
    pushed = run("push", "--dir", world.folder / "a", "--key", key)
    assert pushed.exit_code == 0 and pushed.output.startswith("3 sent ("), pushed.output
    again = run("push", "--dir", world.folder / "a", "--key", key, "--json")
    assert json.loads(again.output)["sent"] == 0

    pulled = run("pull", "--dir", world.folder / "b")
    assert pulled.output == "3 used, 0 unusable here\n" and pulled.exit_code == 0
    assert keys_of(world, "b", text) == {key_of(n) for n in (1, 2, 3)}
    counts = json.loads(run("pull", "--dir", world.folder / "b", "--json").output)
    assert (counts["used"], counts["fetched"], counts["present"]) == (3, 0, 3)


def test_sync_ends_with_the_same_entries_on_both_sides(
    world: World, server: RemoteServer, text: str
) -> None:
    world.filled("a", 1, 2, text=text)
    world.filled("b", 2, 3, text=text)
    options = ("--key", world.folder / "own.pem", "--json")
    assert run("push", "--dir", world.folder / "a", *options).exit_code == 0
    counts = json.loads(run("sync", "--dir", world.folder / "b", *options).output)
    assert (counts["fetched"], counts["present"], counts["sent"]) == (1, 1, 1)
    assert keys_of(world, "b", text) == {key_of(n) for n in (1, 2, 3)}
    listed = catalogue.keys(tier_of(server.url), catalogue.environment_id(text))
    assert set(listed) == keys_of(world, "b", text)


def test_what_is_unusable_here_is_counted_and_the_field_named(
    world: World, server: RemoteServer, text: str
) -> None:
    ours = environment.parse(text)["torch.version"]
    theirs = text.replace(f"torch.version: {ours}", "torch.version: 1.0.0")
    for name, entries, of in (("a", (1, 2), text), ("c", (3, 4, 5), theirs)):
        exchange = world.exchange(world.filled(name, *entries, text=of), server.url, of)
        for number in entries:
            exchange.send(tier_of(server.url), key_of(number))
        catalogue.add_keys(tier_of(server.url), of, [key_of(number) for number in entries])
    pulled = run("pull", "--dir", world.folder / "b")
    assert pulled.output == (
        f"2 used, 3 unusable here, because torch.version differs (1.0.0, {ours})\n"
    )
    assert pulled.exit_code == 0
    (unusable,) = json.loads(run("pull", "--dir", world.folder / "b", "--json").output)["unusable"]
    assert unusable["entries"] == 3
    assert unusable["fields"] == [{"field": "torch.version", "remote": "1.0.0", "here": ours}]

    said = _remote_check(run("doctor", "--dir", world.folder / "b", "--json"))
    assert said["state"] == "ok" and "entries for this environment: 2" in said["text"]
    assert f"torch.version differs (1.0.0 there, {ours} here)" in said["text"]


def test_what_is_refused_is_counted_by_kind_and_makes_the_command_fail(
    world: World, server: RemoteServer, text: str
) -> None:
    world.filled("a", 1, 2, text=text)
    run("push", "--dir", world.folder / "a", "--key", world.folder / "own.pem")
    server.content[f"/cache/v1/{catalogue.environment_id(text)}/e/{key_of(1)}"] += b"x"
    pulled = run("pull", "--dir", world.folder / "b")
    assert pulled.output == "1 used, 0 unusable here; refused: 1 signature\n"
    assert pulled.exit_code == 1 and keys_of(world, "b", text) == {key_of(2)}
    pulled = run("pull", "--dir", world.folder / "c", "--trust", world.folder / "other.pub")
    assert pulled.output == "0 used, 0 unusable here; refused: 2 signature\n"


def test_a_remote_that_does_not_answer_is_one_line_and_the_others_are_asked(
    world: World, server: RemoteServer, text: str, tmp_path: Path
) -> None:
    world.filled("a", 1, text=text)
    folder = f"file://{tmp_path}/remote"
    options = ("--key", world.folder / "own.pem")
    assert run("push", "--dir", world.folder / "a", "--remote", folder, *options).exit_code == 0
    server.toxic = remote_server.status(500)
    both = ("--remote", server.url, "--remote", folder)
    pulled = run("pull", "--dir", world.folder / "b", *both)
    assert pulled.exit_code == 1
    assert pulled.output == (f"{server.url}: GET is answered with 500\n1 used, 0 unusable here\n")
    check = _remote_check(run("doctor", "--dir", world.folder / "b", "--json"))
    assert check["state"] == "problem" and "does not answer" in check["text"]
    assert "EAGERCACHE_REMOTE" in check["remedy"]


def _remote_check(result: Result) -> dict[str, Any]:
    found = json.loads(result.output)
    rows = found["checks"] if isinstance(found, dict) else found
    (row,) = (row for row in rows if row["name"] == "remote")
    return dict(row)


def test_bad_usage_is_one_line(world: World, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    world.filled("a", 1, text=text)
    store = ("--dir", world.folder / "a")
    expect_one_line(run("push", *store), "has to be signed", "--key")
    expect_one_line(run("pull", *store, "--remote", "ftp://x"), "'ftp://x' is none of")
    expect_one_line(run("pull", *store, "--trust", world.folder / "none.pub"), "cannot be read")
    expect_one_line(
        run("push", *store, "--key", world.folder / "own.pub"), "is no private key (without"
    )
    signs = (*store, "--key", world.folder / "own.pem")
    expect_one_line(run("push", *signs, "--expires", "1960-01-01"), "is not after 1970")
    monkeypatch.delenv("EAGERCACHE_REMOTE_TRUST")
    expect_one_line(run("pull", *store), "no key is trusted", "EAGERCACHE_REMOTE_TRUST")
    monkeypatch.delenv("EAGERCACHE_REMOTE")
    expect_one_line(run("pull", *store), "no remote is named")
    missing = ("--dir", world.folder / "missing", "--key", world.folder / "own.pem")
    expect_one_line(run("push", *missing, "--remote", "memory://x"), "there is no store at")


def test_a_store_that_is_not_there_is_made_by_what_is_pulled(
    world: World, server: RemoteServer, text: str
) -> None:
    assert run("pull", "--dir", world.folder / "new").output == "0 used, 0 unusable here\n"
    assert _C.Store(str(world.folder / "new"), text, read_only=True).entries() == []


@pytest.mark.parametrize("as_json", [False, True])
def test_a_place_that_is_not_there_is_one_line_with_the_remedy(
    world: World, tmp_path: Path, text: str, as_json: bool
) -> None:
    (tmp_path / "file").touch()
    for place, what in (
        (tmp_path / "missing" / "cache", f"there is no folder {tmp_path}/missing/cache"),
        (tmp_path / "file" / "cache", f"there is no folder {tmp_path}/file/cache"),
        (tmp_path / "file", f"{tmp_path}/file is no folder"),
    ):
        options = ("--remote", f"file://{place}", *(["--json"] if as_json else []))
        line = f"file://{place}: {what}; look at the URL, or fill it with `eagercache push`"
        result = run("pull", "--dir", world.folder / "b", *options)
        assert result.exit_code == 1, result.output
        if as_json:
            assert json.loads(result.stdout)["errors"] == [line]
        else:
            assert result.output == f"{line}\n0 used, 0 unusable here\n"
    assert not (tmp_path / "missing").exists()


def test_an_empty_folder_is_a_remote_and_what_is_sent_makes_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "empty").mkdir()
    pulled = run("pull", "--dir", world.folder / "b", "--remote", f"file://{tmp_path}/empty")
    assert (pulled.exit_code, pulled.output) == (0, "0 used, 0 unusable here\n")
    world.filled("a", 1, 2, text=text)
    for command in ("push", "sync"):
        remote = f"file://{tmp_path}/new/{command}"
        monkeypatch.setenv("EAGERCACHE_REMOTE", remote)
        check = _remote_check(run("doctor", "--dir", world.folder / "b", "--json"))
        assert check["state"] == "problem" and "there is no folder" in check["text"]
        options = ("--dir", world.folder / "a", "--key", world.folder / "own.pem")
        sent = run(command, *options)
        assert sent.exit_code == 0 and sent.output.startswith("2 sent ("), sent.output
        pulled = run("pull", "--dir", world.folder / command)
        assert (pulled.exit_code, pulled.output) == (0, "2 used, 0 unusable here\n")


@pytest.mark.parametrize("page", [b"<html>please log in</html>", b"", b"\x1f\x8b\x08\x00"])
def test_a_server_that_answers_everything_is_no_empty_remote(
    world: World, server: RemoteServer, page: bytes, text: str
) -> None:
    def log_in(request: BaseHTTPRequestHandler, content: bytes | None) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(page)))
        request.end_headers()
        request.wfile.write(page)

    server.toxic = log_in
    for command in ("pull", "doctor"):
        result = run(command, "--dir", world.folder / "b")
        assert result.exit_code == 1 and "is no list" in result.output, result.output
    # Who may write mends a list that something has spoilt.
    server.toxic = None
    world.filled("a", 1, text=text)
    identity = catalogue.environment_id(text)
    for name in (catalogue.ENVIRONMENTS, f"v1/{identity}/keys"):
        server.content[f"/cache/{name}"] = page
    pushed = run("push", "--dir", world.folder / "a", "--key", world.folder / "own.pem")
    assert pushed.exit_code == 0, pushed.output
    assert run("pull", "--dir", world.folder / "c").output.startswith("1 used, 0 unusable")


def test_what_a_server_says_reaches_no_terminal_as_it_is(
    world: World, server: RemoteServer
) -> None:
    def escape(request: BaseHTTPRequestHandler, content: bytes | None) -> None:
        request.wfile.write(b"\x1b[2J\x1b]0;owned\x07" + b"x" * 3000 + b"\r\n\r\n")
        request.close_connection = True

    server.toxic = escape
    result = run("pull", "--dir", world.folder / "b")
    assert result.exit_code == 1 and server.url in result.output
    assert all(c.isprintable() or c == "\n" for c in result.output), repr(result.output)
    assert len(result.output) < 1000
