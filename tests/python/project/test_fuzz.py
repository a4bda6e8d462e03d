"""Random programs against native, in short (`make fuzz` is the long form), and the fuzzer itself.

Faults are planted in a store: under one call's key stands the kernel of another call, which is what
a wrong kernel, a field that is missing in the key and a write that is not made look like.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    PACKAGE_ROOT,
    clean_environment,
    run_program,
    run_python,
    with_prepared_workers,
)
from fuzz.__main__ import POOL, merge
from fuzz.both_ways import Totals
from fuzz.judge import Lockstep

FUZZ = str(Path(__file__).resolve().parent.parent.parent)
KEYS = 32
CALLS = 1000

# The calls of the planted faults, by twos: the kernel of the second is put under the first's key.
PLANTS = """
import sys
sys.path[:0] = [{fuzz!r}, {fuzz!r} + "/python"]
import os, shutil
from pathlib import Path
from random import Random
import torch
torch.set_num_threads(1)
import eagercache
from eagercache import _C
from eagercache.runtime.session import session
from fuzz import both_ways, pool, programs, shrink
from fuzz.templates import Slot, Spec, Template
from remade import object_for

X, T = Spec("float32", (16, 17)), Spec("float32", (16, 17), "transposed")
def call(name, *arguments, specs=(X, X), **keywords):
    writes = (0,) if name.endswith("_") else ()
    return Template(name, arguments, specs, tuple(keywords.items()), writes)
a, b = Slot(0), Slot(1)
PAIRS = {{
    "a wrong kernel": (call("torch.maximum", a, b), call("torch.minimum", a, b)),
    "a number that is not in the key": (
        call("torch.add", a, b, alpha=2), call("torch.add", a, b, alpha=3)),
    "strides that are not in the key": (
        call("torch.neg", a, specs=(T,)), call("torch.neg", a, specs=(X,))),
    "a write that is not made": (
        call("torch.Tensor.clamp_", a, -1, 1, specs=(X,)),
        call("torch.Tensor.clamp_", a, -1e30, 1e30, specs=(X,))),
    "an answer of which a part is not computed": (
        call("torch.abs", a, specs=(Spec("float32", (33, 8)),)),
        call("torch.ceil", a, specs=(Spec("float32", (32, 8)),))),
}}
"""


def _plants() -> str:
    return PLANTS.format(fuzz=FUZZ)


@pytest.fixture(scope="session")
def fuzz_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for the short form, whose kernels it compiles itself, and those of the plants."""
    path = tmp_path_factory.mktemp("fuzz") / "cache"
    path.mkdir(mode=0o700)
    return path


def _fuzz(cache: Path, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """(exit status, totals, output) of the fuzzer with these arguments."""
    totals = tmp_path / "totals.json"
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "--cache", str(cache), "--json", str(totals), "--quiet",
         "--scripts", str(tmp_path / "findings"), "--keys", str(KEYS), "--seed", "7", *arguments],
        env=with_prepared_workers(clean_environment(PYTHONPATH=f"{FUZZ}:{PACKAGE_ROOT}")),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert totals.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(totals.read_text()), done.stdout + done.stderr


def test_random_programs_give_what_they_give_without_kernels(
    fuzz_cache: Path, tmp_path: Path
) -> None:
    status, result, output = _fuzz(fuzz_cache, tmp_path, "--calls", str(CALLS))
    print(output)
    assert (status, result["findings"]) == (0, []), output
    assert result["totals"]["calls"] >= CALLS
    assert result["totals"]["gradients"] and result["totals"]["inference"]
    answered = result["answered"]
    assert answered["hits"] >= 0.6 * sum(answered.values()), answered
    assert result["pool"]["keys"] <= KEYS


@pytest.mark.once
def test_a_program_that_ends_the_process_is_a_finding_and_others_go_on(
    fuzz_cache: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "Program('plain', (Op(Template(function='torch.os.abort', arguments=(), specs=()), ()),))\n"
    )
    status, result, output = _fuzz(fuzz_cache, tmp_path, "--calls", "20", "--corpus", str(corpus))
    assert status == 1 and result["crashes"] == 1, output
    assert "SIGABRT" in result["findings"][0]["message"]
    assert result["totals"]["calls"] >= 20


@pytest.mark.once
@pytest.mark.long
def test_processes_share_the_calls_and_what_each_finds_is_kept(
    fuzz_cache: Path, tmp_path: Path
) -> None:
    status, result, output = _fuzz(fuzz_cache, tmp_path, "--calls", "400", "--jobs", "2")
    assert (status, result["findings"]) == (0, []), output
    assert result["jobs"] == 2
    # Each makes its half, in programs of up to 20 calls, after the one that compiles.
    assert 400 <= result["totals"]["calls"] < 400 + 3 * 20
    assert sum(result["answered"].values()) > 400


@pytest.mark.once
@pytest.mark.once
def test_tensors_without_values_are_not_compared() -> None:
    with Lockstep() as both:
        made = torch.ones(3).to("meta") + 1
    assert made.is_meta and both.judged == 0


def test_a_finding_of_the_shared_keys_counts_once() -> None:
    def result(*found: tuple[str, str]) -> dict[str, Any]:
        findings = [{"where": where, "message": message} for where, message in found]
        return {"findings": findings, "crashes": 1, "seconds": 2.0, "totals": asdict(Totals(1, 10)),
                "answered": {"hits": 5}, "asides": {"overlap": 1}}  # fmt: skip

    whole = result((POOL, "a"))
    merge(whole, result((POOL, "a"), ("seed 8, program 1", "a"), (POOL, "b")))
    merge(whole, result())
    assert [(one["where"], one["message"]) for one in whole["findings"]] == [
        (POOL, "a"),
        ("seed 8, program 1", "a"),
        (POOL, "b"),
    ]
    assert (whole["crashes"], whole["seconds"], whole["totals"]["calls"]) == (3, 2.0, 30)
    assert (whole["answered"], whole["asides"]) == ({"hits": 15}, {"overlap": 3})


