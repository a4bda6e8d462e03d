"""`make matrix`: each torch of the table against each thing that eagercache does with it.

python -m matrix [--torch 2.13.0,2.14.1] [--only import,module] [--tests] [--no-build]
                 [--wheel FILE.whl] [--also FILE.json] [--json FILE] [--output FILE.md]

Each torch has an environment and a build tree of its own, which are made first where they are not
there. A cell is a process; where it fails, the table has `no` and the reason stands below it.
`--tests` runs the smoke test besides: the files of `matrix.smoke`. With `--wheel` nothing is
built: the wheel is installed beside each torch, and what is tried is what it brings. `--also`
takes in what another Python's run wrote to its `--json`, in another clone (PYTHON=python3.12). The
exit status says whether all of it is green.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from matrix.cells import CELLS, ROOT
from matrix.smoke import FILES

sys.path.insert(0, str(ROOT / "python_hooks" / "eagercache" / "base"))
import torch_versions

# A cell compiles a few kernels; on a busy machine each may take a minute.
LIMIT_S = 900
SMOKE_LIMIT_S = 3600
BUILD = "build"
INSTALL = "install"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SMOKE = "tests"


@dataclass(frozen=True)
class Cell:
    """What one torch under one Python did with one thing."""

    torch: str
    python: str
    name: str
    ok: bool
    said: str
    seconds: float


def environment(torch: str) -> dict[str, str]:
    """For programs of that torch: no setting of the user's, and nothing goes on behind them."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("EAGERCACHE_")}
    # A system without cmake has the one that scripts/setup puts beside the interpreter.
    path = [kept.get("PATH", ""), str(interpreter(torch).parent)]
    return {
        **kept,
        "PATH": os.pathsep.join(filter(None, path)),
        "TORCH": torch,
        "EAGERCACHE_LINGER": "0",
        # Other programs of this user on the machine compile too: a cell does not wait for them.
        "EAGERCACHE_SLOTS": "16",
        "PYTHONPATH": str(ROOT / "tests"),
        # What no other torch can change is tested with the first alone.
        "CORE_TESTS": kept.get("CORE_TESTS", "OFF"),
    }


