"""How soon a process with a full store is ready, and what the first use of a kernel costs.

Usage: store.py [--entries N] [--runs N] [--json]; the table's quartiles are those of the runs.

One kernel is compiled into a store of its own, which is then filled with N - 1 entries like it.
Each run is a fresh process: `import eagercache` after `import torch`; `enable()` of the default
operators, everything included that it reads and computes; the first and the second call of the
kernel's operator; and, in another process, `enable("all")`. Python's byte code is on disk, as after
an installation: it is written into a folder of the benchmark's, whatever PYTHONDONTWRITEBYTECODE
says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.shared import frame

STEPS = {
    "import": "import eagercache",
    "enable": "enable(), the environment key with it",
    "first": "first use of a kernel",
    "second": "second use",
    "enable all": 'enable("all")',
}
_PROCESS = """
import json, sys, time
import torch
x = torch.randn(512, 512)
torch.var(x, -1)
clock = time.perf_counter
begin = clock()
import eagercache
imported = clock()
eagercache.enable(%s, on_miss="wait", choose="always")
ready = clock()
torch.var(x, -1)
first = clock()
torch.var(x, -1)
second = clock()
s = eagercache.stats()
print(json.dumps({"import": imported - begin, "enable": ready - imported, "first": first - ready,
                  "second": second - first, "hits": s.hits, "loaded": s.loaded}))
"""


def run(store: Path, operators: str = "") -> dict[str, Any]:
    """One fresh process on the store; times in seconds."""
    environment = {
        **os.environ,
        "EAGERCACHE_DIR": str(store),
        "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": str(store.parent / "byte-code"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS % (operators or "None")],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def fill(store: Path, entries: int) -> None:
    """Entries like the one that is there, under other keys."""
    from eagercache import _C
    from eagercache.base import config, environment

    opened = _C.Store(str(store), environment.environment_text(cxx=config.read_settings().cxx))
    (kernel,) = (row for row in opened.entries() if row["kind"] == "kernel")
    (thing,) = kernel["objects"]
    source = next(store.rglob(f"{thing['digest']}.so"))
    for number in range(entries - 1):
        key = hashlib.sha256(str(number).encode()).hexdigest()
        manifest = {"key": key, "kind": "kernel", "facts": kernel["facts"]}
        opened.publish(manifest, [("so", str(source))])


def main() -> None:
    """Prints medians and quartiles of all runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        store.mkdir(mode=0o700)
        run(store)
        fill(store, arguments.entries)
        run(store)  # what this process computes, later ones remember
        results = [run(store) for _ in range(arguments.runs)]
        for result in results:
            result["enable all"] = run(store, '"all"')["enable"]
    assert all(result["hits"] == 2 and result["loaded"] == 1 for result in results), results
    figures = []
    for name, label in STEPS.items():
        low, median, high = frame.quartiles([1e9 * result[name] for result in results])
        figures.append(frame.Figure(label, median, low, high, None, arguments.runs, 1))
    title = f"A process with a store of {arguments.entries} entries, from Python"
    frame.show(frame.as_json(title, figures), arguments.json)


if __name__ == "__main__":
    main()
