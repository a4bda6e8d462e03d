"""Interpreters that end while kernels run, and children of data loaders."""

from __future__ import annotations

import functools
import signal

from attack.arena import Arena, Row

# Threads that call kernels while the main one ends; argv: how it ends, and after how many
# milliseconds. What a thread finds wrong is told at once.
_ENDS = """
import json, sys, threading, time
import torch
torch.set_num_threads(1)
x = torch.ones(64, 96) * torch.arange(96)
native = torch.var(x, -1)
import eagercache
if sys.argv[3] == "kernels":
    eagercache.enable(["var.correction", "_softmax"], on_miss="background", choose="always")
stop = []
def call():
    while not stop:
        if not torch.allclose(torch.var(x, -1), native):
            print('ATTACK {"right": false}', flush=True)
        torch.softmax(x, -1)
how, wait = sys.argv[1], int(sys.argv[2]) / 1000
threads = [threading.Thread(target=call, daemon=how == "daemons") for _ in range(3)]
for thread in threads:
    thread.start()
if how == "thread":
    def leave():
        torch.softmax(torch.ones(7, 33), -1)
        sys.exit(3)
    leaver = threading.Thread(target=leave)
    leaver.start()
    leaver.join()
time.sleep(wait)
print("ATTACK " + json.dumps({"right": True, "hits": eagercache.stats().hits}), flush=True)
if how != "daemons":
    stop.append(1)
if how == "exit":
    sys.exit(0)
"""

# The data set's rows are computed by calls that have kernels, in worker processes of both kinds.
_LOADER = """
import json, sys
import torch
import eagercache

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        row = torch.arange(96.0).repeat(64, 1) + index
        return torch.var(row, -1)

def choose(_):
    torch.set_num_threads(1)
    eagercache.enable(["var.correction"], on_miss="background", choose="always")

if __name__ == "__main__":
    torch.set_num_threads(1)
    expected = torch.stack([Rows()[i] for i in range(64)])
    eagercache.enable(["var.correction", "_softmax"], on_miss="background", choose="always")
    kernels = torch.stack([Rows()[i] for i in range(64)])
    right = torch.allclose(kernels, expected)
    for kind in sys.argv[1:]:
        for start in (None, choose):
            loader = torch.utils.data.DataLoader(
                Rows(), batch_size=8, num_workers=2, multiprocessing_context=kind,
                worker_init_fn=start,
            )
            right = right and torch.allclose(torch.cat(list(loader)), expected)
    print("ATTACK " + json.dumps({"right": right, "hits": eagercache.stats().hits}), flush=True)
"""


def interpreters_that_end(arena: Arena) -> Row:
    """The interpreter shuts down while kernels run; sys.exit in a thread.

    Daemon threads within torch's operators end some interpreters by SIGABRT, natively too (their
    threads are ended where C++ lets no exception pass). Such an end is no finding where native's
    program has it.
    """
    row = Row("sys.exit in a thread, an end while kernels run")
    natively_aborted = functools.cache(lambda: _aborted_natively(arena))
    with arena.watching(row):
        for how in ("daemons", "thread", "exit"):
            for round_number in range(3 if arena.quick else 60):
                store = arena.warm_copy() if round_number % 3 else arena.new_store()
                wait = str(arena.random.randrange(40))
                ran = arena.fork(_ENDS, store, how, wait, "kernels", workers=True)
                if ran.code == -signal.SIGABRT and how == "daemons" and natively_aborted():
                    ran.code = 0
                row.count(ran)
    return row


def _aborted_natively(arena: Arena) -> bool:
    """Whether the program with daemon threads is aborted without kernels, in one of five runs."""
    store = arena.new_store()
    return any(
        arena.fork(_ENDS, store, "daemons", "20", "native").code == -signal.SIGABRT
        for _ in range(5)
    )


def data_loaders(arena: Arena) -> Row:
    """DataLoader's workers, forked and spawned, with and without an enable() of their own."""
    row = Row("DataLoader workers by fork and spawn")
    with arena.watching(row):
        for _ in range(1 if arena.quick else 8):
            store = arena.warm_copy()
            script = store.parent / "loader.py"
            script.write_text(_LOADER)
            kinds = ("fork",) if arena.quick else ("fork", "spawn", "forkserver")
            row.count(arena.start_script(script, store, *kinds).finish())
    return row


SCENES = (interpreters_that_end, data_loaders)
