"""Counts the tests of a ctest run, those too that one program runs together.

Usage: count_tests.py JUNIT [REPORTS]

JUNIT is what `ctest --output-junit` wrote; REPORTS is a folder with GoogleTest's own report,
NAME.json, of each program that ctest runs whole. Prints one line, the names of skipped tests, and
of failed ones with what they say (ctest shows the output of the whole program).
Fails when a test failed or none ran.
"""

from __future__ import annotations

import json
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple


class Test(NamedTuple):
    """A test, how it ended, and what it says if it failed."""

    name: str
    outcome: str
    failure: str = ""


def outcome_of(test: dict[str, Any]) -> str:
    """What GoogleTest says of one test."""
    if test.get("failures"):
        return "failed"
    if test["result"] == "SKIPPED":
        return "skipped"
    return "passed" if test["result"] == "COMPLETED" else "not run"


def failure_of(test: dict[str, Any]) -> str:
    """The first thing that GoogleTest's report says against a test."""
    for failure in test.get("failures", []):
        return str(failure["failure"])
    return ""


def tests_of(case: ElementTree.Element, reports: Path) -> list[Test]:
    """The tests of one of ctest's."""
    name = case.get("name", "?")
    failed = case.find("failure") is not None
    report = reports / f"{name}.json"
    if report.is_file():
        suites = json.loads(report.read_text())["testsuites"]
        tests = [
            Test(f"{suite['name']}.{test['name']}", outcome_of(test), failure_of(test))
            for suite in suites
            for test in suite["testsuite"]
        ]
        if failed and all(test.outcome != "failed" for test in tests):
            tests.append(Test(name, "failed"))  # after its tests: a leak, a crash at the end
        return tests
    if failed:
        return [Test(name, "failed")]
    skipped = case.find("skipped")
    if skipped is not None:  # by the test's own word, or because ctest could not run it
        own = skipped.get("message", "").startswith("SKIP_")
        return [Test(name, "skipped" if own else "not run")]
    return [Test(name, "passed" if case.get("status") == "run" else "not run")]


def main() -> int:
    """The command line."""
    junit = Path(sys.argv[1])
    reports = Path(sys.argv[2]) if len(sys.argv) > 2 else junit.parent / "nothing"
    tests = [
        test
        for case in ElementTree.parse(junit).getroot().iter("testcase")
        for test in tests_of(case, reports)
    ]
    counts = Counter(test.outcome for test in tests)
    words = [f"{counts[key]} {key}" for key in ("passed", "failed", "skipped")]
    if counts["not run"]:
        words.append(f"{counts['not run']} not run")
    print(", ".join(words), f"of {len(tests)}")
    for test in tests:
        if test.outcome != "passed":
            print(f"  {test.outcome}: {test.name}")
            print(textwrap.indent(test.failure, "    "), end="\n" if test.failure else "")
    return 1 if counts["failed"] or counts["not run"] or not tests else 0


if __name__ == "__main__":
    sys.exit(main())
