"""Programs with one module each, which reads the world around it in a known way.

A source (worlds/*.txt) says where a value comes from and how it is changed, a use what the forward
does with it. A world is a Python file with one or several sources, each with a use.

The text of a source, in which N stands for the number of its place in the world:

    == its name
    statements of the file
    -- read: the expression with which the forward gets the value (2.0, unless start says another)
    -- do: statements of the forward on `y`, instead of read
    -- init: statements of the module's constructor
    -- body (and lines): of its class
    -- bases: of its class
    -- setup (and lines): statements of the file
    -- set: a statement that gives VALUE to the place
    -- start, -- values: what it has, and what it is given; otherwise those of the kind
    -- kind: float, tensor or dtype
    -- also: another change // what takes it back; `self` is the module
    -- around: a context in which the module is called, as a change
    -- state: an expression that is compared after each call
    -- alone: it cannot stand beside others, or twice
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

FOLDER = Path(__file__).parent / "worlds"

# What the forward does with a float `v`, to `y` of 4 rows of 8.
USES = {
    "scale": "y = y * v",
    "add": "y = y + v",
    "power": "y = (y * y + 1.0) ** v",
    "branch": "y = y.relu() if v > 1.5 and v < 2.5 else y.sigmoid()",
    "truth": "y = y * 2.0 if v else y - 1.0",
    "equal": "y = y * 2.0 if v == 2.0 else y - 1.0",
    "none": "y = y * 2.0 if v is None else y * v",
    "type": "y = y * 2.0 if isinstance(v, float) else y - 1.0",
    "text": "y = y * len(str(v))",
    "shape": "y = y.reshape(int(v), -1).cumsum(1).reshape(4, 8)",
    "index": "y = y + y[:, int(v)].unsqueeze(1)",
    "slice": "y = y + y[:, : int(v)].sum(1, keepdim=True)",
    "dimension": "y = y + y.sum(int(v) - 2, keepdim=True)",
    "choice": "y = (torch.relu, torch.sigmoid, torch.tanh, torch.sin)[int(v)](y)",
    "name": "y = getattr(torch, {2.0: 'tanh', 1.0: 'relu'}.get(v, 'sin'))(y)",
    "loop": "for _ in range(min(int(v), 5)): y = y.sin() + 0.1",
    "tensor": "y = y * torch.full((8,), v)",
    "compared": "y = torch.where(y > v - 2.0, y, y * 0.5)",
    "list": "y = y * sum([v, 1.0])",
    "keyword": "y = F.leaky_relu(y, negative_slope=v)",
}
TENSOR_USES = {
    "scale": "y = y * v",
    "add": "y = y + v",
    "matmul": "y = y + (y @ v).unsqueeze(1)",
    "norm": "y = F.layer_norm(y, (8,), v)",
    "where": "y = torch.where(v > 2.5, y, y * 0.5)",
}
DTYPE_USES = {
    "to": "y = y.to(v).float()",
    "sum": "y = y + y.sum(dtype=v).float()",
    "full": "y = y + torch.ones(8, dtype=v)",
}
KINDS = {"float": USES, "tensor": TENSOR_USES, "dtype": DTYPE_USES}

_START = {"float": "2.0", "tensor": "torch.full((8,), 2.0)", "dtype": "torch.float32"}
_FLOATS = (
    *("3.0", "1.0", "0.0", "2", "3", "True", "None", "'2.0'", "2.5", "-1.0", "float('nan')"),
    *("torch.tensor(3.0)", "__import__('numpy').float64(3.0)", "(2.0,)", "1e30", "2.0000000001"),
    "__import__('fractions').Fraction(3)",
)
_TENSORS = (
    *("torch.full((8,), 3.0)", "torch.arange(8.0)", "torch.full((1,), 3.0)", "3.0", "None"),
    *("torch.full((8,), 3.0, dtype=torch.float64)", "torch.arange(8)", "torch.ones(9)"),
)
_DTYPES = ("torch.float64", "torch.bfloat16", "torch.int32", "None", "float")
_VALUES = {"float": _FLOATS, "tensor": _TENSORS, "dtype": _DTYPES}

_PROGRAM = '''"""A world of the fuzzer: {about}."""

import torch
import torch.nn.functional as F
from torch import nn

{setup}


class World({bases}nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
{init}
{body}
    def forward(self, x):
        y = self.out(self.dense(x).tanh() + 0.5)
{forward}
        return y
'''


@dataclass(frozen=True)
class Change:
    """One change of a world.

    Attributes:
        source: whose value it changes.
        do: the statements, or the context of the call.
        undo: the statements that take it back; "" for a context.
    """

    source: str
    do: str
    undo: str


@dataclass
class Source:
    """Where a value comes from."""

    name: str
    setup: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    has: dict[str, list[str]] = field(default_factory=dict)

    def one(self, name: str, otherwise: str = "") -> str:
        """A section of one line."""
        return self.has.get(name, [otherwise])[0]

    @property
    def kind(self) -> str:
        """float, tensor or dtype."""
        return self.one("kind", "float")

    @property
    def alone(self) -> bool:
        """Whether it cannot stand beside others."""
        return "alone" in self.has

    def changes(self) -> list[Change]:
        """All of them."""
        made = []
        place, start = self.one("set"), self.one("start", _START[self.kind])
        given = self.one("values")
        values = re.split(r",\s+(?![^(\[{]*[)\]}])", given) if given else _VALUES[self.kind]
        if place:
            made += [
                Change(self.name, _with(place, value), _with(place, start)) for value in values
            ]
        for text in self.has.get("also", []):
            do, _, undo = text.partition(" // ")
            made.append(Change(self.name, do, undo))
        return made + [Change(self.name, text, "") for text in self.has.get("around", [])]


def _with(statement: str, value: str) -> str:
    return re.sub(r"\bVALUE\b", lambda _: value, statement)


def sources(folder: Path = FOLDER) -> list[Source]:
    """All sources, in the order of their files."""
    found: list[Source] = []
    for path in sorted(folder.glob("*.txt")):
        lines: list[str] = []
        for line in path.read_text().splitlines():
            if line.startswith("== "):
                found.append(Source(f"{path.stem}: {line[3:]}"))
                lines = found[-1].setup
            elif line.startswith("-- "):
                name, _, text = line[3:].partition(":")
                lines = found[-1].body if name == "body" else found[-1].setup
                if name not in ("body", "setup"):
                    found[-1].has.setdefault(name, []).append(text.strip())
            elif line and found:
                lines.append(line)
    return found


@dataclass(frozen=True)
class World:
    """A program, and what can be changed in it."""

    about: str
    text: str
    changes: tuple[Change, ...]
    states: tuple[str, ...]
    gradients: bool  # whether its calls need them

    @property
    def name(self) -> str:
        """Of its file, which is the same for the same text."""
        return f"world_{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        changes = [[change.source, change.do, change.undo] for change in self.changes]
        return {**vars(self), "name": self.name, "changes": changes}

    @staticmethod
    def from_json(row: dict[str, Any]) -> World:
        """The inverse of `as_json`."""
        changes = tuple(Change(*change) for change in row["changes"])
        return World(
            row["about"], row["text"], changes, tuple(row["states"]), bool(row["gradients"])
        )


def make(parts: Iterable[tuple[Source, str]], *, gradients: bool = False) -> World:
    """The world of some sources, each with the name of its use."""
    setup, init, body, bases, forward = [], [], [], [], []
    changes, states, about = [], [], []
    for number, (source, use) in enumerate(parts):

        def numbered(text: str, number: int = number) -> str:
            return re.sub(r"(?<=_)N\b|\bN(?=\")|(?<=-)N(?=\")", str(number), text)

        about.append(f"{source.name}, {use}" if use else source.name)
        setup += map(numbered, source.setup)
        body += map(numbered, source.body)
        init += [numbered(text) for text in source.has.get("init", [])]
        bases += [f"{numbered(text)}, " for text in source.has.get("bases", [])]
        done = source.one("do")
        if done:
            forward.append(numbered(done))
        else:
            forward.append(f"v = {numbered(source.one('read'))}")
            forward.append(KINDS[source.kind][use])
        forward.append("y = y.sin()")
        changes += [
            Change(source.name, numbered(one.do), numbered(one.undo)) for one in source.changes()
        ]
        states += [numbered(text) for text in source.has.get("state", [])]
    text = _PROGRAM.format(
        about="; ".join(about).replace("\\", ""),
        setup="\n".join(setup),
        bases="".join(bases),
        init="\n".join(f"        {line}" for line in init),
        body="\n".join(body),
        forward="\n".join(f"        {line}" for line in forward),
    )
    return World("; ".join(about), text, tuple(changes), tuple(states), gradients)


def grouped(known: list[Source], size: int) -> list[list[Source]]:
    """Groups of that many, with at most one in each that must stand alone."""
    count = max(-(-len(known) // size), 1)
    groups: list[list[Source]] = [[] for _ in range(count)]
    for number, source in enumerate(sorted(known, key=lambda source: source.alone)):
        groups[number % count].append(source)
    return [group for group in groups if group]


def use_of(random: Random, source: Source) -> str:
    """A use for a source, "" for one that says itself what the forward does."""
    return "" if "do" in source.has else random.choice(list(KINDS[source.kind]))


def write(worlds: Iterable[World], folder: Path) -> None:
    """Puts the files where they can be imported from."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    helper = folder / "world_help.py"
    helper.write_text((FOLDER / "world_help.py").read_text())
    for world in worlds:
        (folder / f"{world.name}.py").write_text(world.text)
