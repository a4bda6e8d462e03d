"""Settings from the environment: one table, which also makes the documentation page."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

# Set in the environment of compile workers: there nothing is enabled, or a kernel would be
# compiled to compile a kernel.
WORKER_VARIABLE = "EAGERCACHE_INSIDE_WORKER"

# The choices of `enable()`; editors and type checkers read them.
OnMiss = Literal["background", "wait", "native"]
Choose = Literal["faster", "always"]
Numerics = Literal["accurate", "bitwise"]
Search = Literal["off", "quick", "deep"]
Device = Literal["cpu", "cuda"]
DispatchKey = Literal["CPU", "CUDA"]
# What is said of calls and modules, in what `explain()`, `kernels()` and the like give.
Decision = Literal["kernel", "native", "failed"]
Outcome = Literal["hit", "native", "aside", "miss"]
ModuleState = Literal["watched", "new", "refused"]
Proved = Literal["accurate", "bitwise", ""]
ON_MISS: tuple[OnMiss, ...] = get_args(OnMiss)
CHOOSE: tuple[Choose, ...] = get_args(Choose)
NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
SEARCH: tuple[Search, ...] = get_args(Search)
LOG_LEVELS = {"off": 0, "warning": 1, "info": 2, "debug": 3}


_LONGEST_WAIT = 1e6
_LARGEST_COUNT = 1_000_000
_LARGEST_SIZE = 1 << 62  # what the core counts bytes in has a bit more


class BadValue(ValueError):
    """A setting's text cannot be read; the message says what would be right."""


def _choice(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise BadValue(f"use one of {', '.join(allowed)}")
        return text

    return parse


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("", "0", "false", "no", "off"):
        return False
    if lowered in ("1", "true", "yes", "on"):
        return True
    raise BadValue("use 1 or 0")


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(path) for path in text.split(os.pathsep) if path)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise BadValue("use a number from 0 to 1")
    return share


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.replace(",", " ").split() if name)


def _command(text: str) -> str:
    # Compile workers are in another folder.
    return os.path.abspath(text) if os.sep in text and " " not in text else text  # noqa: PTH100


