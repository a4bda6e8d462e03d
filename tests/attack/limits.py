"""Machines that have too little of something, and clocks that go back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from attack.arena import VICTIM, Arena, Row, can_run, permanent_failures, preloaded

_LIMIT = """
import resource
resource.setrlimit(resource.{name}, ({value}, {value}))
"""
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
#define BACK 86400
int clock_gettime(clockid_t id, struct timespec *out) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, out);
  if (!result && id == CLOCK_REALTIME) out->tv_sec -= BACK;
  return result;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *out, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


def _with_limit(arena: Arena, row: Row, name: str, values: tuple[int, ...]) -> Row:
    """Programs under a limit, of which their workers have no more, each on a store of its own."""
    with arena.watching(row):
        for value in values:
            store = arena.new_store()
            limit = _LIMIT.format(name=name, value=value)
            body = VICTIM.replace("import eagercache\n", limit + "import eagercache\n")
            started = arena.start(
                body,
                store,
                "wait",
                "1",
                prefix=_as_nobody(store, name),
                EAGERCACHE_WAIT_SECONDS="4" if arena.quick else "30",
                HOME=str(store),
            )
            row.count(started.finish())
            row.permanent += permanent_failures(store)
    return row


def _as_nobody(store: Path, name: str) -> list[str]:
    """Root has no limit of processes."""
    if name != "RLIMIT_NPROC" or os.geteuid() != 0:
        return []
    for path in (store.parent, store):
        path.chmod(0o711 if path != store else 0o700)
    os.chown(store, 65534, 65534)
    return ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


def few_processes(arena: Arena) -> Row:
    """No threads and no processes left."""
    row = Row("RLIMIT_NPROC")
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        row.note = "not tried: root has no such limit, and setpriv is missing"
        return row
    return _with_limit(arena, row, "RLIMIT_NPROC", (1,) if arena.quick else (1, 2, 3, 5, 8))


def small_files(arena: Arena) -> Row:
    """No file may be larger than this."""
    values = (20_000,) if arena.quick else (0, 1000, 20_000, 1_000_000, 50_000_000)
    return _with_limit(arena, Row("RLIMIT_FSIZE"), "RLIMIT_FSIZE", values)


def little_memory(arena: Arena) -> Row:
    """Address space for the program, and for less than a compile."""
    values = (6 << 30,) if arena.quick else (4 << 30, 5 << 30, 6 << 30, 9 << 30)
    return _with_limit(arena, Row("RLIMIT_AS"), "RLIMIT_AS", values)


def no_shared_memory(arena: Arena) -> Row:
    """/dev/shm cannot be written."""
    row = Row("no /dev/shm")
    command = "umount -l /dev/shm && mount -t tmpfs -o ro,size=4k none /dev/shm"
    prefix = ["unshare", "-m", "sh", "-c", f'{command} && exec "$@"', "sh"]
    if not can_run(prefix):
        row.note = "not tried: no rights to mount"
        return row
    with arena.watching(row):
        store = arena.warm_copy() if arena.quick else arena.new_store()
        row.count(arena.start(VICTIM, store, "wait", "1", prefix=prefix).finish())
        row.permanent += permanent_failures(store)
    return row


def clock_goes_back(arena: Arena) -> Row:
    """A program whose clock is a day behind what the store's files say, and one a day later."""
    row = Row("a clock that goes back a day")
    folder = arena.new_folder()
    (folder / "clock.c").write_text(_CLOCK)
    preload = preloaded(folder / "clock.c")
    if not preload:
        row.note = "not tried: no gcc"
        return row
    check = [sys.executable, "-c", "import time; print(int(time.time()))"]
    told = subprocess.run(
        check, env={**os.environ, **preload}, capture_output=True, text=True, check=True
    )
    now = subprocess.run(check, capture_output=True, text=True, check=True)
    assert int(now.stdout) - int(told.stdout) > 80_000, "the clock is not set back"
    with arena.watching(row):
        for store in (arena.warm_copy(), *(() if arena.quick else (arena.new_store(),))):
            for variables in (preload, {}):
                ran = arena.start(VICTIM, store, "wait", "2", prepared=True, **variables)
                row.count(ran.finish())
            row.permanent += permanent_failures(store)
    return row


SCENES = (few_processes, small_files, little_memory, no_shared_memory, clock_goes_back)
