"""Many processes at once, and forks under load."""

from __future__ import annotations

from attack.arena import VICTIM, Arena, Row, files_left, permanent_failures

# Forked before eagercache is there; argv: as VICTIM, then how many. Each writes what came of it.
_CROWD = """
import os, sys
import json, traceback
from pathlib import Path
folder = Path(os.environ["EAGERCACHE_DIR"]).parent / "said"
folder.mkdir()
pids = []
begin = os.pipe()
for number in range(int(sys.argv[3])):
    pid = os.fork()
    if pid == 0:
        os.close(begin[1])
        os.read(begin[0], 1)  # until all are there
        out = open(folder / str(number), "w")
        os.dup2(out.fileno(), 1)
        code = 1
        try:
            exec(compile({victim!r}, "victim", "exec"), {{"__name__": "__main__"}})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    pids.append(pid)
os.close(begin[0])
os.close(begin[1])
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
reports = []
for path in folder.iterdir():
    rows = [json.loads(line[7:]) for line in path.read_text().splitlines()
            if line.startswith("ATTACK ")]
    reports.append({{key: value for row in rows for key, value in row.items()}})
print("ATTACK " + json.dumps({{
    "right": all(row.get("right", True) for row in reports),
    "wrong": sum(row.get("right") is False for row in reports),
    "died": sum(code != 0 for code in codes),
    "hits": sum(row.get("hits", 0) for row in reports),
}}), flush=True)
os._exit(0)
"""

_FORKS = """
import os, sys, threading, time
import torch, eagercache
torch.set_num_threads(1)
x = torch.ones(64, 96) * torch.arange(96)
native = torch.var(x, -1)
eagercache.enable(["var.correction", "_softmax"], on_miss="background", choose="always")
stop, wrong = [], []
def call():
    while not stop:
        if not torch.allclose(torch.var(x, -1), native):
            wrong.append(1)
threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads: thread.start()
codes = []
for number in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        right = torch.allclose(torch.var(x, -1), native)
        if number % 3 == 0:
            eagercache.enable(["var.correction"], on_miss="background")
            right = right and torch.allclose(torch.var(x, -1), native)
        if number % 5 == 0:
            sys.exit(0 if right else 7)  # through the interpreter's end
        os._exit(0 if right else 7)
    end = time.monotonic() + 120
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes.append(os.waitstatus_to_exitcode(status))
            break
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            codes.append("hang")
            break
        time.sleep(0.001)
stop.append(1)
for thread in threads: thread.join()
import json
bad = [code for code in codes if code != 0]
print("ATTACK " + json.dumps({"right": not wrong, "codes": bad,
                              "hits": eagercache.stats().hits}), flush=True)
"""


def empty_store(arena: Arena) -> Row:
    """All compile the same calls at once."""
    count = 30 if arena.quick else 200
    row = Row(f"{count} processes at once on an empty store")
    with arena.watching(row):
        store = arena.new_folder() / "store"
        store.mkdir(mode=0o700)
        ran = arena.fork(
            _CROWD.format(victim=VICTIM),
            store,
            *("wait", "2", str(count)),
            workers=True,
            EAGERCACHE_SLOTS="2",
        )
    row.count(ran)
    row.tried += count - 1
    row.wrong += int(ran.report.get("wrong", 0)) - (ran.report.get("right") is False)
    row.died += int(ran.report.get("died", 0))
    row.permanent += permanent_failures(store)
    row.leftovers += files_left(arena, store)
    row.note = row.note or f"{len(list(store.rglob('*.so')))} objects"
    return row


def forks(arena: Arena) -> Row:
    """Children forked while threads call kernels and one is loaded."""
    row = Row("os.fork under load")
    with arena.watching(row):
        for _ in range(1 if arena.quick else 20):
            store = arena.warm_copy()
            count = 60 if arena.quick else 300
            ran = arena.fork(_FORKS, store, str(count), workers=True)
            row.count(ran)
            row.tried += count - 1
            codes = ran.report.get("codes", [])
            row.hangs += codes.count("hang")
            row.wrong += codes.count(7)
            row.died += sum(code not in ("hang", 7) for code in codes)
            row.note = row.note or (f"children: {codes[:8]}" if codes else "")
    return row


SCENES = (empty_store, forks)
