"""Whether a wheel asks of a system only what its platform tag lets it: the exit status says so.

python scripts/parts/audit_wheel.py --auditwheel PROGRAM WHEEL

auditwheel says which tag the versions of symbols allow, and which libraries are needed from
elsewhere: those may be torch's, which the metadata requires, and no others. It does not see a
symbol that is asked for without a version; of these none may be one that libraries of the system
have.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

TORCH = re.compile(r"lib(torch|torch_cpu|torch_python|c10)\.so")
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libcrypto.so.3")
# Asked for without a version by everything that g++ links, and not missed where they are not.
WEAK = re.compile(r"_ITM_\w+|__gmon_start__|__cxa_finalize")


def symbols(library: Path) -> Iterator[tuple[bool, str]]:
    """Of each dynamic symbol, whether it is defined there, and its name with its version."""
    command = ["readelf", "--wide", "--dyn-syms", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for place, name in re.findall(
        r"^ *\d+: [0-9a-f]+ +\S+ \w+ +(?:GLOBAL|WEAK|UNIQUE) +\w+ +(\w+) (\S+)", text, re.MULTILINE
    ):
        yield place != "UND", name


def of_the_system() -> set[str]:
    """What the libraries of the system export, by name."""
    names: set[str] = set()
    for soname in SYSTEM:
        command = ["g++", f"-print-file-name={soname}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if Path(found).is_file():
            names |= {name.split("@")[0] for defined, name in symbols(Path(found)) if defined}
    return names


def unversioned(library: Path, known: set[str]) -> list[str]:
    """What a library asks the system for in whatever version it has."""
    asked = [name for defined, name in symbols(library) if not defined]
    return [name for name in asked if "@" not in name and name in known and not WEAK.match(name)]


def problems(wheel: Path, auditwheel: str) -> list[str]:
    """What speaks against the tag in the wheel's name."""
    platform = wheel.stem.rpartition("-")[2]
    command = [auditwheel, "show", "--json", str(wheel)]
    said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    print(json.dumps(said))
    found = []
    if _age(said["sym_tag"]) > _age(platform):
        found.append(f"its symbols are those of {said['sym_tag']}: {said['versioned_symbols']}")
    if said["unsupported_isa"]:
        found.append("it has instructions that not every processor of the platform has")
    others = [name for name in said["external_libs"] if not TORCH.fullmatch(name)]
    if others:
        found.append(f"it needs {', '.join(sorted(others))}")
    known = of_the_system()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                asked = unversioned(Path(archive.extract(name, folder)), known)
                found += [f"{name} asks for any {symbol}" for symbol in asked]
    return found


def _age(tag: str) -> tuple[int, ...]:
    """Tags by the libc that they stand for; one that stands for none comes last."""
    numbers = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    return (int(numbers[1]), int(numbers[2])) if numbers else (sys.maxsize,)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--auditwheel", required=True, help="the program")
    parser.add_argument("wheel", type=Path)
    options = parser.parse_args()
    found = problems(options.wheel, options.auditwheel)
    sys.exit("\n".join(["audit_wheel:", *found]) if found else 0)


if __name__ == "__main__":
    main()
