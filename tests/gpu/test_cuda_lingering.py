"""What a short program on a GPU asked for is made once it has ended, while nobody uses the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from eagercache.service import lingering
from eagercache.service.gpu_watch import use_of

SHORT = """
import sys, time, torch, eagercache
from eagercache.runtime.session import session
from eagercache.service import lingering
lingering.COMMAND = (*lingering.COMMAND, "--whatever-the-load")
eagercache.enable(devices=["cuda"], choose="always")
kinds = (torch.float32, torch.bfloat16)
xs = [torch.randn(512, 384, device="cuda", dtype=kind) for kind in kinds]
calls = [torch.tanh, torch.sigmoid, torch.abs, torch.exp]
calls += [lambda t: t.softmax(-1), lambda t: t.sum(-1)]
end = time.monotonic() + 60
while time.monotonic() < end:
    for x in xs:
        for call in calls:
            call(x)
    open_requests = [n for one in session.cuda_services.values() for n in one.unanswered()]
    if len(open_requests) >= 8 or eagercache.stats().hits:
        break
print("hits", eagercache.stats().hits > 0, len(open_requests), flush=True)
"""
# What a program holds that does not know of eagercache.
HOLDS = """
import torch
print("ready", flush=True)
input()
x = torch.ones(1, device="cuda")
print("here", flush=True)
input()
"""


def _run(code: str, cache: Path, **variables: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "EAGERCACHE_DIR": str(cache), **variables},
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=True,
    ).stdout


def _until(what: Callable[[], bool], seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.05)
    return what()


def _pids(uuid: str) -> frozenset[int]:
    use = use_of(uuid)
    assert use is not None
    return use.pids


def _left(cache: Path) -> int:
    return len(list(cache.glob("PENDING/*.json")))


# These run in a child: this process may have a context on the GPU, and so be in the way.
IN_CHILD = """
import sys
sys.path.insert(0, {folder!r})
import test_cuda_lingering as test
test.{name}({cache!r})
"""


def _in_child(name: str, cache: Path) -> None:
    code = IN_CHILD.format(folder=str(Path(__file__).parent), name=name, cache=str(cache))
    done = subprocess.run([sys.executable, "-c", code], timeout=400, check=False)
    assert done.returncode == 0


def test_the_second_run_has_kernels(tmp_path: Path) -> None:
    _in_child("second_run", tmp_path)


def test_a_program_that_comes_has_the_gpu_to_itself(tmp_path: Path) -> None:
    _in_child("program_comes", tmp_path)


def second_run(folder: str) -> None:
    """Runs a short program twice, and meanwhile waits for what lingers."""
    cache = Path(folder) / "cache"
    said = _run(SHORT, cache, EAGERCACHE_LINGER="150").split()
    assert said[1] == "False" and int(said[2]) >= 8, said
    assert lingering.running(cache) is not None
    assert _until(lambda: lingering.running(cache) is None, 160)
    assert _left(cache) == 0
    assert _run(SHORT, cache, EAGERCACHE_ON_MISS="native", EAGERCACHE_LINGER="0").startswith(
        "hits True"
    )


def program_comes(folder: str) -> None:
    """Starts a program on the GPU while a worker is on it."""
    cache, uuid = Path(folder) / "cache", _uuid_in_child()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        _run(SHORT, cache, EAGERCACHE_LINGER="150")
        assert _until(lambda: bool(_pids(uuid)))  # a worker's
        program.stdin.write(b"\n")
        program.stdin.flush()
        assert program.stdout.readline() == b"here\n"
        assert _until(lambda: _pids(uuid) == {program.pid}, 10)
        time.sleep(3)
        assert _pids(uuid) == {program.pid}  # it waits for the program's end
        assert lingering.stop(cache)
        program.communicate(b"\n")
    # Nothing was lost: what was not made is still there, and nothing counts as an attempt.
    assert _left(cache) >= 1
    for path in cache.glob("PENDING/*.json"):
        assert '"attempts": 0' in path.read_text()


def _uuid_in_child() -> str:
    code = "import torch; print(f'GPU-{torch.cuda.get_device_properties(0).uuid}')"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    ).stdout.strip()
