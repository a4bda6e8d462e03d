"""Calls hooked operators from a thread while another one holds the interpreter's lock throughout.

Usage: check_gil.py hits|misses STORE
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import eagercache
import gil_probe
import torch

CALLS = 1000


def check_hits(store: Path) -> None:
    """Every call is answered by a kernel of the store."""
    with eagercache.enable(
        "aten::var.correction", on_miss="native", choose="always", cache_dir=store
    ):
        assert gil_probe.call_var_without_letting_go(512, CALLS) == CALLS
        row = eagercache.stats().operators["aten::var.correction"]
    assert row.hits == CALLS, row


def check_misses() -> None:
    """Native answers every call, though the compile service needs the lock to be asked."""
    with tempfile.TemporaryDirectory() as empty:
        with eagercache.enable(
            "aten::var.correction", on_miss="background", cache_dir=Path(empty) / "store"
        ):
            assert gil_probe.call_var_without_letting_go(480, CALLS) == CALLS
            row = eagercache.stats().operators["aten::var.correction"]
            assert (row.hits, row.misses, row.pending) == (0, 1, CALLS - 1), row
            assert eagercache.stats().outstanding > 0, "the key was not queued"
            eagercache.disable()
        assert eagercache.wait(300)


def main() -> int:
    torch.manual_seed(0)
    if sys.argv[1] == "hits":
        check_hits(Path(sys.argv[2]))
    else:
        check_misses()
    return 0


if __name__ == "__main__":
    sys.exit(main())
