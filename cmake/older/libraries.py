"""Makes libraries to link against that have of this system's only what an older system has, too.

python libraries.py --cxx COMPILER --output FOLDER

A program that is linked here asks for the newest version of each symbol of libc and libstdc++, and
so for a system as new as this one. For each of these libraries this writes one of the same name
and soname that holds no code: of each symbol the newest version that the policy manylinux_2_28
lets a wheel ask for. What is linked against them can ask for nothing newer: what has no older
version is undefined, which ends the link (older_system.cc has what there is of that kind in libc;
libstdc++'s own archive has the rest).
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

# The newest of each family in manylinux_2_28, as auditwheel has it. What is of no family here is
# left out.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# As the linker's -lNAME, and in the order in which they are searched.
LIBRARIES = {
    "stdc++": "libstdc++.so.6",
    "m": "libm.so.6",
    "gcc_s": "libgcc_s.so.1",
    "c": "libc.so.6",
    "ld-linux": "ld-linux-x86-64.so.2",
}
KINDS = {"FUNC": "@function", "IFUNC": "@function", "OBJECT": "@object", "TLS": "@tls_object"}
KINDS["NOTYPE"] = KINDS["UNIQUE"] = "@object"


class Symbol(NamedTuple):
    """A symbol of a library at one of its versions."""

    name: str
    kind: str
    family: str
    version: tuple[int, ...]

    @property
    def label(self) -> str:
        """As it is written: "GLIBC_2.2.5"."""
        return f"{self.family}_{'.'.join(map(str, self.version))}"


def exported(library: Path) -> list[Symbol]:
    """Of what a library exports, that which an older system has."""
    command = ["readelf", "--wide", "--dyn-syms", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pattern = (
        r"^ *\d+: [0-9a-f]+ +\S+ (\w+) +(?:GLOBAL|WEAK|UNIQUE) +\w+ +\d+ "
        r"(\S+?)@@?([A-Z]+)_([\d.]+)$"
    )
    symbols = [
        Symbol(name, kind, family, tuple(int(part) for part in version.split(".")))
        for kind, name, family, version in re.findall(pattern, text, re.MULTILINE)
    ]
    return [symbol for symbol in symbols if symbol.version <= NEWEST.get(symbol.family, ())]


def assembly(symbols: list[Symbol]) -> str:
    """A source that defines each of them once, at the newest of its versions that are left."""
    newest: dict[str, Symbol] = {}
    for symbol in sorted(symbols, key=lambda each: each.version):
        newest[symbol.name] = symbol
    lines = []
    for number, symbol in enumerate(newest.values()):
        thread = symbol.kind == "TLS"
        lines += [
            '.section .tbss,"awT",@nobits' if thread else ".data",
            f".globl s{number}",
            f".type s{number}, {KINDS[symbol.kind]}",
            f".size s{number}, 8",
            f".symver s{number}, {symbol.name}@@{symbol.label}, remove",
            f"s{number}: .zero 8",
        ]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def versions(symbols: list[Symbol]) -> str:
    """The linker's version script: each label, with nothing of its own in it."""
    labels = sorted({symbol.label for symbol in symbols})
    return "".join(f"{label} {{ }};\n" for label in labels)


def make(compiler: str, name: str, soname: str, folder: Path) -> int:
    """One library; how many symbols it has."""
    command = [compiler, f"-print-file-name={soname}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    symbols = exported(Path(found))
    source, script = folder / f"{name}.s", folder / f"{name}.versions"
    source.write_text(assembly(symbols))
    script.write_text(versions(symbols))
    target = ["-o", str(folder / f"lib{name}.so"), f"-Wl,-soname,{soname}"]
    flags = ["-shared", "-nostdlib", f"-Wl,--version-script={script}"]
    subprocess.run([compiler, *flags, *target, str(source)], check=True)
    return len(symbols)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name, soname in LIBRARIES.items():
        print(soname, make(options.cxx, name, soname, options.output), "symbols")


if __name__ == "__main__":
    main()
