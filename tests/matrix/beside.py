"""Installs a wheel beside a torch that is there: `python -m matrix.beside PYTHON FOLDER WHEEL`.

FOLDER becomes an environment that sees the packages of PYTHON's, torch among them, and nothing of
eagercache. pip has no compiler and no network there, and checks what the wheel requires, so that
its metadata has to admit this torch. What is printed is how long that took, and when the first
call was answered by a kernel, counted from the beginning of the installation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

FIRST_HIT = """
import eagercache, torch
x = torch.randn(64, 96)
with eagercache.enable(["var.correction"], on_miss="wait", choose="always", cache_dir="first"):
    while eagercache.stats().hits == 0:
        torch.var(x, -1)
print(eagercache.__file__)
"""


def packages_of(python: Path) -> Path:
    """Where an interpreter has its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def link_packages(source: Path, target: Path) -> None:
    """One by one: a .pth file would bring the development tree's package with it."""
    for entry in source.iterdir():
        of_ours = entry.name.startswith(("eagercache", "_eagercache"))
        of_pip = entry.name == "pip" or entry.name.startswith("pip-")
        if of_ours or of_pip or entry.suffix == ".pth" or entry.name == "__pycache__":
            continue
        # A new environment of an old Python has setuptools of its own.
        if not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)


def main() -> None:
    """The command line."""
    python, folder, wheel = (Path(word).absolute() for word in sys.argv[1:])
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([str(python), "-m", "venv", str(folder)], check=True)
    own = folder / "bin" / "python"
    link_packages(packages_of(python), packages_of(own))
    began = time.monotonic()
    command = [str(own), "-m", "pip", "install", "--disable-pip-version-check", str(wheel)]
    subprocess.run(command, env={**os.environ, "PATH": "/nowhere", "PIP_NO_INDEX": "1"}, check=True)
    seconds = time.monotonic() - began
    # The first kernel is compiled: there has to be a compiler from here on.
    done = subprocess.run(
        [str(own), "-c", FIRST_HIT], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    hit = time.monotonic() - began
    assert Path(done.stdout.strip()).is_relative_to(folder), done.stdout
    size = wheel.stat().st_size / 1e6
    print(f"SAW {size:.1f} MB, installed in {seconds:.1f} s, first hit after {hit:.1f} s")


if __name__ == "__main__":
    main()
