"""Kernels of another kind of machine are proved here before they answer, whoever signed them."""

from __future__ import annotations

import dataclasses
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import run_program
from eagercache import _C
from eagercache.base import config, environment, machine_kind
from eagercache.base.machine_kind import is_of_this_kind, kind_for
from eagercache.remote import transfer
from eagercache.remote.entries import Exchange
from eagercache.remote.plan import Remote, plan_of
from eagercache.service.request import Request, message
from eagercache.service.settings import ServiceSettings
from remote_server import RemoteServer
from remote_world import TEXT, World, key_of, tier_of

pytestmark = pytest.mark.once

OTHER = "GenuineOther 6 1 1 another processor"


def of_another_kind(
    source: Any, target: Any, folder: Path, change: Callable[[bytes], bytes] = bytes
) -> int:
    """Publishes a store's entries in another one as if another kind of machine had made them."""
    entries = [entry for entry in source.entries() if entry["kind"] != "failed"]
    for entry in entries:
        sources = []
        for index, item in enumerate(entry["objects"]):
            path = folder / f"{entry['key']}.{index}"
            content = Path(source.object_file(entry["key"], index, str(folder))).read_bytes()
            path.write_bytes(change(content))
            sources.append((item["kind"], str(path)))
        facts = {**entry["facts"], "machine": OTHER}
        target.publish({**entry, "facts": facts}, sources)
    return len(entries)


# ---- what the store gets -------------------------------------------------------------------------


@pytest.fixture
def remote(world: World, server: RemoteServer) -> str:
    """The URL of a remote with a kernel (1) and a decision (2) of another kind of machine."""
    store = world.store("other")
    assert of_another_kind(world.filled("made", 1, 2), store, world.folder) == 2
    sent = transfer.push([tier_of(server.url)], world.exchange(store, server.url))
    assert sent.sent == 2 and not sent.errors
    return server.url


def test_a_kernel_of_another_kind_is_no_entry_before_it_was_tried(
    world: World, remote: str
) -> None:
    store = world.store("here")
    exchange = world.exchange(store, remote, signs=False)
    assert exchange.fetch(tier_of(remote), key_of(1)) == "untried"
    assert exchange.fetch(tier_of(remote), key_of(2)) == "native"  # a hint that is taken
    assert store.find(key_of(1)) is None and store.find(key_of(2))["kind"] == "native"
    (untried,) = [entry for entry in store.entries() if entry["kind"] == "kernel"]
    assert "not tried here" in store.withdrawal(untried)
    assert store.find_untried(key_of(1))["facts"]["untried"] == "values"
    assert store.find_untried(key_of(2)) is None
    # To take it again changes nothing, and a machine of its kind uses it at once.
    taken = transfer.pull([tier_of(remote)], exchange)
    assert (taken.present, taken.fetched, taken.untried) == (2, 0, 1)


def test_measurements_of_another_kind_count_for_nothing_where_that_is_wanted(
    world: World, remote: str
) -> None:
    store = world.store("here")
    plan = dataclasses.replace(world.plan(remote, signs=False), retime=True)
    exchange = Exchange(store, TEXT, plan)
    taken = transfer.pull([tier_of(remote)], exchange)
    assert (taken.fetched, taken.untried) == (2, 2)
    for number in (1, 2):
        assert store.find(key_of(number)) is None
        assert store.find_untried(key_of(number))["facts"]["untried"] == "values times"


def test_what_was_not_tried_goes_on_as_it_came(
    world: World, server: RemoteServer, remote: str
) -> None:
    store = world.store("here")
    transfer.pull([tier_of(remote)], world.exchange(store, remote, signs=False))
    further = f"file://{world.folder}/further"
    sent = transfer.push([tier_of(further)], world.exchange(store, further))
    assert sent.sent == 2 and not sent.errors
    last = world.store("last")
    reader = world.exchange(last, further, signs=False)
    assert reader.fetch(tier_of(further), key_of(1)) == "untried"
    assert last.find_untried(key_of(1))["facts"]["machine"] == OTHER


