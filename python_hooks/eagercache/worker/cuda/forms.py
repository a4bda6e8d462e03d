"""The forms that Inductor can give a CUDA kernel: the first, and others that may be faster.

Inductor's own choice is a rule of thumb that costs its users no time. A worker has time: nobody
waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagercache.worker.compat import triton_kernels

# Of a row that is kept in registers between two passes: 64 float32 for each of 1,024 threads.
_LONGEST_ROW = 1 << 16

# Block sizes and warps by trying, first Inductor's longer list, then each a step up and down.
_TUNED = {"max_autotune_pointwise": True, "coordinate_descent_tuning": True}


@dataclass(frozen=True)
class Form:
    """One way to generate a kernel: Inductor's options beside those that all have.

    ``whole_rows``: a reduction's row is read once and kept, where it has up to `_LONGEST_ROW`
    elements; Inductor does so up to 1,024.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    whole_rows: bool = False

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """While Inductor lowers in this form."""
        if not self.whole_rows:
            yield
            return
        with triton_kernels.rows_kept(_LONGEST_ROW):
            yield


FIRST = Form("first")

# Sums over columns apart from those over rows: where those of one kernel are not understood, or do
# not prove.
_APART = {"triton.mix_order_reduction": False}
APART = Form("apart", _APART)


def other_forms(first: Form, *, reduces: bool, mixes: bool) -> list[Form]:
    """What may be faster than the ``first`` form, best prospects first.

    ``reduces``: it has a reduction; ``mixes``: one kernel reduces over rows and columns.
    """
    if first is APART:
        forms = other_forms(FIRST, reduces=reduces, mixes=False)
        return [replace(form, options={**form.options, **_APART}) for form in forms]
    forms = [Form("tuned", _TUNED)]
    if not reduces:
        return forms
    rows = Form("whole rows", _TUNED, whole_rows=True)
    looped = Form("looped", {**_TUNED, "triton.persistent_reductions": False})
    forms = [rows, *forms, looped]
    if mixes:
        forms.append(Form("tuned apart", {**_TUNED, **_APART}))
    return forms
