"""`eagercache.record`: all eligible calls of the processes that record, and nothing is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Program
from eagercache.calls import trace

pytestmark = pytest.mark.once


def counts(path: Path) -> dict[str, int]:
    result = trace.Trace()
    trace.read(path, result)
    names: dict[str, int] = {}
    for call in result.calls.values():
        names[call.name] = names.get(call.name, 0) + call.calls
    return names


def test_hits_decisions_and_misses_are_all_recorded(warm_program: Program, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    result = warm_program(
        f"""
with eagercache.record({str(path)!r}) as recording:
    for _ in range(5):
        shared_calls()        # kernels of the store answer
        torch.var(w, -1)      # nothing does
    torch.var(torch.ones(0, 3), -1)  # steps aside
    torch.mm(x, x.t())        # is not hooked
shared_calls()                # after the end
s = eagercache.stats()
report(hits=s.hits, compiles=s.compiles, calls=recording.calls, keys=recording.keys)
"""
    )
    assert counts(path) == {
        "aten::var.correction": 10,
        "aten::_softmax": 5,
        "aten::silu": 5,
        "aten::native_layer_norm": 5,
        "aten::relu": 5,
    }
    assert result["hits"] == 30 and result["compiles"] == 0
    assert (result["calls"], result["keys"]) == (30, 6)


def test_processes_threads_and_forks_merge_and_only_what_records_writes(
    program: Program, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    code = f"""
import os, threading, torch, eagercache
eagercache.record({str(path)!r})   # ends with the process
x = torch.ones(4)
threads = [threading.Thread(target=lambda: [torch.sin(x) for _ in range(50)]) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
child = os.fork()
if child == 0:
    torch.sin(x)
    raise SystemExit(0)      # runs what is to run at exit, where nothing may be written
assert os.waitpid(child, 0)[1] == 0
"""
    for _ in range(2):
        program(code, OMP_NUM_THREADS="1")
    assert counts(path) == {"aten::sin": 400}
    result = trace.Trace()
    trace.read(path, result)
    assert result.sections == 2


def test_nothing_enabled_is_enabled_for_the_recording_and_put_back(
    program: Program, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    result = program(
        f"""
import torch, eagercache
before = eagercache.is_enabled()
recording = eagercache.record({str(path)!r})
during = eagercache.is_enabled()
try:
    eagercache.record({str(path)!r})
    twice = ""
except ValueError as error:
    twice = str(error)
for _ in range(20):
    torch.cos(torch.ones(3))
recording.flush()
torch.cos(torch.ones(3))
recording.stop()
recording.stop()
after = eagercache.is_enabled()
with eagercache.record({str(path)!r}):
    torch.cos(torch.ones(3))
    eagercache.enable(["sin"], on_miss="native")  # the program's own, which stays
states = [before, during, after, eagercache.is_enabled()]
s = eagercache.stats()
report(states=states, twice=twice, compiles=s.compiles, out=s.outstanding)
"""
    )
    assert result["states"] == [False, True, False, True]
    assert "records to" in result["twice"]
    assert (result["compiles"], result["out"]) == (0, 0)
    assert counts(path) == {"aten::cos": 22}


def test_a_file_that_is_no_trace_is_refused_and_left_alone(
    tmp_path: Path, program: Program
) -> None:
    precious = tmp_path / "results.csv"
    precious.write_text("a,b\n")
    result = program(
        f"""
import eagercache
problems = []
for path in ({str(precious)!r}, {str(tmp_path / "no" / "folder")!r}):
    try:
        eagercache.record(path)
    except (ValueError, OSError) as error:
        problems.append(str(error))
report(problems=problems, enabled=eagercache.is_enabled())
"""
    )
    assert "is no trace; name another file" in result["problems"][0]
    assert "No such file" in result["problems"][1]
    assert result["enabled"] is False
    assert precious.read_text() == "a,b\n"


@pytest.mark.parametrize("variable", ["EAGERCACHE_DISABLE"])
def test_disabled_it_does_nothing(program: Program, tmp_path: Path, variable: str) -> None:
    result = program(
        f"""
import torch, eagercache
with eagercache.record({str(tmp_path / "trace")!r}) as recording:
    torch.cos(torch.ones(3))
    recording.flush()
report(calls=recording.calls)
""",
        **{variable: "1"},
    )
    assert result["calls"] == 0
    assert not (tmp_path / "trace").exists()