@pytest.fixture(scope="session")
def planted(fuzz_cache: Path) -> dict[str, Any]:
    """For each planted fault what the fuzzer says of it, and the same without any fault."""
    result = run_program(
        _plants()
        + """
directory = Path(os.environ["EAGERCACHE_DIR"])
answers = {}
digests = {}
pool.enable(directory, "wait")
_C.set_answering(False)
def digest_of(template):
    _C.forget_recorded_calls()
    _C.set_recording(True)
    run = both_ways.Run("plain", both_ways.Totals())
    for spec in template.specs:
        run.do(programs.Make(spec, programs.Data(0)))
    run.do(programs.Op(template, tuple(range(len(template.specs)))))
    _C.set_recording(False)
    ((text, _),) = _C.recorded_calls()
    return json.loads(text)["digest"]
for pair in PAIRS.values():
    for template in pair:
        pool.make_once(template)
        digests[repr(template)] = digest_of(template)
known = {k.digest: k.decision for k in eagercache.kernels()}
text = session.store_identity[1]
decisions = [known.get(d) for d in digests.values()]

def view_of_clone(path):
    # Right values, in the memory of the argument.
    function = real_resolve(path)
    def wrapped(x):
        plain = not x.requires_grad and not torch.is_inference_mode_enabled()
        return x.data if _C.answering() and plain else function(x)
    return wrapped
real_resolve = both_ways.resolve

def hunt(templates):
    p, found = pool.weigh(templates)
    totals = both_ways.Totals()
    for number in range(300):
        if found:
            break
        one = both_ways.run_drawn(programs.Drawer(Random(number), p), totals)
        found += [one] if one else []
    return found, totals

every = [template for pair in PAIRS.values() for template in pair]
found, totals = hunt(every)
answers["no fault"] = [str(found), totals.calls]
both_ways.resolve = view_of_clone
found, _ = hunt([call("torch.clone", a, specs=(X,))])
answers["an answer in the argument's memory"] = found[0].kind if found else None
both_ways.resolve = real_resolve
for name, (victim, other) in PAIRS.items():
    forged = directory.parent / name.replace(" ", "_")
    shutil.copytree(directory, forged)
    copy = _C.Store(str(forged), text)
    mine, others = (digests[repr(t)] for t in (victim, other))
    manifest = copy.find(others)
    objects = object_for(mine, manifest, forged, directory.parent)
    copy.remove(mine)
    copy.publish({"key": mine, "kind": "kernel", "created": 1, "facts": manifest["facts"],
                  "cpu_features": manifest.get("cpu_features", [])}, objects)
    pool.enable(forged, "native")
    _C.set_answering(False)
    found, totals = hunt([victim])
    if not found:
        answers[name] = None
        continue
    small = shrink.Shrinker(found[0]).shrink()
    script = directory.parent / (name.replace(" ", "_") + ".py")
    script.write_text(shrink.script(small, name))
    answers[name] = {"kind": small.kind, "message": small.message, "calls": small.program.calls,
                     "script": str(script), "cache": str(forged), "program": repr(small.program)}
report(answers=answers, decisions=decisions)
""",
        fuzz_cache,
        timeout=600,
    )
    assert set(result["decisions"]) == {"kernel"}, result["decisions"]
    return result["answers"]


@pytest.mark.once
@pytest.mark.long
def test_without_a_fault_the_planted_calls_agree(planted: dict[str, Any]) -> None:
    found, calls = planted["no fault"]
    assert found == "[]" and calls > 1000


@pytest.mark.once
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("a wrong kernel", {"bitwise", "values"}),
        ("a number that is not in the key", {"bitwise", "values"}),
        ("strides that are not in the key", {"metadata", "bitwise", "values"}),
        ("a write that is not made", {"memory"}),
        ("an answer of which a part is not computed", {"metadata"}),
    ],
)
def test_a_planted_fault_is_found_and_shrunk_to_one_call(
    planted: dict[str, Any], fault: str, kind: set[str]
) -> None:
    found = planted[fault]
    assert found is not None and found["kind"] in kind, found
    assert found["calls"] == 1


@pytest.mark.once
@pytest.mark.long
def test_an_answer_in_the_memory_of_an_argument_is_found(planted: dict[str, Any]) -> None:
    assert planted["an answer in the argument's memory"] == "alias"


@pytest.mark.once
@pytest.mark.long
def test_the_script_of_a_disagreement_shows_it_by_itself(planted: dict[str, Any]) -> None:
    found = planted["a number that is not in the key"]
    script = Path(found["script"]).read_text()
    assert len(script.splitlines()) < 80 and "torch.add(v[0], v[" in script
    done = run_python(script, clean_environment(EAGERCACHE_DIR=found["cache"]))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "values differ" in done.stdout


@pytest.mark.once
@pytest.mark.long
def test_changes_of_what_modules_read_are_noticed(tmp_path: Path) -> None:
    cache, totals = tmp_path / "cache", tmp_path / "totals.json"
    cache.mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "--modules", "--cache", str(cache), "--json", str(totals),
         "--folder", str(tmp_path / "worlds"), "--seed", "7", "--quiet", "--recompiles", "0",
         "--only", "dict"],
        env=clean_environment(PYTHONPATH=f"{FUZZ}:{PACKAGE_ROOT}"),
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(totals.read_text())["rows"]
    changes = next(row for row in rows if row.get("phase") == "changes")
    assert changes["changes"] >= 100 and changes["seen"] >= 50, changes
    assert changes["stale"] == 0
