"""Processes that share a store: hits, copies, tiers, forks, and kernels that kill."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SHARED_CALLS, SHARED_OPS, Program, clean_environment, run_program
from eagercache import _C
from eagercache.base import config, environment
from eagercache.calls import contract

pytestmark = pytest.mark.once

COUNT = """
shared_calls()
shared_calls()
s = eagercache.stats()
report(hits=s.hits, misses=s.misses, native=s.native, pending=s.pending, compiles=s.compiles,
       decisions=sorted({k.decision for k in eagercache.kernels()}))
"""


def program_on(cache: Path, on_miss: str, code: str = COUNT, **variables: str) -> dict[str, object]:
    head = (
        f"import eagercache\neagercache.enable({SHARED_OPS}, on_miss={on_miss!r}, choose='always')"
    )
    return run_program(SHARED_CALLS + head + textwrap.dedent(code), cache, **variables)


def expect_hits_only(result: dict[str, object]) -> None:
    assert result["decisions"] == ["kernel"], result
    assert (result["misses"], result["native"], result["pending"], result["compiles"]) == (0,) * 4
    assert result["hits"] == 10, result  # two times var, softmax, silu, layer norm and relu


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, copy_function=shutil.copy2)
    return target


@pytest.mark.parametrize("on_miss", ["native", "wait"])
def test_a_second_process_only_hits(warm_cache: Path, on_miss: str) -> None:
    expect_hits_only(program_on(warm_cache, on_miss))


def test_a_copy_at_another_path_only_hits(warm_cache: Path, tmp_path: Path) -> None:
    expect_hits_only(program_on(copied(warm_cache, tmp_path / "elsewhere"), "native"))


# strace prints the path behind every descriptor, so one pattern finds whatever is below the store.
_WRITING = "mkdir,mkdirat,unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,"
_WRITING += "chmod,fchmod,fchmodat,utimensat,truncate,ftruncate,write,pwrite64,open,openat,creat"


def _calls(log: Path) -> Iterator[str]:
    """Each call on one line: strace breaks one in two when another thread's comes between."""
    begun: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines():
        pid, _, text = line.partition(" ")
        text = text.strip()
        if text.endswith("<unfinished ...>"):
            begun[pid] = text.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", text):
            text = begun.pop(pid, "") + resumed[1]
        yield f"{pid} {text}"


def _writes(log: Path, store: Path) -> list[str]:
    return [
        call
        for call in _calls(log)
        if str(store) in call
        and (
            not re.match(r"\d+ +open", call)
            or re.search("O_WRONLY|O_RDWR|O_CREAT|O_TRUNC", call) is not None
        )
    ]


