"""The real worker: requests in, verdicts out, entries in the store."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import clean_environment, run_python
from eagercache.base import environment
from eagercache.base.load import core
from eagercache.base.toolchain import ToolchainError
from eagercache.service.service import CompileService
from eagercache.service.settings import ServiceSettings
from eagercache.worker import main as worker
from eagercache.worker.inductor.commands import CompileFailed
from eagercache.worker.jobs.job import Job
from eagercache.worker.jobs.manifest import facts_of
from eagercache.worker.jobs.outcome import Outcome
from misbehaving_worker import wait_until
from test_calls import NONE, boolean, describe, integer, integers, tensor

VAR = describe("var.correction", tensor((64, 96)), integers(-1), NONE, boolean(False))
LISTS = describe(
    "cat",
    {"kind": "tensor_list", "elements": [tensor((8, 6), (1, 8)), tensor((8, 10), dtype="float64")]},
    integer(1),
)
INDEX = describe(
    "embedding",
    tensor((64, 32)),
    tensor((5,), dtype="int64"),
    integer(-1),
    boolean(False),
    boolean(False),
)


@pytest.mark.parametrize("frame", [{}, {"a": [1, "ü", None]}, {"long": "x" * 100_000}])
def test_a_frame_comes_back_as_it_was(frame: dict[str, Any]) -> None:
    stream = io.BytesIO()
    worker.write_frame(stream, frame)
    worker.write_frame(stream, {"second": 2})
    stream.seek(0)
    assert worker.read_frame(stream) == frame
    assert worker.read_frame(stream) == {"second": 2}
    assert worker.read_frame(stream) is None


@pytest.mark.parametrize("cut", [1, 3, 4, 10])
def test_a_cut_frame_is_the_end(cut: int) -> None:
    stream = io.BytesIO()
    worker.write_frame(stream, {"key": "value"})
    assert worker.read_frame(io.BytesIO(stream.getvalue()[:cut])) is None


@pytest.mark.parametrize("body", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00[]", b"\x01\x00\x00\x00{"])
def test_a_malformed_frame_raises(body: bytes) -> None:
    with pytest.raises(ValueError):
        worker.read_frame(io.BytesIO(body))


# Digests are made by the hook; a process of its own has hooks without disturbing this one.
DIGESTS = """
import json, sys
from eagercache.base.load import core
from eagercache.calls.call import Call
for description in json.loads(sys.argv[1]):
    name = description["op"], description["overload"], "CPU"
    core.register(*name)
    probe, call = core.Probe(*name), Call(description)
    with call.state.applied():
        probe.capture()
        call.invoke(call.sample("unit", 1).values)
    assert probe.captured and not probe.aside, (name, probe.aside)
    print(probe.digest(sys.argv[2]))
    del probe