def parse_size(text: str) -> int:
    """Bytes of "500M", "1.5G" or "4096"; raises BadValue for anything else."""
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    lowered = text.strip().lower().removesuffix("b").removesuffix("i")
    number, unit = lowered.rstrip("kmgt"), lowered[len(lowered.rstrip("kmgt")) :]
    try:
        value = float(number) * units[unit]
    except (KeyError, ValueError) as error:
        raise BadValue("use a number of bytes such as 500M or 10G") from error
    if not 0 <= value < _LARGEST_SIZE:  # and no NaN
        raise BadValue("use a number of bytes that is not negative, and less than 2^62")
    return int(value)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise BadValue("use a whole number") from error
    if not 0 <= value <= _LARGEST_COUNT:
        raise BadValue(f"use a number from 0 to {_LARGEST_COUNT}")
    return value


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= _LONGEST_WAIT:
        raise BadValue(f"use a number of seconds from 0 to {_LONGEST_WAIT:.0f}")
    return seconds


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: the variable's name.
        field: the attribute of `Settings` that it sets.
        parse: turns its text into a value, or raises `BadValue`.
        default: the value when the variable is not set.
        help: one sentence for the documentation.
    """

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Any
    help: str


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "EAGERCACHE_DIR",
        "directory",
        Path,
        None,
        "Where kernels and decisions are kept. Must belong to you and be writable by you alone. "
        "By default `$XDG_CACHE_HOME/eagercache` or `~/.cache/eagercache`; when that is on a "
        "network file system, `/var/tmp/eagercache-UID`.",
    ),
    Variable(
        "EAGERCACHE_DISABLE", "disable", _flag, False, "1: `enable()` and `register()` do nothing."
    ),
    Variable(
        "EAGERCACHE_SKIP",
        "skip",
        _names,
        (),
        "Operators to leave alone, such as `aten::add.Tensor,aten::cat`.",
    ),
    Variable(
        "EAGERCACHE_ON_MISS",
        "on_miss",
        _choice(ON_MISS),
        None,
        "Overrides `enable(on_miss=...)`: background, wait or native.",
    ),
    Variable(
        "EAGERCACHE_WAIT_SECONDS",
        "wait_seconds",
        _seconds,
        600,
        "How long a call waits for its kernel where misses wait. Then it goes on with native's "
        "answer, and until some kernel is done no other call waits. Said once a process.",
    ),
    Variable(
        "EAGERCACHE_NUMERICS",
        "numerics",
        _choice(NUMERICS),
        None,
        "Overrides `enable(numerics=...)`: accurate or bitwise.",
    ),
    Variable(
        "EAGERCACHE_CHOOSE",
        "choose",
        _choice(CHOOSE),
        None,
        "Overrides `enable(choose=...)`: faster or always.",
    ),
    Variable(
        "EAGERCACHE_TRIALS",
        "trials",
        _flag,
        True,
        "Whether a few of the program's own calls on the CPU are timed, by their kernel and by "
        "native in turns: a kernel that loses there goes. 0: what a worker measured stands.",
    ),
    Variable(
        "EAGERCACHE_SEARCH",
        "search",
        _choice(SEARCH),
        "quick",
        "How far other forms of a kernel are looked for on a GPU, where the first is far from the "
        "speed of its memory. quick: behind the program, when the machine is idle. deep: before a "
        "kernel answers for the first time, and for longer. off: not at all.",
    ),
    Variable(
        "EAGERCACHE_MAX_BYTES",
        "max_bytes",
        parse_size,
        10 << 30,
        "Largest size of the store, such as 500M or 10G; past it the longest unused entries go.",
    ),
    Variable(
        "EAGERCACHE_TIERS",
        "tiers",
        _paths,
        (),
        "Stores made elsewhere, such as a layer of a container image, separated by colons. They "
        "are only read: an entry found there is verified and copied into the store, or used in "
        "place where the store cannot be written.",
    ),
    Variable(
        "EAGERCACHE_REMOTE",
        "remote",
        _names,
        (),
        "Remotes that machines share, asked in order before anything is compiled, separated by "
        "spaces or commas: `https://`, `http://`, `s3://`, `gs://`, `az://`, `file://`, `redis://` "
        "or `rediss://` URLs. `enable(remote=...)` goes before.",
    ),
    Variable(
        "EAGERCACHE_REMOTE_TRUST",
        "remote_trust",
        _paths,
        (),
        "Files of public keys, separated by colons: entries of remotes that these keys signed are "
        "used, and no others.",
    ),
    Variable(
        "EAGERCACHE_REMOTE_KEY",
        "remote_key",
        Path,
        None,
        "A file with a private key. What is compiled here is signed with it and sent to the "
        "remotes, and what it signed is used, too.",
    ),
    Variable(
        "EAGERCACHE_REMOTE_RETIME",
        "remote_retime",
        _flag,
        False,
        "1: whether a kernel is faster is measured here, too, where an entry of a remote is of "
        "another kind of processor or GPU. That its values are right is tried at any rate.",
    ),
    Variable(
        "EAGERCACHE_ALLOW_UNTRUSTED",
        "allow_untrusted",
        _flag,
        False,
        "1: use stores that other users may write, who can then run code as you. Said once a "
        "process for each such directory.",
    ),
    Variable(
        "EAGERCACHE_REVOKED",
        "revoked",
        Path,
        None,
        "A list of signing keys, bundles and artifacts that are not to be used any more, one a "
        "line, as `eagercache bundle verify` prints them. A list that cannot be read refuses all.",
    ),
    Variable(
        "EAGERCACHE_METRICS",
        "metrics",
        Path,
        None,
        "A file that gets the counters in Prometheus' text format, each minute and at the end, for "
        "the node exporter's textfile collector. `{pid}` in it is the process's number.",
    ),
    Variable(
        "EAGERCACHE_LOG",
        "log",
        _choice(tuple(LOG_LEVELS)),
        "warning",
        "One line per event on standard error: off, warning, info or debug.",
    ),
    Variable(
        "EAGERCACHE_CXX",
        "cxx",
        _command,
        None,
        "The C++ compiler for kernels; by default CXX, then g++.",
    ),
    Variable(
        "EAGERCACHE_WORKERS",
        "workers",
        _count,
        0,
        "Compile workers of this process; 0: as many as it leaves cores, half of all at most.",
    ),
    Variable(
        "EAGERCACHE_SLOTS",
        "slots",
        _count,
        0,
        "Workers of all your processes on the machine that may compile at the same time; 0 means "
        "half the cores, or EAGERCACHE_WORKERS where that is more.",
    ),
    Variable(
        "EAGERCACHE_LINGER",
        "linger",
        _seconds,
        None,
        "For how many seconds a process may go on, at the lowest priority and while the machine is "
        "idle, with what was being compiled when a program ended. 0: it stays in the store for "
        "`eagercache warm`. By default 600, and 0 under pytest, where `CI` is set, and in a job of "
        "several processes.",
    ),
    Variable(
        "EAGERCACHE_GRAPH_BYTES",
        "graph_bytes",
        parse_size,
        64 << 20,
        "How much of a GPU's memory may be kept for calls of modules that are replayed as CUDA "
        "graphs, such as 64M, besides cuBLAS's workspaces. 0: nothing is replayed.",
    ),
    Variable(
        "EAGERCACHE_VERIFY",
        "verify",
        _share,
        0.0,
        "Share of all hits, from 0 to 1, that native computes too; a kernel that differs is "
        "put aside, and native's answer is returned.",
    ),
)


@dataclass(frozen=True)
class Settings:
    """The environment's settings, with defaults filled in. None: not set."""

    directory: Path | None
    disable: bool
    skip: tuple[str, ...]
    on_miss: str | None
    wait_seconds: float
    numerics: str | None
    choose: str | None
    trials: bool
    search: Search
    max_bytes: int
    tiers: tuple[Path, ...]
    remote: tuple[str, ...]
    remote_trust: tuple[Path, ...]
    remote_key: Path | None
    remote_retime: bool
    allow_untrusted: bool
    revoked: Path | None
    metrics: Path | None
    log: str
    cxx: str | None
    workers: int
    slots: int
    linger: float | None
    graph_bytes: int
    verify: float

    @property
    def revoked_text(self) -> str:
        """The list's absolute path, as the core and workers take it; "": there is none."""
        return str(self.revoked.absolute()) if self.revoked is not None else ""


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads every variable of the table. A malformed one is warned about once and ignored."""
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for variable in VARIABLES:
        text = source.get(variable.name, "")
        values[variable.field] = variable.default
        if text == "":
            continue
        try:
            values[variable.field] = variable.parse(text)
        except BadValue as error:
            warnings.warn(
                f"eagercache: {variable.name}={text!r} is ignored: {error}.",
                RuntimeWarning,
                stacklevel=3,
            )
    return Settings(**values)


def environment_table() -> str:
    """The table of variables as Markdown, for the documentation."""
    lines = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for variable in VARIABLES:
        default = "" if variable.default in (None, (), False, 0) else f"`{variable.default}`"
        lines.append(f"| `{variable.name}` | {default} | {variable.help} |")
    return "\n".join(lines) + "\n"
