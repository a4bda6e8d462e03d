"""What there is to run: one unit is a stage of one operator of the database with one dtype."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Every sample of the whole set; of the other dtypes a few.
WHOLE_DTYPES = ("float32", "bfloat16", "int64", "bool")
SAMPLED_DTYPES = ("float64", "complex64")

# The samples of the first stage, and of dtypes that are only sampled.
FIRST_SAMPLES = 6
SAMPLED_SAMPLES = 2

# In this order: where compiled code and native disagree most easily.
RISKS: Sequence[tuple[str, str]] = (
    (
        "views and strides",
        r"permute|transpose|expand|slice|select|narrow|diag|unfold|as_strided|roll|flip|rot90|cat$|"
        r"stack|clone|contiguous|repeat|tril|triu|pad|split|chunk|kron|meshgrid|broadcast|movedim|"
        r"copy|fill|zero|tile|unbind|unflatten|view|reshape",
    ),
    (
        "reductions",
        r"sum|mean|var|std|prod|amax|amin|norm|logsumexp|count_nonzero|argm|max|min|all$|any$|"
        r"median|mode|cum|aminmax|trace|dist",
    ),
    (
        "promotion and integers",
        r"^add|^sub|^rsub|^mul|div|fmod|remainder|bitwise|shift|round|floor|ceil|trunc|pow|gcd|lcm|"
        r"where|clamp|^eq|^ne|^lt|^le|^gt|^ge|maximum|minimum|fm|copysign|heaviside|lerp|"
        r"addc|logical|sign|frac|nextafter|hypot|float_power|ldexp|^to$|^_to",
    ),
    ("indexing", r"index|scatter|gather|take|put|masked|embedding|searchsorted|bucketize|one_hot"),
    ("normalization", r"norm|softmax|softmin|log_softmax"),
    ("special values", r"nan|inf|special|erf|gamma|log|exp|polygamma|sinc|xlogy"),
    ("pooling and sampling", r"pool|interpolate|upsample|grid|fold|shuffle|cdist"),
    ("losses and activations", r"loss|elu|silu|gelu|sigmoid|softplus|hard|tanh|entropy|cosine|glu"),
    ("lists", r"foreach"),
)


@dataclass(frozen=True)
class Unit:
    """A part of the work that is done and kept as a whole.

    Attributes:
        op: the database's name, variant included ("nn.functional.gelu", "add", "_foreach_add").
        stage: "first" (a few samples, and the other forms of calls), "rest" (all other samples), or
            "errors" (the database's erroneous calls).
    """

    device: str
    op: str
    dtype: str
    stage: str

    @property
    def name(self) -> str:
        """Unique, and the same in every run."""
        return f"{self.device}/{self.op}/{self.dtype}/{self.stage}"

    @staticmethod
    def parse(name: str) -> Unit:
        """The unit of that name."""
        device, rest = name.split("/", 1)
        op, dtype, stage = rest.rsplit("/", 2)
        return Unit(device, op, dtype, stage)


def risk(op: str) -> int:
    """The place of the operator's kind in `RISKS`, or its length."""
    base = op.removeprefix("nn.functional.").removeprefix("torch.")
    found = (index for index, (_, pattern) in enumerate(RISKS) if re.search(pattern, base))
    return min(found, default=len(RISKS))


def all_units(device: str, supported: Mapping[str, Iterable[str]]) -> list[Unit]:
    """Every unit, those of most risk first.

    ``supported`` are the dtypes of each operator. First a few samples of everything, dtype by
    dtype, errors after the first; then all that is left.
    """
    keyed: list[tuple[tuple[float, float, int], Unit]] = []
    for op, dtypes in supported.items():
        known = set(dtypes)
        chosen = [d for d in (*WHOLE_DTYPES, *SAMPLED_DTYPES) if d in known]
        for dtype in chosen:
            order = (*WHOLE_DTYPES, *SAMPLED_DTYPES).index(dtype)
            keyed.append(((0, order, risk(op)), Unit(device, op, dtype, "first")))
            if dtype in WHOLE_DTYPES:
                keyed.append(((2, order, risk(op)), Unit(device, op, dtype, "rest")))
        if chosen:
            keyed.append(((0, 0.5, risk(op)), Unit(device, op, "any", "errors")))
    keyed.sort(key=lambda pair: (pair[0], pair[1].op))
    return [unit for _, unit in keyed]


def select(
    units: Iterable[Unit],
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    stages: Sequence[str] = (),
    shard: tuple[int, int] = (0, 1),
) -> list[Unit]:
    """The units of the named operators (a trailing * matches the rest), dtypes, stages and shard.

    Shards hold every n-th operator, so that each has its part of every risk.
    """
    chosen = [
        unit
        for unit in units
        if (not ops or any(_matches(unit.op, one) for one in ops))
        and (not dtypes or unit.dtype in (*dtypes, "any"))
        and (not stages or unit.stage in stages)
    ]
    index, count = shard
    names = sorted({unit.op for unit in chosen})
    mine = set(names[index::count])
    return [unit for unit in chosen if unit.op in mine]


def _matches(op: str, pattern: str) -> bool:
    if pattern.endswith("*"):
        return op.startswith(pattern[:-1])
    return op == pattern


def dump(supported: Mapping[str, Iterable[str]]) -> str:
    """As JSON, to be read by `load`."""
    return json.dumps({op: sorted(dtypes) for op, dtypes in supported.items()}, indent=0)


def load(text: str) -> dict[str, list[str]]:
    """What `dump` wrote."""
    supported: dict[str, list[str]] = json.loads(text)
    return supported
