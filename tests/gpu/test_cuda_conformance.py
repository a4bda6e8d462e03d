"""A few operators of PyTorch's database on a real GPU, as `make conformance` runs all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = str(Path(__file__).parent.parent)


def test_operators_of_the_database_equal_native(tmp_path: Path) -> None:
    kinds = ("--ops", "roll,amax,nn.functional.nll_loss", "--dtypes", "float32")
    paths = [TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "conformance", "--device", "cuda", "--state", str(tmp_path)),
            *("--stages", "first", "--jobs", "1", "--samples", "2", "--json", *kinds),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads(done.stdout)
    assert (totals["disagreements"], totals["crashes"], totals["operators_done"]) == (0, 0, 3)
    assert totals["overloads_hit"] > 2
