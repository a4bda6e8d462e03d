"""The first ten minutes with eagercache, step by step and timed; see scripts/first_ten_minutes.

python scripts/parts/first_ten_minutes.py [WHEEL] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
LIMIT_SECONDS = 600.0
VERSION_SECONDS = 0.2
VERSION_TRIES = 5

# What a new user's program may be: small operators in a loop, for some seconds.
PROGRAM = """
import torch

torch.manual_seed(0)
x = torch.randn(256, 96)
total = 0.0
for step in range(4000):
    y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(torch.var(x, -1, keepdim=True) + 1e-5)
    total += float(torch.nn.functional.smooth_l1_loss(y, x))
print(f"{total:.3f}")
"""


class Failed(Exception):
    """A step did not do what it should; the message is what is said of it."""


@dataclass
class Steps:
    """The environment, and what was done in it.

    Attributes:
        folder: of all that is made.
        done: (what, seconds), in order.
    """

    folder: Path
    done: list[tuple[str, float]] = field(default_factory=list)

    @property
    def python(self) -> str:
        """Of the new environment."""
        return str(self.folder / "venv" / "bin" / "python")

    def run(self, words: list[str], *, limit: float = LIMIT_SECONDS) -> str:
        """What a command prints, on both streams. Raises Failed when it fails."""
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
        if done.returncode != 0:
            tail = "\n".join(done.stdout.splitlines()[-15:])
            raise Failed(f"`{' '.join(words)}` ended with {done.returncode}:\n{tail}")
        return done.stdout

    def environment(self) -> dict[str, str]:
        """As in a new terminal, with the environment's commands first in PATH."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{self.folder / 'venv' / 'bin'}:{kept.get('PATH', '')}"
        return {**kept, "PATH": path, "EAGERCACHE_DIR": str(self.folder / "cache")}

    def take(self, what: str, step: Callable[[], str]) -> None:
        """Does one step; it says in a few words what came of it."""
        began = time.monotonic()
        said = step()
        seconds = time.monotonic() - began
        self.done.append((what, seconds))
        print(f"{seconds:8.2f} s  {what}{f': {said}' if said else ''}", flush=True)


def torch_and_its_own() -> Iterator[str]:
    """Torch and what it requires here, by name; nothing else is in the new environment."""
    left, seen = ["torch"], {"torch"}
    while left:
        name = left.pop()
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield name
        for line in requires:
            requirement, _, marker = line.partition(";")
            found = re.match(r"[A-Za-z0-9._-]+", requirement)
            if found and "extra ==" not in marker and found[0] not in seen:
                seen.add(found[0])
                left.append(found[0])


def make_environment(steps: Steps) -> str:
    """An environment with a link to torch: downloading gigabytes is not what is timed."""
    steps.run([sys.executable, "-m", "venv", str(steps.folder / "venv")])
    question = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(steps.run([steps.python, "-c", question]).strip())
    tops = set()
    for name in torch_and_its_own():
        for file in importlib.metadata.files(name) or []:
            if file.parts[0] not in ("..", "__pycache__"):
                tops.add(
                    Path(str(importlib.metadata.distribution(name).locate_file(file.parts[0])))
                )
    for top in tops:
        target = packages / top.name
        if not target.exists() and top.exists():
            target.symlink_to(top)
    return f"torch {importlib.metadata.version('torch')} and what it requires"


def build_wheel(steps: Steps) -> str:
    """A wheel of the sources, with the build requirements of this environment."""
    words = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*words, str(steps.folder / "dist"), str(ROOT)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(f"no wheel could be built:\n{done.stderr[-2000:]}")
    return next((steps.folder / "dist").glob("*.whl")).name


def install(steps: Steps, wheel: Path) -> str:
    """With the plain command."""
    steps.run([steps.python, "-m", "pip", "install", "--disable-pip-version-check", str(wheel)])
    return f"pip install {wheel.name}"


