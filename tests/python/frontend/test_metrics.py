"""Counters in Prometheus' text format."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import real_servers
from conftest import Program, run_program
from eagercache.frontend.metrics import MetricsCollector, metrics, text_of
from eagercache.frontend.report import OperatorStats, RemoteStats, Stats

NAME = r"eagercache_[a-z_]+"
LABEL = r'[a-z]+="(?:[^"\\\n]|\\[\\n"])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")


def read(text: str) -> dict[tuple[str, str], float]:
    """The samples of a text, which is of the format."""
    found: dict[tuple[str, str], float] = {}
    types: dict[str, str] = {}
    said = set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            said.add(line.split(" ")[2])
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in said and name not in types and kind in ("counter", "gauge"), line
            assert name.endswith("_total") == (kind == "counter"), line
            types[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == list(types)[-1], line  # a family's samples are together
            assert (match[1], match[2] or "") not in found, line
            found[match[1], match[2] or ""] = float(match[3])
    return found


def test_counters_have_labels_and_odd_names_are_escaped() -> None:
    row = OperatorStats(
        *('a"b\\c\n', "CPU", True, 5, 1, 0, 2, 3), {"overlap": 2, "dtype": 1}, shadowed=False
    )
    remote = RemoteStats(hits=4, refused={"environment: torch.version": 7}, bytes_read=1 << 40)
    counted = Stats(
        *(5, 1, 0, 2, 3, 6, 0, 2, 1),
        frozen=False,
        shadowed=0,
        left_native=(),
        operators={row.op: row},
        seconds_saved=1.5,
        remote=remote,
    )
    found = read(text_of(counted))
    op = r'op="a\"b\\c\n",key="CPU"'
    assert found["eagercache_calls_total", f'{op},outcome="kernel"'] == 5
    assert ("eagercache_calls_total", f'{op},outcome="pending"') not in found
    assert found["eagercache_aside_total", f'{op},reason="overlap"'] == 2
    assert found["eagercache_saved_seconds_total", ""] == 1.5
    assert found["eagercache_remote_lookups_total", 'outcome="hit"'] == 4
    kind = 'kind="environment: torch.version"'
    assert found["eagercache_remote_refused_total", kind] == 7
    assert found["eagercache_remote_bytes_total", 'direction="read"'] == 1 << 40


def test_a_registry_of_prometheus_client_says_the_same() -> None:
    real_servers.require("prometheus_client")
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    registry.register(MetricsCollector())
    text = prometheus_client.generate_latest(registry).decode()
    mine = read(metrics())
    theirs = read(text)
    assert theirs == mine and ("eagercache_remote_request_seconds_total", "") in theirs


PROGRAM = """
import torch, eagercache
eagercache.enable(["var.correction"], on_miss="wait", choose="always")
for _ in range(4): torch.var(torch.ones(64, 96), -1)
report(text=eagercache.metrics())
"""


def test_a_program_leaves_its_counters_in_a_file(
    program: Program, tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "collector"
    folder.mkdir()
    said = program(PROGRAM, fills=True, EAGERCACHE_METRICS=str(folder / "{pid}.prom"))
    (file,) = folder.iterdir()  # and nothing temporary
    assert file.name.removesuffix(".prom").isdigit() and file.stat().st_mode & 0o777 == 0o644
    found = read(file.read_text())
    assert found == {**found, **read(str(said["text"]))}
    hits = found["eagercache_calls_total", 'op="aten::var.correction",key="CPU",outcome="kernel"']
    assert hits == 3 and found["eagercache_compiles_total", ""] == 1


@pytest.mark.parametrize("name", ["none/file.prom", ".", "pipe"])
def test_a_file_that_cannot_be_written_is_one_warning(
    name: str, tmp_path: Path, cache: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    said = run_program(PROGRAM, cache, fills=True, EAGERCACHE_METRICS=str(tmp_path / name))
    assert str(said["stderr"]).count("EAGERCACHE_METRICS=") == 1
    assert list(tmp_path.glob(".*")) == []
    assert (tmp_path / "pipe").is_fifo()
