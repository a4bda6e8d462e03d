"""Every snippet of the documentation runs.

In each page the `python` blocks are one program and the `console` lines after `$` are shell
commands, run in the order in which they stand, over one cache. Blocks of `sh` are not run: they
install, which scripts/check_wheel does. The page that builds a C++ program is run by that program's
tests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import clean_environment, make_tools, run_python
from eagercache.base import config

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Pages for who changes the code.
INSIDE = sorted(
    [
        ROOT / "ARCHITECTURE.md",
        ROOT / "CONTRIBUTING.md",
        *(
            page
            for folder in (
                "cpp_api",
                "dispatcher",
                "guards",
                "kernel_cache",
                "python_hooks",
                "tests",
            )
            for page in (ROOT / folder).rglob("*.md")
        ),
    ]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_SHELL = """
import subprocess
def run_shell(command):
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout
"""


def program_of(page: Path) -> str:
    """One Python program of all that a page asks its reader to run; empty when that is nothing."""
    parts = []
    for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            parts.append(body)
        elif language == "console":
            commands = [line[2:] for line in body.splitlines() if line.startswith("$ ")]
            printed = [line for line in body.splitlines() if not line.startswith("$ ")]
            parts.extend(f"shell_output = run_shell({command!r})" for command in commands)
            if printed:
                parts.append(f"assert shell_output.splitlines() == {printed!r}, shell_output")
        else:
            assert language in ("sh", "text", "cpp", ""), f"{page}: a block of {language!r}"
    return "\n".join([RUN_SHELL, *parts]) if parts else ""


@pytest.fixture(scope="session")
def documentation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a reader who goes from page to page."""
    path = tmp_path_factory.mktemp("documentation") / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if program_of(page) and page.stem != "serve-from-cpp"],
    ids=lambda page: page.stem,
)
def test_the_snippets_of_a_page_run(page: Path, documentation_cache: Path, tmp_path: Path) -> None:
    tools = make_tools(tmp_path / "bin")
    environment = clean_environment(EAGERCACHE_DIR=str(documentation_cache))
    environment["PATH"] = f"{tools}:{environment['PATH']}"
    done = run_python(program_of(page), environment, folder=tmp_path, timeout=400, fills=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_is_reached_from_the_first() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in PAGES:
        name = page.relative_to(ROOT)
        if name.parts[0] == "docs" and name.name != "index.md":
            assert str(name.relative_to("docs").with_suffix("")) in index, name


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *INSIDE]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_journeys_name_files_that_are_there_once_each_and_count_them() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    journeys = text.partition("## Three journeys\n")[2].partition("\n## ")[0]
    parts = re.findall(r"^\*\*A .*?\*\* \((\d+) files(.*?)(?=^\*\*|\Z)", journeys, re.M | re.DOTALL)
    assert len(parts) == 3
    folders = ("", "dispatcher", "python_hooks/eagercache", "python_hooks/nn_modules")
    for count, body in parts:
        files = re.findall(r"`([\w/]+\.(?:py|cc|h))`", body)
        assert len(files) == len(set(files)) == int(count)
        for file in files:
            assert any((ROOT / folder / file).is_file() for folder in folders), file


def test_the_environment_table_knows_every_variable_that_code_reads() -> None:
    known = {variable.name for variable in config.VARIABLES}
    known |= {"EAGERCACHE_INSIDE_WORKER", "EAGERCACHE_INSIDE_WORKER_PATHS"}  # set for workers
    known.add("EAGERCACHE_INSIDE_SELF_CHECK")  # set for the process that checks an untried torch
    known.add("EAGERCACHE_PROGRAM")  # from `run` and `record` to the program's processes
    known.add("EAGERCACHE_MUTATE")  # read in builds of scripts/mutate alone
    read = set()
    for folder in ("python_hooks", "cpp_api", "dispatcher", "guards", "kernel_cache"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.cc")]:
            read |= set(re.findall(r"\"(EAGERCACHE_[A-Z_]+)\"", path.read_text(encoding="utf-8")))
    assert read - known == set()
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    assert "{{ environment_table }}" in page
    table = config.environment_table()
    assert all(f"| `{variable.name}` |" in table for variable in config.VARIABLES)


def conformance_totals(page: str) -> dict[str, str]:
    """The first column of the totals of a generated page."""
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    totals = text.split("## Disagreements")[0]
    return dict(re.findall(r"^\| ([^|]+?) \| ([\d,]+) \|", totals, re.MULTILINE))


def test_the_readme_says_of_conformance_what_the_pages_say() -> None:
    pages = ("conformance.md", "conformance-2.15.md", "conformance-cuda.md")
    totals = [conformance_totals(page) for page in pages]
    there_are = "units (operator, dtype, stage) there are"
    said = {
        "units (operator, dtype, stage) run, of all": [
            f"{one['units done']} of {one[there_are]}" for one in totals
        ],
        "comparisons with native": [one["comparisons with native"] for one in totals],
        "overloads answered by a kernel": [
            one["overloads answered by a kernel at least once"] for one in totals
        ],
        "disagreements": [one["disagreements"] for one in totals],
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, numbers in said.items():
        assert f"| {name} | {' | '.join(numbers)} |" in readme, (name, numbers)
    denied = json.loads(
        (ROOT / "dispatcher" / "operators" / "denied_operators.json").read_text("utf-8")
    )
    assert f"{len(denied)} patterns of calls" in readme
