"""The Dockerfile of two stages, line by line, in file systems of its own: the second has no g++.

Each stage is an overlay of this machine's files in a namespace of mounts, so that no daemon and no
image is needed. That takes the right to mount (root, as CI has it).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import eagercache
import pytest
from click.testing import CliRunner
from conftest import clean_environment
from eagercache.cli import main as cli

pytestmark = pytest.mark.once

DOCKERFILE = Path(__file__).parents[3] / "examples" / "two_stages" / "Dockerfile"
COMPILERS = r"(.*-)?(g\+\+|gcc|c\+\+|cc|clang|clang\+\+|as|ld|nvcc|ptxas)(-[0-9.]+)?"
PROGRAM = """
import shutil, torch, eagercache
x = torch.randn(64, 96)
for _ in range(5):
    torch.var(x, -1)
s = eagercache.stats()
found = [name for name in ("g++", "gcc", "cc", "as", "ld") if shutil.which(name)]
print("SERVED", s.hits, s.compiles, found)
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(name, rest) of each instruction."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def script_of(text: str, context: Path, secret: Path) -> str:
    """A script for `unshare --mount`, which does what the Dockerfile's text says, and runs it."""
    lines = ["set -eu", "umask 022", f"cd {shlex.quote(str(context))}", "mkdir layers"]
    lines += ["mount -t tmpfs layers layers"]
    stage, environment, command = -1, dict[str, str](), ""
    names: dict[str, int] = {}

    def in_stage(words: str) -> str:
        variables = shlex.join(f"{name}={value}" for name, value in environment.items())
        return f"chroot layers/{stage}/m env {variables} sh -c {shlex.quote(words)}"

    for name, rest in instructions(text):
        if name == "FROM":
            stage, environment = stage + 1, {}
            names[rest.partition(" AS ")[2]] = stage
            at = f"layers/{stage}"
            lines += [f"mkdir -p {at}/u {at}/w {at}/m"]
            options = f"lowerdir=/,upperdir={at}/u,workdir={at}/w"
            lines += [f"mount -t overlay overlay -o {options} {at}/m"]
            lines += [f"mount --rbind /dev {at}/m/dev", f"mount -t proc proc {at}/m/proc"]
            if rest == "your/image":
                found = f"find {at}/m/usr/bin {at}/m/usr/local/bin -regextype posix-extended"
                lines += [f"{found} -regex {shlex.quote('.*/' + COMPILERS)} -delete"]
        elif name == "COPY":
            *sources, target = rest.split()
            origin = "."
            if sources[0].startswith("--from="):
                origin = f"layers/{names[sources.pop(0).removeprefix('--from=')]}/m"
            lines += [f"mkdir -p layers/{stage}/m/{target}"]
            lines += [f"cp {origin}/{source} layers/{stage}/m/{target}" for source in sources]
        elif name == "RUN":
            mounted, _, words = rest.rpartition("--mount=type=secret,id=fleet ")
            assert not mounted
            where = f"layers/{stage}/m/run/secrets"
            if words != rest:
                lines += [f"mkdir -p {where}", f"cp -p {shlex.quote(str(secret))} {where}/fleet"]
            lines += [in_stage(words), f"rm -rf {where}"]
        elif name == "ENV":
            variable, _, value = rest.partition("=")
            environment[variable] = value
        else:
            assert name == "CMD", name
            command = in_stage(shlex.join(json.loads(rest)))
    return "\n".join([*lines, command, ""])


def test_kernels_of_the_first_stage_answer_in_the_second_without_a_compiler(
    tmp_path: Path,
) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--mount", "true"], check=False).returncode:
        pytest.skip("NOT RUN: no file systems of one's own can be mounted here")
    (tmp_path / "serve.py").write_text(PROGRAM)
    programs = tmp_path / "bin"
    programs.mkdir()
    shim = programs / "eagercache"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m eagercache "$@"\n')
    shim.chmod(0o755)
    variables = clean_environment(
        PATH=f"{programs}:{os.environ['PATH']}",
        PYTHONPATH=str(Path(eagercache.__file__).parents[1]),
        HOME=str(tmp_path),
        EAGERCACHE_DIR=str(tmp_path / "recorded"),
        EAGERCACHE_CHOOSE="always",  # a busy machine decides nothing by time
    )
    (tmp_path / "recorded").mkdir(mode=0o700)
    made = CliRunner().invoke(cli.main, ["bundle", "keygen", str(tmp_path / "fleet")])
    assert made.exit_code == 0, made.output
    words = [str(shim), "record", "serve.trace", "--", "serve.py"]
    subprocess.run(words, cwd=tmp_path, env=variables, check=True, timeout=120)
    script = tmp_path / "build.sh"
    text = DOCKERFILE.read_text()
    script.write_text(script_of(text, tmp_path, tmp_path / "fleet.pem"))
    built = subprocess.run(
        [unshare, "--mount", "--propagation", "private", "sh", str(script)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    served = next(line for line in built.stdout.splitlines() if line.startswith("SERVED"))
    assert served == "SERVED 5 0 []", built.stdout + built.stderr


def test_the_page_has_the_same_file() -> None:
    page = DOCKERFILE.parents[2] / "docs" / "how-to" / "deploy-without-a-compiler.md"
    said = list(instructions(DOCKERFILE.read_text()))
    assert [*instructions(page.read_text().split("```text\n")[1].split("```")[0])] == said
