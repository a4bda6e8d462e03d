"""Disks that fail, containers that share a store and its process ids, two torches, overlays."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from launcher import Launcher

from attack.arena import (
    VICTIM,
    Arena,
    Ran,
    Row,
    Started,
    can_run,
    files_left,
    permanent_failures,
    preloaded,
)

_ROOT = Path(__file__).resolve().parents[2]
_FAILING_CALLS = Path(__file__).with_name("failing_calls.c")


def _on_failing_disk(
    arena: Arena, launcher: Launcher, store: Path, at: int, *, all_after: bool = False
) -> tuple[Ran, int]:
    """A program of two misses whose file call ``at`` below its store fails; its number of calls."""
    count = store.parent / f"count-{at}-{all_after}"
    variables = {
        "FAILING_BELOW": str(store),
        "FAILING_AT": str(at),
        "FAILING_COUNT": str(count),
        "EAGERCACHE_WAIT_SECONDS": "20",
        **({"FAILING_ALL": "1"} if all_after else {}),
    }
    ran = arena.fork(
        VICTIM,
        store,
        *("wait", "2"),
        workers=True,
        folder=store.parent,
        launcher=launcher,
        **variables,
    )
    return ran, int(count.read_text()) if count.exists() else 0


def failing_disk(arena: Arena) -> Row:
    """EIO at every file call below a store: once, and from there on."""
    row = Row("EIO at a file call of the program")
    folder = arena.new_folder()
    preload = preloaded(Path(shutil.copy(_FAILING_CALLS, folder)))
    if not preload:
        row.note = "not tried: no gcc"
        return row
    launcher = Launcher({**arena.environment(folder), **preload})
    try:
        with arena.watching(row):
            for warm in (True, False):
                make = arena.warm_copy if warm else arena.new_store
                ran, calls = _on_failing_disk(arena, launcher, make(), 0)
                row.count(ran)
                if calls < 40:
                    row.note, row.died = f"only {calls} file calls were seen", row.died + 1
                numbers = list(range(1, calls + 1))
                if arena.quick or not warm:
                    numbers = arena.random.sample(numbers, min(calls, 4 if arena.quick else 60))
                for number in numbers:
                    for all_after in (False, True):
                        store = make()
                        ran, _ = _on_failing_disk(
                            arena, launcher, store, number, all_after=all_after
                        )
                        row.count(ran)
                        row.permanent += permanent_failures(store)
                        shutil.rmtree(store)
    finally:
        launcher.close()
    return row


def _group(limit: int) -> Path | None:
    """A new cgroup with that many bytes of memory, or None where there are no rights to one."""
    for parent, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / f"eagercache-attack-{os.getpid()}-{limit}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
        except OSError:
            group.rmdir()
            continue
        return group
    return None


_PEAK = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def memory_of_a_container(arena: Arena) -> Row:
    """The program and its workers in a cgroup that holds the program, and no compile beside it."""
    row = Row("a cgroup's memory, for program and workers together")
    told = subprocess.run(
        [sys.executable, "-c", VICTIM.split("import eagercache")[0] + _PEAK],
        capture_output=True,
        text=True,
        check=True,
    )
    peak = int(told.stdout) * 1024
    more = (64 << 20,) if arena.quick else (32 << 20, 64 << 20, 128 << 20, 256 << 20, 512 << 20)
    with arena.watching(row):
        for bytes_more in more:
            group = _group(peak + bytes_more)
            if group is None:
                row.note = "not tried: no rights to make a cgroup"
                return row
            enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
            store = arena.new_store()
            started = arena.start(
                VICTIM,
                store,
                *("wait", "1"),
                prefix=["sh", "-c", enter, "sh"],
                EAGERCACHE_WAIT_SECONDS="8" if arena.quick else "30",
            )
            row.count(started.finish())
            row.permanent += permanent_failures(store)
            _remove_group(group)
    return row


def _remove_group(group: Path) -> None:
    """As soon as its last process is gone."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def equal_process_ids(arena: Arena) -> Row:
    """Containers that share a store: their programs and workers have the same process ids."""
    row = Row("processes of equal ids on one store (pid namespaces)")
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not can_run(own):
        row.note = "not tried: no rights to make a namespace"
        return row
    with arena.watching(row):
        store = arena.new_store()
        for _ in range(1 if arena.quick else 4):
            many = [
                arena.start(VICTIM, store, "wait", "3", prefix=own)
                for _ in range(2 if arena.quick else 6)
            ]
            for started in many:
                row.count(started.finish())
        # One later, whose ids are those of processes that are gone.
        row.count(arena.start(VICTIM, store, "wait", "3", prefix=own).finish())
        row.permanent += permanent_failures(store)
        row.leftovers += files_left(arena, store)
    return row


def _built_torches() -> Iterator[tuple[str, Path, Path]]:
    """Version, interpreter and package folder of each built tree of this repository."""
    for tree in sorted((_ROOT / "build").glob("dev-*/python")):
        version = tree.parent.name.removeprefix("dev-")
        for name in (f".venv-{version}", ".venv"):
            interpreter = _ROOT / name / "bin/python"
            if interpreter.exists() and _torch_of(interpreter) == version:
                yield version, interpreter, tree
                break


def _torch_of(interpreter: Path) -> str:
    for path in interpreter.parents[1].glob("lib/python*/site-packages/torch-*.dist-info"):
        found = re.match(r"torch-(\d+\.\d+\.\d+)", path.name)
        if found:
            return found.group(1)
    return ""


def two_torches(arena: Arena) -> Row:
    """Each version of torch has its own entries, at the same time in one store."""
    row = Row("versions of torch on one store at once")
    versions = list(_built_torches())
    if len(versions) < 2:
        row.note = "not tried: one version of torch is built here"
        return row
    with arena.watching(row):
        store = arena.new_store()
        for _ in range(1 if arena.quick else 4):
            running = []
            for _, interpreter, tree in versions:
                environment = arena.environment(store, PYTHONPATH=str(tree))
                words = [str(interpreter), "-c", VICTIM, "wait", "3"]
                running.append(Started(words, environment, store))
            for started in running:
                ran = started.finish()
                row.count(ran)
                row.died += not ran.report.get("hits")
        row.permanent += permanent_failures(store)
    row.note = row.note or " and ".join(version for version, _, _ in versions)
    return row


_LAYERS = """
set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay none -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$2"
shift 2
exec "$@"
"""


def layered_file_system(arena: Arena) -> Row:
    """A store of a container's image: its folder is an overlay, full or empty below."""
    row = Row("a store on overlayfs")
    probe = ["unshare", "-m", "sh", "-c", _LAYERS, "sh"]
    folders = [str(arena.new_folder()), str(arena.new_folder())]
    if not can_run([*probe, *folders]):
        row.note = "not tried: no rights to mount"
        return row
    with arena.watching(row):
        for make in (arena.warm_copy, arena.new_store):
            for _ in range(1 if arena.quick else 4):
                store = make()
                prefix = [*probe, str(arena.new_folder()), str(store)]
                ran = arena.start(VICTIM, store, "wait", "2", prefix=prefix).finish()
                row.count(ran)
                row.died += not ran.report.get("hits")
                row.permanent += permanent_failures(store)
    row.note = row.note or "NFS: not tried, it needs a server"
    return row


SCENES = (
    failing_disk,
    memory_of_a_container,
    equal_process_ids,
    two_torches,
    layered_file_system,
)
