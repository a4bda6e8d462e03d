"""Leaves out one rule after the other and demands that a test fails. Run by scripts/mutate.

Usage: mutations.py BUILD [PART_OF_A_RULE'S_NAME...], or mutations.py --programs

tests/hazards.json names the rules of a row ("mutations") and its tests. For each pair of row and
rule, the row's C++ tests are run with the rule left out, and at least one must fail; before that,
with nothing left out, all of them must pass. Tests in Python are not run: they take the package as
it is built.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# Of each program whose tests rows with mutations name, the sources.
PROGRAMS = {
    "guards_key_test": [
        "guards/key/call_key_test.cc",
        "guards/key/key_fields_test.cc",
        "guards/key/upstream_guard_test.cc",
    ],
    "guards_builder_test": [
        "guards/builder/aside_reason_test.cc",
        "guards/builder/key_builder_kinds_test.cc",
        "guards/builder/key_builder_state_test.cc",
        "guards/builder/key_builder_wrong_hits_test.cc",
        "guards/builder/overlap_test.cc",
    ],
    "dispatcher_eligibility_test": [
        "dispatcher/operators/eligibility_test.cc",
        "dispatcher/operators/operator_effects_test.cc",
    ],
    "dispatcher_operator_hook_test": [
        "dispatcher/hook/custom_operator_test.cc",
        "dispatcher/hook/hazards_test.cc",
        "dispatcher/kernels/numerics_rule_test.cc",
        "dispatcher/hook/operator_hook_test.cc",
        "dispatcher/hook/writing_hook_test.cc",
    ],
    "dispatcher_runtime_test": ["dispatcher/runtime/runtime_miss_test.cc"],
}
TIMEOUT = 60


def tests_of(program: str) -> set[str]:
    """The tests in a program's sources, as "Suite.Name"."""
    names: set[str] = set()
    for source in PROGRAMS[program]:
        text = (TESTS / source).read_text()
        names.update(f"{s}.{n}" for s, n in re.findall(r"TEST(?:_[FP])?\((\w+),\s*(\w+)\)", text))
    return names


def run(build: Path, program: str, tests: Iterable[str], rule: str) -> list[str]:
    """The tests that failed. A crash or a hang counts too."""
    field = rule.removeprefix("field.")
    patterns = []
    for test in tests:
        patterns.append(test)
        # Of a test with parameters, the one that is about the field.
        patterns.append(f"*/{test}/{field if rule.startswith('field.') else '*'}")
    folder = program.split("_")[0]
    path = build / "tests" / folder / program
    try:
        done = subprocess.run(
            [str(path), f"--gtest_filter={':'.join(patterns)}"],
            env={**os.environ, "EAGERCACHE_MUTATE": rule},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ["(hung)"]
    if done.returncode == 0:
        if "[  PASSED  ] 0 tests" in done.stdout:
            raise SystemExit(f"{program} has none of {sorted(tests)}")
        return []
    failed = re.findall(r"^\[  FAILED  \] (\S+)", done.stdout, re.MULTILINE)
    return sorted({name.rstrip(",") for name in failed if "." in name}) or ["(crashed)"]


def main() -> None:
    """Prints a line for each pair; the exit status says whether every rule is watched."""
    if sys.argv[1] == "--programs":
        print("\n".join(PROGRAMS))
        return
    build, wanted = Path(sys.argv[1]), sys.argv[2:]
    rows = [r for r in json.loads((TESTS / "hazards.json").read_text()) if "mutations" in r]
    where = {program: tests_of(program) for program in PROGRAMS}
    unwatched, checked, baseline = [], 0, set()
    for row in rows:
        mine = {p: sorted(set(row["tests"]) & names) for p, names in where.items()}
        mine = {program: tests for program, tests in mine.items() if tests}
        for program, tests in mine.items():
            fresh = [test for test in tests if (program, test) not in baseline]
            if fresh and (broken := run(build, program, fresh, "")):
                raise SystemExit(f"without any rule left out: {broken}")
            baseline.update((program, test) for test in fresh)
        for rule in row["mutations"]:
            if wanted and not any(part in rule for part in wanted):
                continue
            checked += 1
            failed = [
                t for program, tests in mine.items() for t in run(build, program, tests, rule)
            ]
            seen = ", ".join(failed[:3]) if failed else "NO TEST FAILS"
            print(f"{rule:32} {row['id']:52} {seen}", flush=True)
            if not failed:
                unwatched.append(f"{rule} ({row['id']})")
    print(f"mutations: {checked} pairs of rule and hazard, {len(unwatched)} without a failing test")
    if unwatched:
        raise SystemExit("not watched: " + "; ".join(unwatched))


if __name__ == "__main__":
    main()
