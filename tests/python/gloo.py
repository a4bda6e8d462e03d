"""Programs that run once for each of several caches, as the ranks of one job over gloo."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import clean_environment


def run_ranks(
    code: str, caches: Sequence[Path], *arguments: str, timeout: float = 300, **variables: str
) -> list[dict[str, Any]]:
    """What each rank printed behind "REPORT ", in JSON. A rank that fails fails the test."""
    port = str(_free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=clean_environment(
                EAGERCACHE_DIR=str(cache),
                RANK=str(rank),
                WORLD_SIZE=str(len(caches)),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                **variables,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, cache in enumerate(caches)
    ]
    reports = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            assert process.returncode == 0, err
            (line,) = [text for text in out.splitlines() if text.startswith("REPORT ")]
            reports.append(json.loads(line.removeprefix("REPORT ")))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return reports


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
