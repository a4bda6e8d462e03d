"""The C++ compiler, the instruction set and the flags that kernels are built with.

Nothing here imports torch: the environment key needs all of it before anything is compiled, and
within milliseconds. The instruction set comes from the processor's own feature list; Inductor's
probing (ten compiler runs, each starting a Python that imports torch) costs half a minute and is
never used.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eagercache.base.facts import Facts

MINIMUM_GCC = 12

# Words that stand before the compiler in CXX and only pass it on. Folders of links to them, named
# as compilers are, come before the compilers' own on many a PATH (/usr/lib64/ccache on Fedora).
_LAUNCHERS = frozenset({"ccache", "sccache", "distcc", "icecc"})

_BASELINE = ("sse", "sse2")
_LEVEL_2 = (*_BASELINE, "popcnt", "sse3", "sse4_1", "sse4_2", "ssse3")
_LEVEL_3 = (*_LEVEL_2, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_LEVEL_4 = (*_LEVEL_3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")


class ToolchainError(RuntimeError):
    """No usable compiler. The text names what was found and the remedy."""


@dataclass(frozen=True)
class Isa:
    """One instruction set that kernels may be generated for.

    ``march`` is an explicit micro-architecture level, never ``native``: what the code uses is
    exactly ``features``, in the names of ``_C.host_cpu_features()``.
    """

    name: str
    march: str
    features: tuple[str, ...]


AVX512 = Isa("avx512", "x86-64-v4", tuple(sorted(_LEVEL_4)))
AVX2 = Isa("avx2", "x86-64-v3", tuple(sorted(_LEVEL_3)))
SCALAR = Isa("scalar", "x86-64", tuple(sorted(_BASELINE)))


def pick_isa(host_features: Collection[str]) -> Isa:
    """The widest instruction set whose every feature the host has."""
    available = frozenset(host_features)
    for isa in (AVX512, AVX2):
        if available.issuperset(isa.features):
            return isa
    return SCALAR


@dataclass(frozen=True)
class Compiler:
    """A g++ that was asked who it is."""

    path: str  # real and absolute
    version: str  # the version line, as printed
    major: int
    target: str
    configuration: str  # hash of how it was configured, default options included


def find_compiler(
    explicit: str | None = None,
    environ: Mapping[str, str] | None = None,
    facts: Facts | None = None,
) -> Compiler:
    """The compiler: ``explicit`` (EAGERCACHE_CXX), else CXX, else ``g++``.

    Runs it, unless ``facts`` know what it says.

    Raises ToolchainError when it is missing, is not g++, or is older than MINIMUM_GCC.
    """
    environ = os.environ if environ is None else environ
    if explicit:
        source, command = "EAGERCACHE_CXX", explicit
    elif environ.get("CXX"):
        source, command = "CXX", environ["CXX"]
    else:
        source, command = "PATH", "g++"
    words = [word for word in _split(command) if Path(word).name not in _LAUNCHERS]
    if len(words) != 1:
        raise ToolchainError(
            f"{source}={command!r} is not the name of one compiler; "
            "set EAGERCACHE_CXX to the path of g++"
        )
    found = _behind_launchers(words[0], _search_path(environ))
    if found is None:
        raise ToolchainError(
            f"no C++ compiler: {words[0]!r} (from {source}) is not on PATH; "
            f"install g++ {MINIMUM_GCC} or newer, or set EAGERCACHE_CXX to one"
        )
    real = Path(found).resolve()
    status = real.stat()

    def ask() -> dict[str, str | int]:
        return asdict(_ask(str(real), status.st_mtime_ns, status.st_size, source))

    # A script may call whatever compiler there is: its content does not say which.
    if facts is None or not _is_program(real):
        return Compiler(**ask())  # type: ignore[arg-type]
    return Compiler(**facts.recall("compiler", [real], ask))


def _behind_launchers(name: str, path: str) -> str | None:
    """The first program of this name that is no link to one of _LAUNCHERS.

    A launcher tells by the name that it is called by what to start, and a compiler's real path is
    asked for and started: under its own name a launcher is no compiler.
    """
    given = shutil.which(name, path=path)
    if given is None or Path(given).resolve().name not in _LAUNCHERS:
        return given
    folders = path.split(os.pathsep)
    found = (shutil.which(Path(name).name, path=folder) for folder in folders)
    return next((f for f in found if f and Path(f).resolve().name not in _LAUNCHERS), None)


def _search_path(environ: Mapping[str, str]) -> str:
    """PATH, where compilers are looked for, without the entries that are empty.

    They mean the current folder, mostly by mistake: what lies there would be run unasked. Workers
    have the same path (`worker_process.worker_environment`).
    """
    return os.pathsep.join(filter(None, environ.get("PATH", os.defpath).split(os.pathsep)))


def _split(command: str) -> list[str]:
    if command.isalnum() or command == "g++":
        return [command]
    import shlex

    return shlex.split(command)


def _is_program(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


@functools.lru_cache(maxsize=8)
def _ask(path: str, _mtime: int, _size: int, source: str) -> Compiler:
    import subprocess

    try:
        done = subprocess.run(
            [path, "-v"],
            capture_output=True,
            check=True,
            env={"LC_ALL": "C", "PATH": _search_path(os.environ)},
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(
            f"the C++ compiler {path} (from {source}) does not run: {error}"
        ) from error
    text = done.stderr
    version = re.search(r"^gcc version (\d+)\..*$", text, re.MULTILINE)
    if version is None:
        raise ToolchainError(
            f"the C++ compiler {path} (from {source}) is not g++; "
            f"set EAGERCACHE_CXX to g++ {MINIMUM_GCC} or newer"
        )
    major = int(version[1])
    if major < MINIMUM_GCC:
        raise ToolchainError(
            f"the C++ compiler {path} (from {source}) is g++ {major}; "
            f"eagercache needs {MINIMUM_GCC} or newer: set EAGERCACHE_CXX to one"
        )
    target = re.search(r"^Target: (\S+)$", text, re.MULTILINE)
    configured = re.search(r"^Configured with: (.*)$", text, re.MULTILINE)
    return Compiler(
        path=path,
        version=version[0],
        major=major,
        target=target[1] if target else "unknown",
        configuration=_short_hash((configured[1] if configured else "").encode()),
    )


def binutils_digests(
    environ: Mapping[str, str] | None = None, facts: Facts | None = None
) -> dict[str, str]:
    """Content hashes of the assembler and the linker; "missing" for one that is not on PATH."""
    path = _search_path(os.environ if environ is None else environ)
    facts = facts or Facts()
    digests = {}
    for tool in ("as", "ld"):
        found = shutil.which(tool, path=path)
        digests[tool] = "missing"
        if found:
            digests[tool] = facts.recall("sha256", [found], functools.partial(_hash_file, found))
    return digests


def _hash_file(path: str) -> str:
    return _short_hash(Path(path).read_bytes())


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


# Rewrites of the flags that Inductor gives the compiler. A whole word is replaced; None drops it.
# -fno-signed-zeros lets the compiler turn -0 into +0, which native never does.
_FLAG_REWRITES: Mapping[str, str | None] = {
    "-fno-signed-zeros": "-fsigned-zeros",
    "-g": None,
    "-g1": None,
    "-pedantic": None,
    "-Wall": None,
}

# Integers wrap in native's code; without this, overflow may do anything in ours.
COMPILE_FLAGS = ("-fwrapv",)

# Added to every command. The prefix map keeps paths out of the bytes, so that equal code is an
# equal file; it needs the build folder and is completed in `rewrite_command`.
LINK_FLAGS = ("-s", "-Wl,--build-id=none", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack")


def flag_facts(isa: Isa) -> str:
    """What `rewrite_command` does to the flags, as text for the environment key."""
    rewrites = " ".join(f"{old}=>{new or ''}" for old, new in sorted(_FLAG_REWRITES.items()))
    return f"-march={isa.march} {rewrites} {' '.join(COMPILE_FLAGS + LINK_FLAGS)}"


def rewrite_command(command: Sequence[str], isa: Isa, build_directory: str) -> list[str]:
    """Inductor's compile or link command with our flags in place of its own.

    ``-march=native`` becomes the explicit level of ``isa``, and so do further ``-m`` flags that
    name instruction sets: what is used is what the environment key says, on every host.
    """
    words: list[str] = []
    for word in command:
        if word.startswith("-march=") or re.fullmatch(r"-m(avx|fma|f16c|amx|sse)\w*", word):
            continue
        rewritten = _FLAG_REWRITES.get(word, word)
        if rewritten is not None:
            words.append(rewritten)
    words.append(f"-march={isa.march}")
    words.append(f"-ffile-prefix-map={build_directory}=.")
    words.extend(COMPILE_FLAGS if "-c" in words else LINK_FLAGS)
    return words
