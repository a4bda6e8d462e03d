"""Numbers of a call as arguments of its generated kernels.

A lowering bakes numbers into its text. So the call is lowered with two sets of numbers that are
known by sight; where the two texts are the same but for those, the text with an argument in the
place of each is a kernel for all numbers that are lowered alike. Which those are, the hook decides
by their size (guards/key/scalar_class.h) and the proof by trying.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from eagercache.worker.inductor.launch_plan import SCALARS, LaunchPlan, read_launch_plan
from eagercache.worker.inductor.wrapper_statements import NotUnderstood, statements

_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d*(?:e[+-]?\d+)?(?![\w.])")


def with_names(text: str, marks: Sequence[float], names: Sequence[str]) -> str:
    """``text`` with a name in the place of each mark."""
    known = dict(zip(marks, names, strict=True))
    negated = {-mark: f"-{name}" for mark, name in known.items() if -mark not in known}
    return _NUMBER.sub(lambda found: {**negated, **known}.get(float(found[0]), found[0]), text)


def with_arguments(kernel: str, marks: Sequence[float]) -> str:
    """``kernel`` with an element of the array of numbers in the place of each mark."""
    return with_names(kernel, marks, [f"{SCALARS}[{index}]" for index in range(len(marks))])


def read_scalar_plan(
    first: tuple[str, str],
    first_marks: Sequence[float],
    second: tuple[str, str],
    second_marks: Sequence[float],
) -> LaunchPlan:
    """The plan of the texts (wrapper, kernel) of both lowerings. Raises NotUnderstood."""
    kernel = with_arguments(first[1], first_marks)
    if kernel != with_arguments(second[1], second_marks):
        raise NotUnderstood("the kernel depends on the numbers otherwise than by using them")
    if statements(first[0]) != statements(second[0]):
        raise NotUnderstood("what is done around the kernel depends on the numbers")
    if SCALARS not in kernel:
        raise NotUnderstood("the numbers are not in the kernel")
    return read_launch_plan(first[0], kernel, scalars=len(first_marks))
