"""Small stores made by hand, and the command line in this process, for tests of commands."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from eagercache import _C
from eagercache.base import environment
from eagercache.cli import main as cli

CALL = {
    "args": [
        {"kind": "tensor", "name": "self", "dtype": "float32", "sizes": [8, 4], "strides": [4, 1]},
        {"kind": "int_list", "name": "dim", "values": [-1]},
        {"kind": "none", "name": "dtype"},
    ]
}


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shared_object(folder: Path) -> Path:
    """A shared object that needs no library and holds one function."""
    source, target = folder / "one.c", folder / "one.so"
    source.write_text("int one(void) { return 1; }")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-nostdlib", "-Wl,-z,noexecstack", "-o", target, source],
        check=True,
    )
    return target


@pytest.fixture
def store(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel, a decision for native and a failure in this environment; one entry in another."""
    monkeypatch.setenv("EAGERCACHE_DIR", str(cache))
    monkeypatch.delenv("EAGERCACHE_CXX", raising=False)
    opened = _C.Store(str(cache), environment.environment_text(cxx=None))
    artifact = _shared_object(cache.parent)
    facts = {"call": json.dumps(CALL), "native_ns": "2500", "kernel_ns": "1250"}
    opened.publish(
        {"key": key_of("a"), "kind": "kernel", "facts": {**facts, "op": "aten::var.correction"}},
        [("so", str(artifact))],
    )
    opened.publish({"key": key_of("b"), "kind": "native", "facts": {**facts, "op": "aten::cat"}})
    opened.publish(
        {
            "key": key_of("c"),
            "kind": "failed",
            "facts": {"op": "aten::abs", "reason": "no compiler"},
        }
    )
    other = _C.Store(str(cache), "format: 1\ntorch.version: 1.0\n")
    other.publish({"key": key_of("d"), "kind": "native", "facts": {"op": "aten::mul"}})
    return opened


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), input=input)
