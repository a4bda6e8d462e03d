"""`python -m manifests [--edits N] [--seed N]`: edits manifests and uses their entries.

A store gets entries of every form. Then each edit is written in the place of a manifest, with a
right digest, and the calls are made that it answers: their answers are compared with native's. Many
edits share a process; what a process is about to try is in a file, so that a signal names its edit.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH = 2000


def main() -> int:
    """Exit code 1 where an edit broke something."""
    parser = argparse.ArgumentParser(prog="python -m manifests", description=__doc__)
    parser.add_argument("--edits", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--store", type=Path, help="where entries are, or will be made")
    options = parser.parse_args()
    os.environ["MANIFESTS_DEVICE"] = options.device
    with tempfile.TemporaryDirectory(prefix="eagercache-manifests-") as folder:
        store = options.store or Path(folder) / "store"
        forms = fill(store)
        totals: collections.Counter[str] = collections.Counter()
        findings: list[str] = []
        for first in range(0, options.edits, BATCH):
            count = min(BATCH, options.edits - first)
            counts, found = try_batch(store, Path(folder), options.seed + first, count)
            totals.update(counts)
            findings += found
            print(json.dumps({"edits": first + count, "findings": len(findings), **totals}))
    for finding in findings:
        print(finding)
    print(json.dumps({"seed": options.seed, "forms": forms, "findings": len(findings), **totals}))
    return 1 if findings else 0


def fill(store: Path) -> dict[str, int]:
    """Makes the entries, where they are not there. How many there are of each form."""
    if not store.exists():
        store.mkdir(mode=0o700)
    done = _run(["fill", str(store)], timeout=1200)
    if done.returncode != 0:
        raise RuntimeError(f"the store could not be filled: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def try_batch(store: Path, folder: Path, seed: int, count: int) -> tuple[dict[str, int], list[str]]:
    """(what became of the edits, what should not have) of one process after the other.

    A process that dies is one finding, and the next one goes on behind its edit.
    """
    totals: collections.Counter[str] = collections.Counter()
    findings: list[str] = []
    begin = 0
    while begin < count:
        copy, note = folder / "copy", folder / "note"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store, copy, symlinks=True)
        note.write_text("")
        words = ["try", str(copy), str(note), str(seed), str(begin), str(count)]
        done = _run(words, timeout=60 + count)
        report = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0 and report:
            row = json.loads(report[-1])
            totals.update(row["counts"])
            findings += row["findings"]
            break
        tried = note.read_text(errors="replace").partition("\0")[0]
        number, _, edit = tried.partition(" ")
        if not number.isdigit():
            raise RuntimeError(f"no edit was tried: {done.stderr[-2000:]}")
        last = (done.stderr.strip().splitlines() or [""])[-1][:200]
        findings.append(f"{_end(done.returncode)}, seed {seed}, edit {number}: {edit} ({last})")
        totals["died"] += 1
        begin = int(number) + 1
    return dict(totals), findings


def _end(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _run(words: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EAGERCACHE_")}
    environment["EAGERCACHE_LINGER"] = "0"
    environment["MALLOC_CHECK_"] = "3"  # glibc ends a process whose heap is damaged
    command = [sys.executable, "-m", "manifests.child", *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


if __name__ == "__main__":
    sys.exit(main())
