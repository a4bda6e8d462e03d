"""Whatever a trace, an artifact, a setting or a folder's name holds: one line, and the remedy."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import clean_environment, run_program
from eagercache.ahead import warm
from eagercache.ahead.errors import WarmError
from eagercache.cli import program
from eagercache.deploy.deployed_module import DeployedModule
from eagercache.deploy.errors import DeployError
from test_trace import BEGIN, line
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.once

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1 << 70, 10**400, 1.5, float("inf"), float("nan"), "", "text", "\ud800"),
    *([], [None], [[]], {}, {"kind": 3}, {"kind": "tensor"}, {"kind": "tensor_list"}),
)


def altered(value: Any, random_: random.Random) -> Any:
    """`value` with something inside of it, or itself, replaced."""
    if random_.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return random_.choice(ODD)
    place = random_.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    if isinstance(changed, dict) and random_.random() < 0.2:
        del changed[place]
    else:
        changed[place] = altered(value[place], random_)
    return changed


def test_altered_traces_are_read_or_refused_in_one_line(tmp_path: Path, cache: Path) -> None:
    seed = int(os.environ.get("EAGERCACHE_TEST_SEED", "7"))
    random_ = random.Random(seed)
    whole = json.loads(line(3, 1, native_ns=100.0))
    refused = 0
    for number in range(400):
        path = tmp_path / f"trace{number}"
        path.write_text(BEGIN + json.dumps(altered(whole, random_)) + "\n")
        try:
            warm.warm_up(path, cache_dir=cache, dry_run=True)
        except WarmError as error:
            refused += 1
            assert "\n" not in str(error), (seed, number)
        path.unlink()
    assert refused > 200


def test_a_pipe_in_the_place_of_a_trace_is_not_waited_for(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "trace")
    with pytest.raises(WarmError, match="is neither a trace"):
        warm.warm_up(tmp_path / "trace", cache_dir=cache, dry_run=True)
    done = subprocess.run(
        [sys.executable, "-m", "eagercache", "record", "trace", "--", "true"],
        env=clean_environment(EAGERCACHE_DIR=str(cache)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2 and "exists and is no trace" in done.stderr


class Program:
    """What the core says of an artifact; tests replace a part of it."""

    def __init__(self, **other: Any) -> None:
        spec = pytree.tree_structure(((0,), {}))
        text = pytree.treespec_dumps(spec)
        out = pytree.treespec_dumps(pytree.tree_structure(0))
        given = json.dumps({"spec": text, "leaves": [{"tensor": 0}]})
        returned = json.dumps({"spec": out, "leaves": [{"tensor": 0}]})
        self._parts: dict[str, Any] = {
            "call_spec": (given, returned),
            "inputs": [("x", "float32", [4], [1])],
            "outputs": [("output", "float32", [4], [1])],
            "constants": [(["w"], 0, "float32", [4], [1])],
            "open_sizes": [],
            "facts": {"program": "{}"},
            "signer": "00",
        } | other

    def __getattr__(self, name: str) -> Any:
        part = self._parts[name]
        if isinstance(part, Exception):
            raise part
        return part


def returned(leaves: list[dict[str, Any]], **other: Any) -> str:
    """What an artifact says of an answer that is a pair."""
    pair = pytree.treespec_dumps(pytree.tree_structure((0, 0)))
    return json.dumps({"spec": pair, "leaves": leaves, **other})


def test_an_artifact_that_describes_itself_well_is_opened() -> None:
    assert DeployedModule(Program()).input_names == ["x"]
    spec = (Program().call_spec[0], returned([{"tensor": 0}, {"value": 1.5}]))
    assert DeployedModule(Program(call_spec=spec)).input_names == ["x"]


@pytest.mark.parametrize(
    "other",
    [
        {"call_spec": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")},
        {"call_spec": ("{", "{}")},
        {"call_spec": ("{}", "{}")},
        {"call_spec": ("[" * 100_000, "{}")},
        {"call_spec": (Program().call_spec[0].replace("0}]", "7}]"), Program().call_spec[1])},
        {"call_spec": (Program().call_spec[0].replace("tensor", "value"), "{}")},
        {"call_spec": (Program().call_spec[0], '{"spec": "[1, 2, 3]", "leaves": []}')},
        {"call_spec": (Program().call_spec[0], returned([{"tensor": 0}, {"valve": 1}]))},
        {"call_spec": (Program().call_spec[0], returned([{"tensor": 0}, {"value": [1]}]))},
        {"call_spec": (Program().call_spec[0], returned([{"tensor": 0}], changes=[]))},
        {"call_spec": (Program().call_spec[0], returned([{"tensor": 0}]))},
        {"inputs": [("x", "os", [4], [1])]},
        {"inputs": [("x", "nn", [4], [1])]},
        {"inputs": []},
        {"outputs": [("y", "float33", [4], [1])]},
        {"constants": [([], 0, "float32", [4], [1])]},
        {"constants": [(["w"], 77, "float32", [4], [1])]},
        {"facts": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")},
    ],
)
def test_an_artifact_that_describes_itself_oddly_is_one_error(other: dict[str, Any]) -> None:
    with pytest.raises(DeployError) as raised:
        DeployedModule(Program(**other))
    assert raised.value.code == "corrupt" and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["{}", "[]", "1", "x", '{"package": 3}', "[" * 10_000])
def test_settings_of_a_program_that_are_not_ours_are_one_line(value: str) -> None:
    site = program.SITE
    variables = clean_environment(EAGERCACHE_PROGRAM=value)
    variables["PYTHONPATH"] = os.pathsep.join([str(site), variables["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", "print('runs')"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "runs\n")
    assert done.stderr.startswith("eagercache: is not active") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [("EAGERCACHE_SKIP", "\udcff\udcfe"), ("EAGERCACHE_MAX_BYTES", "1e999")],
)
def test_a_setting_that_is_no_setting_is_one_warning(
    cache: Path, variable: str, value: str
) -> None:
    code = f"""
import os
os.environ[{variable!r}] = {value!r}
import torch, eagercache
for _ in range(2):
    eagercache.enable(["abs"], on_miss="native")
print(torch.abs(torch.tensor([-1.0])).item())
"""
    done = run_program(code, cache)
    assert "1.0" in done["stdout"]
    assert done["stderr"].count(f"RuntimeWarning: eagercache: {variable}") == 1, done["stderr"]


def test_a_folder_whose_name_is_no_text_is_one_warning(tmp_path: Path) -> None:
    odd = os.fsdecode(bytes(tmp_path) + b"/st\xffre")
    Path(odd).mkdir(mode=0o700)
    code = """
import torch, eagercache
for _ in range(2):
    eagercache.enable(["abs"], cache_dir={folder!r})
print(torch.abs(torch.tensor([-1.0])).item())
try:
    eagercache.load_module({folder!r} + "/module", keys=[])
except eagercache.DeployError as error:
    report(error=str(error))
"""
    done = run_program(code.format(folder=odd), None)
    assert "1.0" in done["stdout"]
    assert done["stderr"].count("is not UTF-8") == 1
    assert "UTF-8" in done["error"]
