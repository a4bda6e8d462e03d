"""One store under several torches at a time: `python -m matrix.side_by_side --seconds 600`.

For each torch of the table a process after the other takes kernels from the store, compiles what
it lacks, and compares every answer with native, all at once and until the time is over; the second
process of each, which is to find what the first made, is there on a busy machine, too. The store
is smaller than what they all make, so that each evicts what others made. At the end every object
is read and compared with its hash. A wrong answer, an error, a torch that got no kernel out of the
store, or damage makes the exit status 1. With `--wheel` the wheel is installed beside each torch
first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from matrix.__main__ import ROOT, chosen, environment, first, torch_versions

# What five torches make of the operators below is more.
STORE_BYTES = 600_000
# A process compiles ten kernels at most.
VISIT_LIMIT_S = 900


class Visit(NamedTuple):
    """What one process did with the store."""

    torch: str
    calls: int
    hits: int
    compiles: int
    loaded: int
    wrong: int
    seconds: float
    error: str = ""


def visit(store: Path) -> dict[str, int]:
    """In a process of one torch: ten kernels, from the store or compiled, against native."""
    import eagercache
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    tensors = [torch.randn(rows, 96) for rows in (32, 64)]
    calls = [
        lambda x: torch.var(x, -1),
        lambda x: torch.softmax(x, -1),
        lambda x: functional.layer_norm(x, (96,)),
        lambda x: functional.gelu(x),
        lambda x: torch.cat([x, x], -1),
    ]
    names = ["var.correction", "_softmax", "native_layer_norm", "gelu", "cat"]
    native = [call(x) for call in calls for x in tensors]
    wrong = rounds = 0
    with eagercache.enable(names, on_miss="wait", choose="always", cache_dir=store):
        for _ in range(20):
            rounds += 1
            answers = [call(x) for call in calls for x in tensors]
            for answer, expected in zip(answers, native, strict=True):
                wrong += not torch.allclose(answer, expected, rtol=1e-5, atol=1e-6)
        seen = eagercache.stats()
    return {
        "calls": rounds * len(native),
        "hits": seen.hits,
        "compiles": seen.compiles,
        "loaded": len(eagercache.kernels()) - seen.compiles,
        "wrong": wrong,
    }


def one_visit(torch: str, python: Path, store: Path) -> Visit:
    """A process of that torch; its error is the last line that it printed."""
    began = time.monotonic()
    command = [str(python), "-m", "matrix.side_by_side", "--visit", str(store)]
    variables = {**environment(torch), "EAGERCACHE_MAX_BYTES": str(STORE_BYTES)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True,
            timeout=VISIT_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Visit(torch, 0, 0, 0, 0, 0, VISIT_LIMIT_S, "no end")
    seconds = round(time.monotonic() - began, 1)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        return Visit(torch, 0, 0, 0, 0, 0, seconds, f"status {done.returncode}: {said}")
    return Visit(torch, **json.loads(lines[-1]), seconds=seconds)


def table(visits: list[Visit]) -> str:
    """Markdown: a row for each torch; errors stand below."""
    titles = ["processes", "calls", "by kernels", "compiled", "taken from the store", "wrong"]
    lines = [f"| torch | {' | '.join(titles)} |", "| --- |" + " --- |" * len(titles)]
    for torch in dict.fromkeys(each.torch for each in visits):
        own = [each for each in visits if each.torch == torch]
        sums = [
            sum(values)
            for values in zip(
                *((v.calls, v.hits, v.compiles, v.loaded, v.wrong) for v in own), strict=True
            )
        ]
        lines.append(f"| {torch} | " + " | ".join(map(str, [len(own), *sums])) + " |")
    errors = [f"- torch {each.torch}: {each.error}" for each in visits if each.error]
    return "\n".join([*lines, *([""] if errors else []), *errors])


def failed(visits: list[Visit], versions: list[str]) -> bool:
    """Whether something was wrong, or a torch got nothing out of the store."""
    served = {each.torch for each in visits if each.loaded > 0}
    return any(each.error or each.wrong for each in visits) or served != set(versions)


def load(pythons: dict[str, Path], store: Path, seconds: float) -> list[Visit]:
    """All torches at once, each with a process at a time, and two processes at least."""
    visits: list[Visit] = []
    end = time.monotonic() + seconds

    def serve(torch: str) -> None:
        for number in itertools.count():
            if number >= 2 and time.monotonic() > end:
                return
            made = one_visit(torch, pythons[torch], store)
            visits.append(made)
            print(made, flush=True)

    threads = [threading.Thread(target=serve, args=(torch,)) for torch in pythons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return visits


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--torch", default="", help="releases of the table, with commas; all")
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--no-build", action="store_true", help="take the trees as they are")
    parser.add_argument("--visit", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.visit:
        print(json.dumps(visit(options.visit)))
        return
    versions = chosen(options.torch, [tried.torch for tried in torch_versions.TRIED], "such torch")
    folder = Path(tempfile.mkdtemp(prefix="eagercache-side-by-side-"))
    try:
        pythons = {}
        for torch in versions:
            cell, pythons[torch] = first(torch, options, folder / torch)
            if cell is not None and not cell.ok:
                sys.exit(f"torch {torch}: {cell.said}")
        visits = load(pythons, folder / "store", options.seconds)
        command = [str(pythons[versions[0]]), "-m", "eagercache", "verify", "--all", "--dir"]
        sound = subprocess.run([*command, str(folder / "store")], check=False).returncode == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{table(visits)}\n\nevery object is whole: {'yes' if sound else 'NO'}")
    sys.exit(failed(visits, versions) or not sound)


if __name__ == "__main__":
    main()
