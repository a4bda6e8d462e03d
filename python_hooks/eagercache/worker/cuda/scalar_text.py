"""Numbers of a call as arguments of its Triton kernels.

As `worker/inductor/scalar_text.py` for kernels of a CPU: the call is lowered with two sets of
numbers that are known by sight, and where the two texts are the same but for those, each kernel
gets a parameter for every number that stands in it. It is of float32, or of float64 in a kernel of
float64 tensors: what Triton makes of a number in a kernel's text. Where the text has 1 by a number
(Inductor multiplies by that instead of dividing) a parameter is that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from eagercache.worker.cuda.wrapper import SCALAR_ARRAYS
from eagercache.worker.inductor.scalar_text import with_names
from eagercache.worker.inductor.wrapper_statements import NotUnderstood

_PARAMETER = "eagercache_argument_"
_FLOATS = {"*fp16", "*bf16", "*fp32", "*fp64"}
# As Inductor writes them: "name = async_compile.triton('name', '''...''', device_str='cuda')".
_KERNEL = re.compile(
    r"(?P<head>(?P<name>\w+) = async_compile\.triton\('(?P=name)', ''')(.*?)(?=''')", re.S
)
_SIGNATURE = re.compile(r"(?<='signature': \{)[^}]*(?=\})")
_COMMENT = re.compile(r"^\s*#.*\n", re.M)


def read_scalar_text(
    first: str, first_marks: Sequence[float], second: str, second_marks: Sequence[float]
) -> str:
    """The module's text for all numbers, of the texts of both lowerings. Raises NotUnderstood.

    It runs with ``first_marks``; its launches take elements of the arrays `SCALAR_ARRAYS`.
    """
    text = _with_parameters(first, first_marks)
    if text != _with_parameters(second, second_marks):
        raise NotUnderstood("the kernel depends on the numbers otherwise than by using them")
    if _PARAMETER not in text:
        raise NotUnderstood("the numbers are not in the kernel")
    arrays = zip(SCALAR_ARRAYS, (tuple(first_marks), _inverses(first_marks)), strict=True)
    return text + "".join(f"\n{name} = {values!r}\n" for name, values in arrays)


def _inverses(marks: Sequence[float]) -> tuple[float, ...]:
    return tuple(1.0 / mark for mark in marks)


def _with_parameters(text: str, marks: Sequence[float]) -> str:
    """``text`` without comments, and with parameters in the places of the marks."""
    used: dict[str, list[int]] = {}

    def rewritten(found: re.Match[str]) -> str:
        source, used[found["name"]] = _kernel(found["name"], found[3], marks)
        return f"{found['head']}{source}"

    text = _KERNEL.sub(rewritten, _COMMENT.sub("", text))
    for name, places in used.items():
        elements = [f"{array}[{i}]" for array in SCALAR_ARRAYS for i in range(len(marks))]
        passed = "".join(f", {elements[place]}" for place in places)
        text = re.sub(rf"(\b{name}\.run\(.*?)(, stream=)", rf"\g<1>{passed}\g<2>", text)
    return text


def _kernel(name: str, source: str, marks: Sequence[float]) -> tuple[str, list[int]]:
    """A kernel's source with parameters, and which they are: of the numbers, then of 1 by each."""
    begin = source.find(f"def {name}(")
    end = source.find("):", begin)
    signature = _SIGNATURE.search(source)
    if min(begin, end) < 0 or signature is None:
        raise NotUnderstood(f"the parameters of {name}")
    all_marks = (*marks, *_inverses(marks))
    names = [f"{_PARAMETER}{index}" for index in range(len(all_marks))]
    body = with_names(source[end:], all_marks, names)
    places = [i for i, own in enumerate(names) if re.search(rf"\b{own}\b", body)]
    if not places:
        return source, places
    # Those that a launch passes by position end before the first that is tuned; what is known of
    # parameters by their number is of those before.
    parameters = [each.strip() for each in source[begin:end].partition("(")[2].split(",")]
    tuned = [":" in each for each in parameters]
    count = tuned.index(True) if True in tuned else len(parameters)
    types = dict(each.split(": ") for each in signature[0].split(", "))
    known = [each.partition(":")[0].strip() for each in parameters]
    if [each.strip("'") for each in types] != known:
        raise NotUnderstood(f"the signature of {name}")
    kind = _kind_of({each.strip("'") for each in types.values()}, body)
    added = [names[place] for place in places]
    rows = [f"{key}: {value}" for key, value in types.items()]
    rows[count:count] = [f"'{each}': '{kind}'" for each in added]
    parameters[count:count] = added
    head = source[: signature.start()] + ", ".join(rows) + source[signature.end() : begin]
    return f"{head}def {name}({', '.join(parameters)}{body}", places


def _kind_of(types: set[str], body: str) -> str:
    """Triton's type of the numbers."""
    floats = types & _FLOATS
    if floats == {"*fp64"}:
        return "fp64"
    if "*fp64" in floats or "tl.float64" in body:
        raise NotUnderstood("numbers of float64 beside tensors of another dtype")
    return "fp32"