def _traced(store: Path, log: Path, mounts: str) -> subprocess.CompletedProcess[str]:
    head = f"import eagercache\neagercache.enable({SHARED_OPS}, on_miss='wait', choose='always')"
    code = SHARED_CALLS + head + "\nshared_calls()\nprint(eagercache.stats().hits)"
    trace = ["strace", "-f", "-y", "--seccomp-bpf", "-s", "0", "-o", str(log), "-e", _WRITING]
    in_namespace = ["unshare", "-m", "sh", "-c", f'{mounts} || exit 77; exec "$@"', "sh"]
    return subprocess.run(
        [*in_namespace, *trace, sys.executable, "-c", code],
        env=clean_environment(EAGERCACHE_DIR=str(store)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_read_only_mount_hits_without_one_call_that_writes(
    warm_cache: Path, tmp_path: Path
) -> None:
    missing = [name for name in ("strace", "unshare") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"NOT RUN: {' and '.join(missing)} not found")
    store = copied(warm_cache, tmp_path / "image")
    log = tmp_path / "trace"
    mount = f"mount --bind '{store}' '{store}' && mount -o remount,ro,bind '{store}'"
    done = _traced(store, log, mount)
    if done.returncode in (1, 77) and not log.exists():
        pytest.skip(f"NOT RUN: this machine does not let us mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5"]
    assert str(store) in log.read_text(errors="replace"), "the trace sees the store"
    assert _writes(log, store) == []
    # The same trace finds what a store that may be written is told.
    writable = _traced(store, log, "true")
    assert writable.returncode == 0, writable.stderr
    assert _writes(log, store) != []


def test_a_tier_is_copied_in_and_only_hits(warm_cache: Path, cache: Path) -> None:
    expect_hits_only(program_on(cache, "native", EAGERCACHE_TIERS=str(warm_cache)))
    expect_hits_only(program_on(cache, "native"))


def test_a_directory_that_others_may_write_is_refused_or_admitted_and_said(
    warm_cache: Path, cache: Path, tmp_path: Path
) -> None:
    tier = copied(warm_cache, tmp_path / "shared")
    tier.chmod(0o777)
    refused = program_on(cache, "native", EAGERCACHE_TIERS=str(tier))
    assert refused["hits"] == 0
    assert str(refused["stderr"]).count(str(tier)) >= 1 and "is not used" in str(refused["stderr"])
    admitted = program_on(
        cache, "native", EAGERCACHE_TIERS=str(tier), EAGERCACHE_ALLOW_UNTRUSTED="1"
    )
    expect_hits_only(admitted)
    assert "EAGERCACHE_ALLOW_UNTRUSTED is set" in str(admitted["stderr"])
    assert str(tier) in str(admitted["stderr"])


# One thread: PyTorch's own kernels hang in a child once OpenMP's threads have run in the parent.
@pytest.mark.long
def test_forks_of_a_process_that_runs_kernels_and_holds_a_compile_end(
    cache: Path,
) -> None:
    result = program_on(
        cache,
        "wait",
        """
        import os, signal, threading
        torch.var(x, -1)
        torch.var(x, -1)
        hits = eagercache.stats().hits
        y = torch.randn(31, 47)
        compiling = threading.Thread(target=lambda: torch.var(y, -1))  # waits for its kernel
        compiling.start()
        ends = []
        for _ in range(200):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                for _ in range(100):
                    torch.var(x, -1)
                os._exit(0)
            ends.append(os.waitpid(child, 0)[1])
        compiling.join(200)
        done = not compiling.is_alive()
        torch.var(y, -1)  # asks the kernel of all sizes, if that was compiled
        eagercache.wait(60)
        torch.var(y, -1)
        report(bad=[end for end in ends if end != 0], done=done, before=hits,
               after=eagercache.stats().hits, failures=eagercache.stats().failures)
        """,
        OMP_NUM_THREADS="1",
    )
    assert result["bad"] == []
    assert result["done"] and result["failures"] == 0
    assert int(str(result["before"])) >= 1
    assert int(str(result["after"])) > int(str(result["before"]))


# A container by hand: whatever the loader asks is answered, and the first run ends the process.
_KILLER = """
#include <stddef.h>
#include <stdint.h>
int32_t AOTInductorModelContainerCreateWithDevice(void** c, size_t n, const char* d, const char* b)
{ *c = c; return 0; }
int32_t AOTInductorModelContainerGetNumInputs(void* c, size_t* n) { *n = 1; return 0; }
int32_t AOTInductorModelContainerGetNumOutputs(void* c, size_t* n) { *n = 1; return 0; }
int32_t AOTInductorModelContainerGetNumConstants(void* c, size_t* n) { *n = 0; return 0; }
int32_t AOTInductorModelContainerRunSingleThreaded(void* c, void** i, size_t ni, void** o,
    size_t no, void* s, void* p) { __builtin_trap(); }
"""
_ON_LOAD = "__attribute__((constructor)) static void kill(void) { __builtin_trap(); }\n"

_CALL = """
import torch, eagercache
eagercache.enable(["var.correction"], on_miss="native", choose="always")
x = torch.ones(7, 9)
answer = torch.var(x, -1)
(kernel,) = eagercache.kernels()
report(digest=kernel.digest, decision=kernel.decision, zero=bool((answer == 0).all()))
"""


@pytest.mark.parametrize("on_load", [True, False], ids=["when loaded", "when first run"])
def test_a_kernel_that_kills_its_process_does_so_twice(
    program: Program, cache: Path, tmp_path: Path, on_load: bool
) -> None:
    digest = program(_CALL)["digest"]
    source, target = tmp_path / "killer.c", tmp_path / "killer.so"
    made_for = contract.contract_of(str(digest), "container", "", "", [])
    says = f'char {contract.SYMBOL}[] = "{made_for}\\n";\n'
    source.write_text(_KILLER + says + (_ON_LOAD if on_load else ""))
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-z,noexecstack", "-o", target, source], check=True
    )
    text = environment.environment_text(cxx=config.read_settings().cxx)
    _C.Store(str(cache), text).publish(
        {"key": digest, "kind": "kernel", "facts": {"form": "container", "numerics": "bitwise"}},
        [("so", str(target))],
    )
    for _ in range(2):
        assert program(_CALL, check=False)["returncode"] == -signal.SIGILL
    third = program(_CALL)
    assert third["decision"] == "failed" and third["zero"]
    assert "2 processes died" in third["stderr"]
    fourth = program(_CALL)
    assert fourth["decision"] == "failed" and fourth["zero"]
    (row,) = _C.Store(str(cache), text, read_only=True).entries()
    assert row["kind"] == "failed" and "2 processes died" in row["facts"]["reason"]
