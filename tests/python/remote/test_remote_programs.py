"""Programs with remotes: kernels without compiling them, and no harm when a remote does any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import remote_server
from click.testing import CliRunner
from conftest import run_program
from eagercache.cli import main as cli
from remote_server import RemoteServer
from remote_world import World

PROGRAM = """
import time, torch, eagercache
x = torch.randn(64, 96)
expected = x.double().var(-1).float()
eagercache.enable(["var.correction"], on_miss="wait", choose="always")
for _ in range(3): answer = torch.var(x, -1)
torch.testing.assert_close(answer, expected)
while eagercache.stats().remote.unsent or eagercache.stats().remote.sent < SENT:
    time.sleep(0.02)
s = eagercache.stats()
report(hits=s.hits, compiles=s.compiles, failures=s.failures, remote=s.remote.__dict__)
"""


def run(world: World, name: str, url: str, *, sent: int = 0, **variables: str) -> dict[str, Any]:
    folder = world.folder / name
    folder.mkdir(mode=0o700, exist_ok=True)
    trust = str(world.folder / "own.pub")
    return run_program(
        PROGRAM.replace("SENT", str(sent)),
        folder,
        fills=True,
        EAGERCACHE_REMOTE=url,
        **{"EAGERCACHE_REMOTE_TRUST": trust, **variables},
    )


@pytest.fixture
def key(world: World) -> dict[str, str]:
    return {"EAGERCACHE_REMOTE_KEY": str(world.folder / "own.pem")}


def test_a_second_machine_compiles_nothing(
    world: World, server: RemoteServer, key: dict[str, str]
) -> None:
    first = run(world, "a", server.url, sent=1, **key)
    assert first["compiles"] == 1 and first["remote"]["misses"] == 1
    second = run(world, "b", server.url)
    assert second["compiles"] == 0 and second["hits"] == 2, second
    assert second["remote"]["hits"] == 1 and second["remote"]["sent"] == 0
    # From then on its own store has it.
    third = run(world, "b", server.url)
    assert third["remote"]["hits"] == third["remote"]["misses"] == 0 and third["hits"] == 3


def test_a_module_of_another_machine_is_not_compiled_either(
    world: World, server: RemoteServer
) -> None:
    program = """
        import torch, eagercache
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        eagercache.enable((), modules=[torch.nn.Sequential], on_miss="wait", choose="always")
        with torch.no_grad():
            for _ in range(12): model(torch.ones(4, 8))
        eagercache.wait()
        s = eagercache.stats()
        report(hits=s.module_hits, compiles=s.compiles, remote=s.remote.hits)
    """
    variables = {
        "EAGERCACHE_REMOTE": server.url,
        "EAGERCACHE_REMOTE_TRUST": str(world.folder / "own.pub"),
    }
    for name in "ab":
        (world.folder / name).mkdir(mode=0o700)
    first = run_program(program, world.folder / "a", fills=True, **variables)
    assert first["compiles"] >= 1 and first["hits"] > 0, first
    options = ["--dir", str(world.folder / "a"), "--key", str(world.folder / "own.pem")]
    pushed = CliRunner().invoke(
        cli.main, ["push", "--remote", server.url, *options], catch_exceptions=False
    )
    assert pushed.exit_code == 0, pushed.output
    second = run_program(program, world.folder / "b", fills=True, **variables)
    assert second["compiles"] == 0 and second["hits"] > 0 and second["remote"] >= 1, second


def _tamper_entry(server: RemoteServer) -> None:
    for path in server.content:
        if "/e/" in path:
            server.content[path] = server.content[path][:-1] + b"?"


def _tamper_object(server: RemoteServer) -> None:
    for path, content in list(server.content.items()):
        if "/o/" in path:
            server.content[path] = content[:-1] + bytes([content[-1] ^ 1])


def _toxic(toxic: remote_server.Toxic) -> Any:
    def set_it(server: RemoteServer) -> None:
        server.toxic = toxic

    return set_it


def test_a_program_compiles_for_itself_whatever_a_remote_does(
    world: World, server: RemoteServer, key: dict[str, str]
) -> None:
    run(world, "a", server.url, sent=1, **key)
    whole = dict(server.content)
    for name, harm in {
        "entry": _tamper_entry,
        "object": _tamper_object,
        "hangs": _toxic(remote_server.hang),
        "cuts": _toxic(remote_server.cut),
        "truncates": _toxic(remote_server.truncate),
        "corrupts": _toxic(remote_server.corrupt),
        "fails": _toxic(remote_server.status(503)),
    }.items():
        server.content, server.toxic = dict(whole), None
        harm(server)
        result = run(world, name, server.url)
        assert result["compiles"] == 1 and result["hits"] == 2, (name, result)
        assert result["remote"]["hits"] == 0, (name, result)
    # Nor does another key's signature help.
    server.content, server.toxic = dict(whole), None
    other = {"EAGERCACHE_REMOTE_TRUST": str(world.folder / "other.pub")}
    result = run(world, "signer", server.url, **other)
    assert result["compiles"] == 1 and result["remote"]["refused"] == {"signature": 1}


def test_what_was_tampered_with_is_replaced_by_who_may_write(
    world: World, server: RemoteServer, key: dict[str, str]
) -> None:
    run(world, "a", server.url, sent=1, **key)
    _tamper_object(server)
    mended = run(world, "b", server.url, sent=1, **key)
    assert mended["compiles"] == 1 and mended["remote"]["refused"] == {"damaged": 1}
    assert run(world, "c", server.url)["compiles"] == 0


SETTINGS = """
import warnings, eagercache
def said(**options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            eagercache.enable(["var.correction"], **options)
        except ValueError as error:
            return str(error)
    return " ".join(str(w.message) for w in caught if "eagercache" in str(w.message))
"""


def test_bad_remotes_are_one_warning_or_one_error(world: World, cache: Path) -> None:
    own, pem = str(world.folder / "own.pub"), str(world.folder / "own.pem")
    result = run_program(
        SETTINGS
        + f"""
report(first=said(), active=eagercache.is_enabled(), second=said(), none=said(remote=()),
       bad=[said(remote="ftp://host"), said(remote=42), said(remote=["memory://x", 1]),
            said(remote=eagercache.Remote("memory://x", trust="none.pub")),
            said(remote=eagercache.Remote("memory://x", trust=42)),
            said(remote=eagercache.Remote("memory://x", key=42)),
            said(remote="memory://x")],
       good=[said(remote=eagercache.Remote("memory://x", trust={own!r})),
             said(remote=eagercache.Remote(["memory://x"], key={pem!r}))])
""",
        cache,
        EAGERCACHE_REMOTE="memory://x",
        EAGERCACHE_DIR=str(cache),
    )
    assert "EAGERCACHE_REMOTE is not used" in result["first"] and result["active"]
    assert "no key is trusted" in result["first"]
    assert result["second"] == result["none"] == "" and result["good"] == ["", ""]
    texts = (
        "'ftp://host' is none of",
        "remote=42 is no URL",
        "is no URL, list of URLs",
        "none.pub cannot be read",
        "trust=42 is no file",
        "key=42 is no file",
        "no key is trusted",
    )
    for said, text in zip(result["bad"], texts, strict=True):
        assert text in said, result["bad"]
