"""A worker that speaks the protocol and misbehaves as requests say, for tests of the service."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import eagercache
import pytest
from eagercache.service.service import CompileService
from eagercache.service.settings import ServiceSettings

SOURCES = str(Path(eagercache.__file__).parents[1])
# Speaks the protocol; `do` in the description says how to behave. Keeps a note of what it was
# asked.
WORKER = """
import io, json, os, signal, subprocess, sys, time, types
# Packages that are their folders alone: ours would import torch, which takes seconds.
for package in ("eagercache", "eagercache.base", "eagercache.worker"):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [os.path.join(os.environ["SOURCES"], *package.split("."))]
from eagercache.worker.main import read_frame, watch_parent, write_frame
assert "torch" not in sys.modules
source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
watch_parent(int(sys.argv[-1]))
notes = open(os.environ["NOTES"], "a")
def note(text):
    notes.write(text + "\\n"); notes.flush()
note(f"start {os.getpid()}")
held = io.BytesIO()  # answers that go out together with the next one
if os.environ.get("BROKEN"):
    sys.exit(3)
write_frame(sink, {"ready": True})
def requests():
    while (frame := read_frame(source)) is not None:
        if "batch" in frame:
            note(f"batch {len(frame['batch'])}")
        for index, request in enumerate(frame.get("batch", [frame])):
            if os.environ.get("SAYS_WHERE"):
                write_frame(sink, {"at": index})
            yield index, request
for index, request in requests():
    call = request["description"]
    do = call["do"]
    if "record" in request:
        note("record " + request["record"]["failure"] + " " + request["record"]["reason"])
        do = "answer"
    else:
        note(f"{do} {call['id']} {request['choose']}")
    if do == "print":
        print("noise on standard output", flush=True)
        os.write(1, b"and below it")
    if do == "crash" or (do == "crash_once" and not os.path.exists(os.environ["NOTES"] + ".once")):
        open(os.environ["NOTES"] + ".once", "w").close()
        os.kill(os.getpid(), signal.SIGSEGV)
    if do.startswith("signal "):
        number = int(do.split()[1])
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)  # nohup has programs ignore SIGHUP
        os.kill(os.getpid(), number)
    if do.startswith("says "):
        print(do[5:], file=sys.stderr, flush=True)
        os._exit(1)
    if do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if do == "half":
        sink.write(b"\\x40\\0\\0\\0half of it"); sink.flush()
        time.sleep(600)
    if do == "odd":
        write_frame(sink, {"id": 1, "index": 0, "verdict": "kernel", "seconds": {"compile": []}})
        continue
    if do == "exit":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(9)
    if do == "hang_once" and open(os.environ["NOTES"]).read().count("hang_once") > 1:
        do = "answer"
    if do.startswith("hang"):
        child = subprocess.Popen(["sleep", "600"])
        note(f"child {child.pid}")
        time.sleep(600)
    if do == "slow":
        begin = time.monotonic()
        time.sleep(0.4)
        note(f"span {begin} {time.monotonic()}")
    verdict = "failed" if do == "fail" else "kernel"
    if do == "busy_twice":
        call["times"] = 1 + open(os.environ["NOTES"]).read().count("busy_twice")
        verdict = "busy" if call["times"] < 4 else "kernel"
    if do == "busy":
        verdict = "busy"
    write_frame(held, {"id": call["id"], "index": index, "verdict": verdict, "reason": "",
                       "found": False, "seconds": {"compile": 1.5, "compile.link": 1.0}})
    if do != "hold":
        sink.write(held.getvalue())
        sink.flush()
        held = io.BytesIO()
"""


class Answers:
    """Collects responses in the order of arrival."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def __call__(self, response: dict[str, Any]) -> None:
        with self.lock:
            self.all.append(response)

    def by_id(self) -> dict[int, dict[str, Any]]:
        return {answer["id"]: answer for answer in self.all}


def worker_files(notes: Path) -> dict[str, str]:
    return {"NOTES": str(notes), "SOURCES": SOURCES}


class Bench:
    """Services with the misbehaving worker, and what the worker noted."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.notes_path = folder / "notes"
        self.services: list[CompileService] = []

    def service(self, extra: dict[str, str] | None = None, **changes: Any) -> CompileService:
        settings: dict[str, Any] = {
            "store_root": "/nowhere",
            "environment": "a: 1\n",
            "workers": 1,
            "request_timeout": 20.0,
            "busy_first_delay": 0.02,
            "slots_folder": self.script.parent / "slots",
            "largest_batch": 1,
            "first_batch": 1,
            "worker_arguments": (str(self.script),),
            "extra_environment": {**worker_files(self.notes_path), **(extra or {})},
            **changes,
        }
        service = CompileService(ServiceSettings(**settings))
        self.services.append(service)
        return service

    @property
    def notes(self) -> list[str]:
        return self.notes_path.read_text().splitlines() if self.notes_path.exists() else []

    def pids(self, word: str) -> list[int]:
        return [int(note.split()[1]) for note in self.notes if note.startswith(word)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for service in bench.services:
        service.close()


def call(number: int, do: str = "answer", **more: Any) -> dict[str, Any]:
    digest = f"{number:064x}"
    return {"id": number, "op": "aten::abs", "overload": "", "digest": digest, "do": do, **more}


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_until(condition: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
