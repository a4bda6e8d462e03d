"""What `eagercache doctor` checks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from eagercache.base import (
    config,
    environment,
    store_directory,
    toolchain,
    torch_versions,
    untried_torch,
)
from eagercache.base.load import core
from eagercache.calls.texts import counted
from eagercache.cli.diagnoses.check import Check
from eagercache.cli.diagnoses.platform_checks import platform_checks
from eagercache.runtime import stores
from eagercache.service import worker_process

LOW_SPACE_BYTES = 1 << 30


def diagnose(store_path: Path) -> list[Check]:
    """All checks, for the store at `store_path` (which need not exist)."""
    checks = list(platform_checks())
    if core is None:
        return checks
    checks.extend(_safely("torch", _torch_checks))
    checks.extend(_safely("compiler", _toolchain_checks))
    checks.extend(_safely("bytecode", lambda: _bytecode_checks(store_path)))
    checks.extend(_safely("file system", lambda: _directory_checks(store_path)))
    checks.extend(_safely("store", lambda: _store_checks(store_path)))
    checks.extend(_safely("remote", _remote_checks))
    return checks


def _safely(name: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The checks; one that cannot be made is a finding too, and hinders no other."""
    try:
        yield from checks()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        yield Check(
            name,
            "problem",
            f"cannot be checked: {type(error).__name__}: {text}",
            "mend what it names, or set EAGERCACHE_DIR to a directory of your own",
        )


def _torch_checks() -> Iterator[Check]:
    from eagercache import _build_info

    yield Check(
        "torch",
        "ok",
        f"{torch.__version__}; eagercache {_build_info.VERSION} ({_build_info.REVISION}) was built "
        f"against {_build_info.TORCH_VERSION} with {_build_info.COMPILER}",
    )
    if not torch_versions.is_tried(str(torch.__version__)):
        remark = untried_torch.remark(str(torch.__version__))
        yield Check("torch", "note", f"{remark}; programs check it when they first import it")


def _toolchain_checks() -> Iterator[Check]:
    assert core is not None
    try:
        compiler = toolchain.find_compiler(config.read_settings().cxx)
    except toolchain.ToolchainError as error:
        yield Check(
            "compiler",
            "problem",
            str(error),
            "install g++ 12 or later, or use on_miss='native' with a store made elsewhere",
        )
    else:
        yield Check("compiler", "ok", f"{compiler.path}, {compiler.version}")
    isa = toolchain.pick_isa(core.host_cpu_features())
    yield Check("instructions", "ok", f"kernels are built for {isa.march}")


def _bytecode_checks(path: Path) -> Iterator[Check]:
    kept = worker_process.bytecode_folder(path, os.environ)
    if worker_process.has_bytecode():
        yield Check("bytecode", "ok", "Inductor's is there: a compile worker starts in seconds")
    elif kept is not None and kept.is_dir():
        yield Check("bytecode", "ok", f"Inductor's is kept in {kept}")
    else:
        yield Check(
            "bytecode",
            "note",
            "Inductor has none, as after an installation by uv: a compile worker's first kernel "
            "takes some ten seconds longer; `python -m compileall -q "
            f"{worker_process.inductor_folder().parent}` makes it",
        )


def _directory_checks(path: Path) -> Iterator[Check]:
    network = store_directory.network_file_system(path)
    if network is not None:
        yield Check(
            "file system",
            "problem",
            f"{path} is on {network}",
            "set EAGERCACHE_DIR to a directory on a local disk",
        )
    existing = store_directory.nearest_existing(path)
    if os.statvfs(existing).f_flag & os.ST_NOEXEC:
        yield Check(
            "mount",
            "note",
            f"{existing} is mounted noexec: kernels are loaded from copies in memory, each "
            "of which holds a file descriptor; set EAGERCACHE_DIR to a directory on another mount",
        )
    free = shutil.disk_usage(existing).free
    if free < LOW_SPACE_BYTES:
        yield Check(
            "space",
            "problem",
            f"{free >> 20} MB are free at {existing}",
            "make room, set EAGERCACHE_MAX_BYTES, or run `eagercache prune`",
        )
    else:
        yield Check("space", "ok", f"{free >> 30} GB are free at {existing}")


def _store_checks(path: Path) -> Iterator[Check]:
    assert core is not None
    if not path.exists():
        problem = _why_not_made(path)
        if problem:
            yield Check("store", "problem", problem, "name another one with EAGERCACHE_DIR")
        else:
            yield Check("store", "note", f"{path} does not exist yet; the first kernel makes it")
        return
    settings = config.read_settings()
    text = environment.environment_text(cxx=settings.cxx)
    try:
        store = stores.open_at(path, settings, text, read_only=True)
    except core.StoreError as error:
        yield Check(
            "store",
            "problem",
            str(error),
            "let the directory belong to you, with mode 0700, below directories that only you or "
            "root may write",
        )
        return
    for problem in store.tier_problems:
        yield Check("tier", "problem", problem, "mend it, or take it out of EAGERCACHE_TIERS")
    for root in store.untrusted_roots:
        yield Check(
            "trust",
            "problem",
            f"other users may write {root}, and EAGERCACHE_ALLOW_UNTRUSTED admits it",
            "let it belong to you or root and be writable by nobody else",
        )
    if not os.access(path, os.W_OK):
        yield Check("store", "note", f"{path} is read-only: kernels are used, none is added")
    entries = store.entries(all=True)
    mine = [entry for entry in entries if entry["environment"] == store.environment_id]
    kinds = {
        kind: sum(entry["kind"] == kind for entry in mine)
        for kind in ("kernel", "native", "failed")
    }
    size = sum(entry["bytes"] for entry in entries)
    yield Check(
        "store",
        "ok",
        f"{path}: {counted(kinds['kernel'], 'kernel')}, "
        f"{counted(kinds['native'], 'decision')} for native and "
        f"{counted(kinds['failed'], 'failure')} for this environment ({store.environment_id}), "
        f"{size >> 20} MB in all",
    )
    yield from _other_environments(path, entries, store.environment_id, text)


def _why_not_made(path: Path) -> str:
    """Why a store that is not there cannot be made; "" where it can."""
    if not store_directory.has_utf8_name(path):
        return f"{str(path)!r} has a name that is not UTF-8"
    # Links that lead nowhere are there, and hinder.
    nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not nearest.is_dir():
        return f"{path} cannot be made: {nearest} is no folder"
    if not os.access(nearest, os.W_OK):
        return f"{path} cannot be made: {nearest} may not be written"
    return ""


def _remote_checks() -> Iterator[Check]:
    settings = config.read_settings()
    if settings.remote:
        from eagercache.cli.diagnoses.remote_diagnosis import remote_checks

        yield from remote_checks(environment.environment_text(cxx=settings.cxx))


def _other_environments(
    path: Path, entries: list[dict[str, Any]], mine: str, text: str
) -> Iterator[Check]:
    others = sorted({entry["environment"] for entry in entries} - {mine})
    for other in others:
        number = sum(entry["environment"] == other for entry in entries)
        count = counted(number, "entry", "entries")
        try:
            stored = (path / "v1" / other / "ENV").read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            yield Check("environment", "note", f"{other}: {count}; ENV is unreadable: {error}")
            continue
        there, here = environment.parse(stored), environment.parse(text)
        fields = "; ".join(
            f"{name} ({there.get(name)}, {here.get(name)})"
            for name in environment.diff(stored, text)
        )
        yield Check(
            "environment",
            "note",
            f"{other}: {count} that this process does not use, because these fields differ "
            f"(there, here): {fields}",
        )
