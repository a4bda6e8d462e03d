"""What there is to run: one unit is a stage of one operator of the database with one dtype."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Every sample of the whole set; of the other dtypes a few.
WHOLE_DTYPES = ("float32", "bfloat16", "int64", "bool")
SAMPLED_DTYPES = ("float64", "complex64")

# The samples of the first stage, and of dtypes that are only sampled.
FIRST_SAMPLES = 6
SAMPLED_SAMPLES = 2
# At most so many samples are one unit: their kernels stay in one process.
SAMPLES_OF_A_PART = 48

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
        stage: "first" (a few samples), "rest" (all others), "forms" (other layouts, values and
            writing forms of the first samples' calls) or "errors" (the database's erroneous ones).
        part: of "rest", counted from 0: which `SAMPLES_OF_A_PART` samples.
    """

    device: str
    op: str
    dtype: str
    stage: str
    part: int = 0

    @property
    def name(self) -> str:
        """Unique, and the same in every run."""
        part = f"-{self.part}" if self.part else ""
        return f"{self.device}/{self.op}/{self.dtype}/{self.stage}{part}"

    @staticmethod
    def parse(name: str) -> Unit:
        """The unit of that name."""
        device, rest = name.split("/", 1)
        op, dtype, stage = rest.rsplit("/", 2)
        stage, _, part = stage.partition("-")
        return Unit(device, op, dtype, stage, int(part or 0))

    def samples(self) -> tuple[int, int]:
        """The first and the last but one of the database's samples that it is about."""
        if self.stage == "rest":
            first = FIRST_SAMPLES + self.part * SAMPLES_OF_A_PART
            return first, first + SAMPLES_OF_A_PART
        return 0, SAMPLED_SAMPLES if self.dtype in SAMPLED_DTYPES else FIRST_SAMPLES


def risk(op: str) -> int:
    """The place of the operator's kind in `RISKS`, or its length."""
    base = op.removeprefix("nn.functional.").removeprefix("torch.")
    found = (index for index, (_, pattern) in enumerate(RISKS) if re.search(pattern, base))
    return min(found, default=len(RISKS))


def all_units(device: str, counts: Mapping[str, Mapping[str, int]]) -> list[Unit]:
    """Every unit: dtype by dtype the first samples, then the forms, then all further samples.

    ``counts`` are the samples of each operator and dtype. Within a stage those of most risk come
    first, and first parts of every operator before second ones. Errors follow the first samples,
    whose kernels are then there. Dtypes of which all samples are run go before the others.
    """
    keyed: list[tuple[tuple[float, float, int, int], Unit]] = []

    def add(group: float, stage: float, unit: Unit) -> None:
        keyed.append(((group, stage, unit.part, risk(unit.op)), unit))

    forms = len(WHOLE_DTYPES)
    rest = forms + 1 + len(SAMPLED_DTYPES)
    for op, known in counts.items():
        for index, dtype in enumerate(WHOLE_DTYPES):
            if dtype not in known:
                continue
            add(index, 0, Unit(device, op, dtype, "first"))
            add(forms, index, Unit(device, op, dtype, "forms"))
            left = max(0, known[dtype] - FIRST_SAMPLES)
            for part in range(-(-left // SAMPLES_OF_A_PART)):
                add(rest, index, Unit(device, op, dtype, "rest", part))
        for index, dtype in enumerate(SAMPLED_DTYPES):
            if dtype in known:
                add(forms + 1 + index, 0, Unit(device, op, dtype, "first"))
                add(forms + 1 + index, 1, Unit(device, op, dtype, "forms"))
        if known.keys() & {*WHOLE_DTYPES, *SAMPLED_DTYPES}:
            add(0, 1, Unit(device, op, "any", "errors"))
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
        if (not ops or any(matches(unit.op, one) for one in ops))
        and (not dtypes or unit.dtype in (*dtypes, "any"))
        and (not stages or unit.stage in stages)
    ]
    index, count = shard
    names = sorted({unit.op for unit in chosen})
    mine = set(names[index::count])
    return [unit for unit in chosen if unit.op in mine]


def matches(op: str, pattern: str) -> bool:
    """Whether the pattern is the name, or its beginning and a star."""
    if pattern.endswith("*"):
        return op.startswith(pattern[:-1])
    return op == pattern