def version(steps: Steps) -> str:
    """Several times: the quickest is not slowed down by what else the machine does."""
    words, times = [str(steps.folder / "venv" / "bin" / "eagercache"), "--version"], []
    said = ""
    for _ in range(VERSION_TRIES):
        began = time.monotonic()
        said = steps.run(words).strip()
        times.append(time.monotonic() - began)
    if min(times) > VERSION_SECONDS:
        raise Failed(f"eagercache --version took {min(times):.2f} s, more than {VERSION_SECONDS}")
    return f"{said} ({min(times) * 1e3:.0f} ms at best)"


def help_of_module(steps: Steps) -> str:
    """`python -m eagercache` alone."""
    done = subprocess.run(
        [steps.python, "-m", "eagercache"],
        env=steps.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if "Commands:" not in done.stdout + done.stderr:
        raise Failed(f"python -m eagercache says no commands:\n{done.stdout}{done.stderr}")
    return "lists the commands"


def readme(steps: Steps) -> str:
    """README's first snippet, pasted."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    (steps.folder / "pasted.py").write_text(found[1])
    said = steps.run([steps.python, "pasted.py"]).strip().splitlines()
    if not said:
        raise Failed("README's first snippet printed nothing")
    return said[-1]


def reported(steps: Steps, words: tuple[str, ...] = ()) -> str:
    """`eagercache run --report`: the page is there, and what the program prints."""
    said = steps.run(["eagercache", "run", "--report", *words, "program.py"])
    pages = list(steps.folder.glob("eagercache-report-program-*.html"))
    if not pages:
        raise Failed(f"there is no page:\n{said}")
    return next((line for line in said.splitlines() if line.startswith("saved: ")), "")


def last_line(steps: Steps, words: list[str]) -> str:
    """What a command says last."""
    said = [line for line in steps.run(words).splitlines() if line.strip()]
    return said[-1].strip()[:100] if said else ""


def all_steps(steps: Steps, wheel: Path | None) -> None:
    """Takes them."""
    (steps.folder / "program.py").write_text(PROGRAM)
    if wheel is None:
        steps.take("build a wheel from the sources", lambda: build_wheel(steps))
        wheel = next((steps.folder / "dist").glob("*.whl"))
    found = wheel
    steps.take("an environment with torch alone", lambda: make_environment(steps))
    began = time.monotonic()
    steps.take("install", lambda: install(steps, found))
    steps.take(f"eagercache --version, {VERSION_TRIES} times", lambda: version(steps))
    steps.take("python -m eagercache", lambda: help_of_module(steps))
    steps.take("eagercache doctor", lambda: last_line(steps, ["eagercache", "doctor"]))
    steps.take("the README's first snippet", lambda: readme(steps))
    program = ["program.py"]
    steps.take(
        "eagercache estimate", lambda: last_line(steps, ["eagercache", "estimate", *program])
    )
    steps.take("eagercache run --report, first time", lambda: reported(steps))
    record = ["eagercache", "record", "trace", "--", *program]
    steps.take("eagercache record", lambda: last_line(steps, record))
    steps.take("eagercache warm", lambda: last_line(steps, ["eagercache", "warm", "trace"]))
    steps.take("eagercache run --report, kernels made", lambda: reported(steps))
    compare = ["eagercache", "compare", "--runs", "2", *program]
    steps.take("eagercache compare, two pairs", lambda: last_line(steps, compare))
    seconds = time.monotonic() - began
    print(f"{seconds:8.2f} s  all of it, from the installation on")
    if seconds > LIMIT_SECONDS:
        raise Failed(f"that is more than {LIMIT_SECONDS / 60:.0f} minutes")


def main() -> int:
    """Runs all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", nargs="?", type=Path, help="what to install; built if not given")
    parser.add_argument("--json", type=Path, help="where to write the seconds of each step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagercache-first-") as folder:
        steps = Steps(Path(folder))
        try:
            all_steps(steps, arguments.wheel and arguments.wheel.absolute())
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        finally:
            if arguments.json:
                arguments.json.write_text(json.dumps(dict(steps.done), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