def interpreter(torch: str) -> Path:
    """Of the environment that scripts/setup makes for it."""
    command = 'TORCH=$1; . scripts/common.sh; printf %s "$python"'
    done = subprocess.run(
        ["bash", "-c", command, "bash", torch], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return Path(done.stdout)


def attempt(
    torch: str, name: str, command: list[str], limit: float = LIMIT_S, found: str = ""
) -> Cell:
    """Runs it; what `found` finds in its output, or the reason for its failure, is said."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(torch), capture_output=True, text=True,
            timeout=limit, check=False,
        )  # fmt: skip
        output, ok = done.stdout + done.stderr, done.returncode == 0
    except subprocess.TimeoutExpired:
        output, ok = f"no end within {limit:.0f} s", False
    log_of(torch, name).write_text(output, encoding="utf-8")
    seen = re.findall(found, output, re.MULTILINE) if found else []
    said = seen[-1] if seen else reason(output) if not ok else ""
    return Cell(torch, PYTHON, name, ok, said, round(time.monotonic() - began, 1))


def log_of(torch: str, name: str) -> Path:
    """All that a cell printed, for who wants to know more than the table says."""
    return ROOT / "build" / f"matrix-{torch}-{name.replace(' ', '-')}.log"


def reason(output: str) -> str:
    """The line that says most of why a program failed: that of its exception, or its last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|.*\berror: ", line)]
    return (errors or lines or ["it said nothing"])[-1][:300]


def build(torch: str) -> Cell:
    """The environment and the tree; of the tree what is imported and linked, without C++ tests."""
    targets = "python_package cpp_package"
    command = f"scripts/setup && scripts/build --target {targets}"
    return attempt(torch, BUILD, ["bash", "-c", command], limit=3600)


def smoke(torch: str, python: Path) -> Cell:
    """The chosen test files; pytest's own last line is what is said of them."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long"]
    command += ["-n", os.environ.get("JOBS", "2"), "--dist", "loadscope"]
    command += [f"tests/python/{name}" for name in FILES]
    closing = r"^(?:=+ )?(\d+ (?:passed|failed).*?)(?: =+)?$"
    return attempt(torch, SMOKE, command, SMOKE_LIMIT_S, closing)


def first(torch: str, options: argparse.Namespace, folder: Path) -> tuple[Cell | None, Path]:
    """What has to be there before anything is tried, and the interpreter that has it."""
    if options.wheel:
        made = folder / "environment"
        words = [sys.executable, "-m", "matrix.beside", interpreter(torch), made, options.wheel]
        command = ["bash", "-c", 'scripts/setup && exec "$@"', "bash", *map(str, words)]
        cell = attempt(torch, INSTALL, command, limit=3600, found=r"^SAW (.*)$")
        return cell, made / "bin" / "python"
    return None if options.no_build else build(torch), interpreter(torch)


def row(torch: str, names: list[str], options: argparse.Namespace) -> list[Cell]:
    """All cells of one torch; without a build there is nothing to try."""
    cells = []
    folder = Path(tempfile.mkdtemp(prefix=f"eagercache-matrix-{torch}-"))
    try:
        begun, python = first(torch, options, folder)
        if begun is not None:
            cells.append(show(begun))
            if not begun.ok:
                return cells
        for name in names:
            command = [str(python), "-m", "matrix.cells", name, str(folder)]
            cells.append(show(attempt(torch, name, command, found=r"^SAW (.*)$")))
        if options.tests:
            cells.append(show(smoke(torch, python)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return cells


def show(cell: Cell) -> Cell:
    """One line as soon as it is known; the table comes at the end."""
    verdict = "ok" if cell.ok else "NO"
    what = f"torch {cell.torch:8} Python {cell.python:5} {cell.name:12}"
    print(f"{what} {verdict} {cell.seconds:6.0f} s  {cell.said}", flush=True)
    return cell


def table(cells: list[Cell]) -> str:
    """Markdown: a row for each torch and Python, a column for each thing; reasons stand below."""
    names = list(dict.fromkeys(cell.name for cell in cells))
    lines = [
        "| torch | Python | " + " | ".join(names) + " |",
        "| --- |" + " --- |" * (1 + len(names)),
    ]
    for torch, python in dict.fromkeys((cell.torch, cell.python) for cell in cells):
        found = {cell.name: cell for cell in cells if (cell.torch, cell.python) == (torch, python)}
        words = [("ok" if found[n].ok else "no") if n in found else "not run" for n in names]
        lines.append(f"| {torch} | {python} | " + " | ".join(words) + " |")
    wrong = [f"- torch {c.torch}, Python {c.python}, {c.name}: {c.said}" for c in cells if not c.ok]
    return "\n".join([*lines, *([""] if wrong else []), *wrong])


def chosen(text: str, known: list[str], what: str) -> list[str]:
    """The words of an option, each of which has to be one of the known."""
    words = [word.strip() for word in text.split(",") if word.strip()] or known
    for word in words:
        if word not in known:
            raise SystemExit(f"{word}: no {what}; there are {', '.join(known)}")
    return words


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="make matrix")
    parser.add_argument(
        "--torch", default="", help="releases of the table, with commas; all of them"
    )
    parser.add_argument("--only", default="", help=f"of {', '.join(CELLS)}; all of them")
    parser.add_argument("--tests", action="store_true", help="the smoke test, too: minutes a torch")
    parser.add_argument("--no-build", action="store_true", help="take the trees as they are")
    parser.add_argument("--wheel", type=Path, help="is installed and tried; nothing is built")
    parser.add_argument("--also", type=Path, action="append", default=[], help="another's --json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path, help="a file for the table")
    options = parser.parse_args()
    versions = chosen(
        options.torch, [tried.torch for tried in torch_versions.TRIED], "torch of the table"
    )
    names = chosen(options.only, list(CELLS), "such column")
    if options.wheel:
        options.wheel = options.wheel.resolve(strict=True)
    cells = [cell for torch in versions for cell in row(torch, names, options)]
    cells += [Cell(**cell) for path in options.also for cell in json.loads(path.read_text("utf-8"))]
    text = table(cells)
    print(f"\n{text}")
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    if options.output:
        options.output.write_text(text + "\n")
    sys.exit(not all(cell.ok for cell in cells))


if __name__ == "__main__":
    main()