def test_who_cannot_tell_its_kind_tries_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = kind_for("CPU")
    assert len(mine.split()) >= 5 and is_of_this_kind({"machine": mine})
    assert not is_of_this_kind({"machine": OTHER}) and not is_of_this_kind({})
    # No GPU here: nothing for one is of this machine's kind, and no CPU's name helps.
    monkeypatch.setattr(machine_kind, "_GPUS", tmp_path)
    for text in ("", mine):
        assert not is_of_this_kind({"dispatch_key": "CUDA", "machine": text})
    for number, model in enumerate(("NVIDIA H100", "NVIDIA H100", "NVIDIA H200")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")
        machine_kind._gpu.cache_clear()
        known = {"dispatch_key": "CUDA", "machine": "NVIDIA H100"}
        assert is_of_this_kind(known) == (number < 2), "of two kinds none is this machine's"
    machine_kind._gpu.cache_clear()
    machine_kind._cpu.cache_clear()
    for text in ("", "processor: 0\nvendor_id : x\n", "vendor_id"):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(machine_kind, "_CPUINFO", tmp_path / "cpuinfo")
        assert kind_for("CPU") == "" and not is_of_this_kind({"machine": ""})
        machine_kind._cpu.cache_clear()


def test_the_wish_to_measure_again_is_a_setting_or_an_argument(world: World) -> None:
    trust = str(world.folder / "own.pub")
    for variable, argument, expected in (
        ("", None, False),
        ("1", None, True),
        ("1", False, False),
        ("", True, True),
    ):
        settings = config.read_settings({"EAGERCACHE_REMOTE_RETIME": variable})
        plan = plan_of(Remote("memory://x", trust, retime=argument), settings)
        assert plan is not None and plan.retime is expected


def test_a_kernel_that_a_worker_was_lost_over_is_not_tried_again() -> None:
    settings = ServiceSettings("root", "text")
    request = Request({"digest": "0"}, lambda answer: None, settings, 0.0, 0.0, 0, 0.0)
    assert message(request)["tries"]
    request.crashes = 1
    assert not message(request)["tries"]


# ---- programs ------------------------------------------------------------------------------------

ANSWERED = """
for _ in range(4):
    answers = calls()
eagercache.wait()
torch.testing.assert_close(answers, expected)
s = eagercache.stats()
report(hits=s.hits, modules=s.module_hits, compiles=s.compiles, failures=s.failures,
       remote=s.remote.__dict__)
"""
CALLS = """
import torch, eagercache
torch.manual_seed(0)
x = torch.randn(64, 96)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
def calls():
    answers = [torch.var(x, -1), torch.nn.functional.leaky_relu(x, 0.40625)]
    for n in range(6):
        answers.append(torch.softmax(torch.full((n + 3, 40), 0.5), -1))
        answers.append(x.clone().addcdiv_(x, x.abs() + 1.0, value=0.3 + n / 7))
    with torch.no_grad():
        answers.append(model(torch.ones(4, 8)))
    return answers
expected = calls()
eagercache.enable(["var.correction", "leaky_relu", "_softmax", "addcdiv_"],
                  modules=[torch.nn.Sequential], on_miss="wait", choose="always")
"""
TRAINED = """
import torch, eagercache
@eagercache.op("demo::looked_up", autograd=False)
def looked_up(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.tanh(table[at]) * 2.0
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
tables = [torch.randn(n + 5, 6) for n in range(6)]
def calls():
    answers = [looked_up(table, torch.arange(len(table)) - 2) for table in tables]
    model.zero_grad()
    answers.append(model(torch.ones(4, 8)))
    answers[-1].square().sum().backward()
    return [*answers, *(p.grad.clone() for p in model.parameters())]
expected = calls()
eagercache.enable((), modules=[torch.nn.Sequential], training=True, on_miss="wait", choose="always")
"""
ONE_CALL = """
import torch, eagercache
x = torch.randn(64, 96)
expected = torch.nn.functional.leaky_relu(x, 0.40625)
eagercache.enable(["leaky_relu"], on_miss="wait", choose="always")
for _ in range(4):
    answer = torch.nn.functional.leaky_relu(x, 0.40625)
torch.testing.assert_close(answer, expected)
s = eagercache.stats()
report(hits=s.hits, compiles=s.compiles, failures=s.failures, remote=s.remote.__dict__)
"""


def run(world: World, program: str, name: str, url: str = "", **variables: str) -> dict[str, Any]:
    folder = world.folder / name
    folder.mkdir(mode=0o700, exist_ok=True)
    if url:
        trust = str(world.folder / "own.pub")
        variables = {"EAGERCACHE_REMOTE": url, "EAGERCACHE_REMOTE_TRUST": trust, **variables}
    return run_program(program, folder, fills=True, **variables)


def sent_as_of_another_kind(
    world: World, url: str, change: Callable[[bytes], bytes] = bytes
) -> tuple[str, int]:
    """(the environment's text, entries) of what the store "made" has, in a remote."""
    text = environment.environment_text(cxx=config.read_settings().cxx)
    made, other = (_C.Store(str(world.folder / name), text) for name in ("made", "other"))
    count = of_another_kind(made, other, world.folder, change)
    exchange = Exchange(other, text, world.plan(url))
    assert transfer.push([tier_of(url)], exchange).sent == count
    return text, count


def entries(world: World, name: str, text: str) -> list[dict[str, Any]]:
    store = _C.Store(str(world.folder / name), text)
    return [entry for entry in store.entries() if not store.withdrawal(entry)]


EVERY_FORM = [
    (CALLS + ANSWERED, {"bare", "scalars", "shapes", "module"}, 5),
    (TRAINED + ANSWERED, {"bare", "shapes", "module-training"}, 4),
]


@pytest.mark.parametrize(("program", "forms", "fewest"), EVERY_FORM, ids=["calls", "trained"])
def test_kernels_of_every_form_are_tried_here_and_not_compiled(
    world: World, server: RemoteServer, program: str, forms: set[str], fewest: int
) -> None:
    first = run(world, program, "made")
    assert first["compiles"] >= fewest and first["modules"] > 0, first
    text, _ = sent_as_of_another_kind(world, server.url)
    second = run(world, program, "here", server.url)
    assert second["compiles"] == 0 and second["failures"] == 0, second
    assert second["hits"] == first["hits"] and second["modules"] == first["modules"]
    assert second["remote"]["untried"] > 0 and "untried_left" not in second["stderr"]
    found = entries(world, "here", text)
    kernels = [entry for entry in found if entry["kind"] == "kernel"]
    assert {entry["facts"]["form"] for entry in kernels} >= forms
    for entry in kernels:
        facts = entry["facts"]
        assert facts["machine"] == kind_for("CPU") and facts["made_on"] == OTHER, facts
        # Who takes the key back takes back what it signed.
        assert facts["signer"] == _C.public_key(str(world.folder / "own.pub")), facts
        assert "untried" not in facts and facts["numerics"]
    # From then on it is like any other entry, for this machine's kind and in this store.
    third = run(world, program, "here", server.url)
    assert third["compiles"] == 0 and third["remote"]["hits"] == 0, third


def test_a_kernel_with_other_values_is_never_used_though_its_signature_is_right(
    world: World, server: RemoteServer
) -> None:
    assert run(world, ONE_CALL, "made")["hits"] == 3

    def other_slope(content: bytes) -> bytes:
        changed = content
        for form in ("<f", "<d"):
            changed = changed.replace(struct.pack(form, 0.40625), struct.pack(form, 0.390625))
        assert changed != content, "the number is in the code"
        return changed

    text, _ = sent_as_of_another_kind(world, server.url, other_slope)
    result = run(world, ONE_CALL, "here", server.url, EAGERCACHE_LOG="warning")
    assert result["compiles"] == 1 and result["hits"] == 3 and result["failures"] == 0, result
    assert result["remote"]["untried"] == 1
    (entry,) = entries(world, "here", text)
    assert "made_on" not in entry["facts"] and "signer" not in entry["facts"]


def test_a_kernel_that_kills_its_worker_here_is_compiled_instead(
    world: World, server: RemoteServer
) -> None:
    assert run(world, ONE_CALL, "made")["hits"] == 3

    def dying(content: bytes) -> bytes:
        path = world.folder / "dying.so"
        path.write_bytes(content)
        words = ["nm", "-D", "--defined-only", str(path)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        changed = bytearray(content)
        for address, kind, _ in map(str.split, said.splitlines()):
            if kind == "T":
                place = file_offset(content, int(address, 16))
                changed[place : place + 2] = b"\x0f\x0b"  # ud2
        assert changed != content
        return bytes(changed)

    sent_as_of_another_kind(world, server.url, dying)
    result = run(world, ONE_CALL, "here", server.url)
    assert result["compiles"] == 1 and result["hits"] == 3 and result["failures"] == 0, result
    assert result["remote"]["untried"] == 1


def file_offset(content: bytes, address: int) -> int:
    """Where an address of a shared object is in its file."""
    (first,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    for number in range(count):
        at = first + number * size
        kind, _, offset, start, _, length = struct.unpack_from("<IIQQQQ", content, at)
        if kind == 1 and start <= address < start + length:
            return int(offset + address - start)
    raise AssertionError(hex(address))


def test_what_another_kind_measured_is_measured_here_on_request(
    world: World, server: RemoteServer
) -> None:
    assert run(world, ONE_CALL, "made")["hits"] == 3
    text, _ = sent_as_of_another_kind(world, server.url)
    made = entries(world, "made", text)[0]["facts"]
    taken = run(world, ONE_CALL, "taken", server.url)
    assert taken["compiles"] == 0 and taken["hits"] == 3, taken
    facts = entries(world, "taken", text)[0]["facts"]
    assert (facts["native_ns"], facts["kernel_ns"]) == (made["native_ns"], made["kernel_ns"])
    again = run(world, ONE_CALL, "timed", server.url, EAGERCACHE_REMOTE_RETIME="1")
    assert again["compiles"] == 0 and again["hits"] == 3, again
    facts = entries(world, "timed", text)[0]["facts"]
    assert (facts["native_ns"], facts["kernel_ns"]) != (made["native_ns"], made["kernel_ns"])
    assert facts["made_on"] == OTHER and facts["machine"] == kind_for("CPU")