"""


def with_digests(descriptions: list[dict[str, Any]], choose: str) -> list[dict[str, Any]]:
    done = run_python(DIGESTS, clean_environment(), json.dumps(descriptions), choose)
    assert done.returncode == 0, done.stderr
    digests = done.stdout.split()
    return [{**d, "digest": digest} for d, digest in zip(descriptions, digests, strict=True)]


class Requests:
    """A service on a private store, and its answers."""

    def __init__(self, root: Path, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "store_root": str(root),
            "environment": environment.environment_text(),
            "choose": "always",
            "workers": 1,
            "slots_folder": root.parent / "slots",
            "again_delay": 0.0,
            "idle_check": 0.05,
            "machine_is_idle": lambda: True,
            **changes,
        }
        self.settings = ServiceSettings(**settings)
        self.service = CompileService(self.settings)

    def ask(self, descriptions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for description in descriptions:
            self.service.submit(description, answers.append)
        assert self.service.wait(280)
        order = [description["digest"] for description in descriptions]
        return sorted(answers, key=lambda answer: order.index(answer["digest"]))

    def store(self) -> Any:
        assert core is not None
        return core.Store(self.settings.store_root, self.settings.environment)


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Requests]:
    root = tmp_path_factory.mktemp("worker") / "store"
    root.mkdir(mode=0o700)
    requests = Requests(root)
    yield requests
    requests.service.close()


@pytest.fixture(scope="module")
def compiled(requests: Requests) -> list[dict[str, Any]]:
    """VAR, LISTS and INDEX, answered by one worker."""
    return requests.ask(with_digests([VAR, LISTS, INDEX], "always"))


def test_a_kernel_is_proved_timed_and_published(
    requests: Requests, compiled: list[dict[str, Any]]
) -> None:
    answer = compiled[0]
    assert (answer["verdict"], answer["found"]) == ("kernel", False), answer
    entry = requests.store().find(answer["digest"])
    assert entry["kind"] == "kernel"
    assert [thing["kind"] for thing in entry["objects"]] == ["so"]
    assert "avx2" in entry["cpu_features"] or entry["cpu_features"] == ["sse", "sse2"]
    facts = entry["facts"]
    assert facts["op"] == "aten::var.correction" and facts["form"] == "bare"
    assert json.loads(facts["launch_plan"])["inputs"] == 1
    assert facts["numerics"] in ("bitwise", "accurate")
    assert float(facts["native_ns"]) > 0 and float(facts["kernel_ns"]) > 0
    assert json.loads(facts["call"])["args"] == VAR["args"]
    for step in ("compile", "prove", "time"):
        assert float(facts[f"seconds_{step}"]) > 0


def test_lists_and_mixed_dtypes_are_compiled_too(compiled: list[dict[str, Any]]) -> None:
    assert compiled[1]["verdict"] == "kernel", compiled[1]
    assert compiled[1]["numerics"] == "bitwise"


def test_code_that_checks_its_indices_is_left_to_native(
    requests: Requests, compiled: list[dict[str, Any]]
) -> None:
    assert (compiled[2]["verdict"], compiled[2]["reason"]) == (
        "native",
        "generated code checks values",
    )
    assert requests.store().find(compiled[2]["digest"])["kind"] == "native"


def test_a_published_entry_is_found_and_not_made_again(
    requests: Requests, compiled: list[dict[str, Any]]
) -> None:
    before = requests.service.compiles
    (again,) = requests.ask([{**VAR, "digest": compiled[0]["digest"]}])
    assert (again["verdict"], again["found"]) == ("kernel", True)
    assert requests.service.compiles == before


@pytest.mark.parametrize(("stored", "asked", "verdict"), [(1, 1, "kernel"), (2, 1, "native")])
def test_what_noise_hid_is_measured_again_where_nobody_has(
    requests: Requests, stored: int, asked: int, verdict: str
) -> None:
    (description,) = with_digests([describe("abs", tensor((8 + stored,)))], "always")
    facts = {"reason": "undecided", "measured": str(stored)}
    store = requests.store()
    store.publish({"key": description["digest"], "kind": "native", "facts": facts})
    answers: list[dict[str, Any]] = []
    requests.service.submit({**description, "again": asked}, answers.append)
    assert requests.service.wait(1)
    assert wait_until(lambda: bool(answers), 120)
    assert (answers[0]["verdict"], answers[0]["found"]) == (verdict, verdict == "native")
    assert store.find(description["digest"])["kind"] == verdict


def test_a_locked_key_is_answered_by_whoever_holds_it(
    requests: Requests, compiled: list[dict[str, Any]]
) -> None:
    store = requests.store()
    (description,) = with_digests([describe("neg", tensor((8,)))], "always")
    lock = store.try_lock(description["digest"])
    answers: list[dict[str, Any]] = []
    requests.service.submit(description, answers.append)
    assert not requests.service.wait(2.0)
    manifest = {"key": description["digest"], "kind": "native", "facts": {"reason": "by another"}}
    store.publish(manifest)
    lock.release()
    assert requests.service.wait(60)
    assert (answers[0]["verdict"], answers[0]["reason"]) == ("native", "by another")


def test_a_call_with_another_key_here_fails(requests: Requests) -> None:
    (answer,) = requests.ask([{**VAR, "digest": "ab" * 32}])
    assert answer["verdict"] == "failed"
    assert answer["reason"].startswith("call could not be rebuilt")
    assert requests.store().find("ab" * 32)["failure"] == "deterministic"


def test_a_description_that_makes_no_call_fails(requests: Requests) -> None:
    (answer,) = requests.ask([{**VAR, "digest": "cd" * 32, "op": "aten::no_such_operator"}])
    assert (answer["verdict"], answer["failure"]) == ("failed", "deterministic")
    assert "there is no operator" in answer["reason"]


def test_nothing_temporary_is_left_but_the_workers_own_folder(
    requests: Requests, compiled: list[dict[str, Any]]
) -> None:
    root = Path(requests.settings.store_root)
    left = {path.name for path in root.rglob("*") if path.suffix in (".cpp", ".o", ".log")}
    assert left == set()


@pytest.mark.once
def test_another_environment_is_refused_with_the_differing_field(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir(mode=0o700)
    text = environment.environment_text().replace(
        "platform.page_size: 4096", "platform.page_size: 1"
    )
    other = Requests(root, environment=text)
    try:
        (answer,) = other.ask([{**VAR, "digest": "ef" * 32}])
    finally:
        other.service.close()
    assert answer["reason"] == "the worker's environment differs in platform.page_size"
    assert answer["failure"] == "transient"


class JobOfPlan(Job):
    """A job whose plan is a word."""

    @property
    def contract(self) -> str:
        """What its object is to say."""
        return f"of {self.plan}"


class FailsWith:
    """A builder of kernels for which one plan is too much."""

    def __init__(self, bad: str) -> None:
        self.seconds = {"kernel": 1.0}
        self.asked: list[list[str]] = []
        self._bad = bad

    def build(self, plans: list[str], directory: Path, contracts: list[str]) -> Path:
        """The library, unless the plan is among ``plans``."""
        assert contracts == [f"of {plan}" for plan in plans]
        self.asked.append(plans)
        if self._bad in plans:
            raise CompileFailed("no such instruction", transient=False)
        return directory / "kernels.so"


@pytest.mark.once
def test_what_fails_in_a_batch_is_compiled_alone(tmp_path: Path) -> None:
    jobs = []
    for plan in ("first", "bad", "last"):
        job = JobOfPlan({"description": {}}, core)
        job.lowered = SimpleNamespace(plan=plan)  # type: ignore[assignment]
        job._directory = tmp_path / plan
        job.store = SimpleNamespace(make_work_directory=lambda: str(tmp_path / "together"))
        jobs.append(job)
    serving = worker.Worker()
    builder = FailsWith("bad")
    serving._tools = SimpleNamespace(bare=builder)  # type: ignore[assignment]
    assert serving._build(jobs) == tmp_path / "together"
    assert builder.asked == [["first", "bad", "last"], ["first"], ["bad"], ["last"]]
    first, bad, last = jobs
    assert first._library == tmp_path / "first/kernels.so" and first.outcome is None
    assert last._library == tmp_path / "last/kernels.so" and last.outcome is None
    assert bad.outcome is not None and not bad.outcome.transient
    assert (bad.outcome.verdict, bad.outcome.reason) == ("failed", "no such instruction")


@pytest.mark.once
def test_what_hindered_one_request_is_the_reason_of_the_next_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
        monkeypatch.setenv(variable, os.environ.get(variable, str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    serving = worker.Worker()
    store: Any = SimpleNamespace(make_work_directory=lambda: tmp_path)
    for _ in range(2):
        with pytest.raises(ToolchainError, match="no-compiler"):
            serving._make_tools({"cxx": "/nowhere/no-compiler", "store_root": tmp_path}, store)


def test_a_call_on_hundreds_of_tensors_leaves_a_manifest_its_room() -> None:
    def facts(tensors: int) -> dict[str, str]:
        elements = [tensor((30, 20))] * tensors
        described = describe("_foreach_neg_", {"kind": "tensor_list", "elements": elements})
        request = {"description": {"dispatch_key": "CPU", **described}, "choose": "always"}
        return facts_of(request, Outcome("native"), {})

    assert len(json.loads(facts(3)["call"])["args"][0]["elements"]) == 3
    large = facts(900)
    assert "call" not in large and large["op"] == "aten::_foreach_neg_"
