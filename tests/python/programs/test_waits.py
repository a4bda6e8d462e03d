"""A call that waits for its kernel (`on_miss="wait"`) ends when asked to, and by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PACKAGE_ROOT, clean_environment, run_program

# The only worker stops itself before it reads a request: nothing is ever answered.
STOPPED = """
import os, signal, threading
def stop():
    import time
    while b"eagercache.worker" not in open("/proc/self/cmdline", "rb").read().replace(b"\\0", b" "):
        return
    os.kill(os.getpid(), signal.SIGSTOP)
stop()
"""

OPERATOR = """
x = torch.randn(64, 96)
expected = torch.var(x, -1)
def call():
    return torch.equal(torch.var(x, -1), expected)
eagercache.enable(["var.correction"], on_miss="wait", choose="always")
"""
MODULE = """
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2 + 1
net, x = Net(), torch.randn(64, 96)
expected = net(x)
def call():
    with torch.no_grad():
        return torch.equal(net(x), expected)
eagercache.enable(ops=(), modules=Net, on_miss="wait", choose="always")
"""
INTERRUPTED = """
import signal, time
import torch, eagercache
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
{what}
print("ready", flush=True)
try:
    right = call()
    time.sleep(1)  # raised as soon as the interpreter goes on
except KeyboardInterrupt:
    print("interrupted", time.monotonic(), flush=True)
assert eagercache.stats().hits == 0
print("end", flush=True)
"""
KINDS = {"operator": OPERATOR, "module": MODULE}


@pytest.fixture
def stopped_workers(tmp_path: Path) -> str:
    """PYTHONPATH with which workers never answer."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(STOPPED)
    return os.pathsep.join([str(site), PACKAGE_ROOT])


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_ends_a_waiting_call_within_a_second(
    cache: Path, stopped_workers: str, kind: str
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(what=KINDS[kind])],
        env=clean_environment(EAGERCACHE_DIR=str(cache), PYTHONPATH=stopped_workers),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        time.sleep(1.0)  # the call waits
        assert program.poll() is None
        asked = time.monotonic()
        program.send_signal(signal.SIGINT)
        word, when = program.stdout.readline().split()
        assert word == "interrupted" and float(when) - asked < 1.0
        # Not communicate(): it does not return what readline() has read ahead.
        out, err = program.stdout.read(), program.stderr.read() if program.stderr else ""
        assert (program.wait(timeout=60), out) == (0, "end\n"), err
    finally:
        program.kill()
        program.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_waits_no_longer_than_it_may_and_then_none_does(
    cache: Path, stopped_workers: str, kind: str
) -> None:
    code = f"""
import time
import torch, eagercache
{KINDS[kind]}
times = []
for size in (96, 80, 72):
    x = torch.randn(64, size)
    eagercache.disable()
    expected = torch.var(x, -1) if "net" not in globals() else net(x)
    core = eagercache.base.load.core
    core.set_answering(True)
    begin = time.monotonic()
    assert call()
    times.append(time.monotonic() - begin)
report(times=times)
"""
    done = run_program(code, cache, PYTHONPATH=stopped_workers, EAGERCACHE_WAIT_SECONDS="1.5")
    first, *others = done["times"]
    assert 1.5 <= first < 5.0
    assert max(others) < 1.0
    assert done["stderr"].count("EAGERCACHE_WAIT_SECONDS") == 1
