"""Modules that are called with tensors of many sizes: one kernel, its guards, and a bound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import module_zoo
import pytest
import torch
from conftest import module_kernels, run_program
from eagercache.base.load import core
from eagercache.modules.manager import explain_module, manager
from eagercache.modules.shapes import MAX_COMPILES, SizeBook, sized_form
from torch import nn

HERE = str(Path(__file__).parents[1] / "zoos")

# Calls each model with sizes that come once, waiting for what a call has led to.
CALLS = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, module_zoo
from eagercache.modules import shapes
from eagercache.modules.manager import explain_module, manager
shapes.MAX_COMPILES = 2
torch.set_num_threads(1)
def argument(name, *sizes):
    generator = torch.Generator().manual_seed(sum(sizes))
    if name == "Positions":
        return torch.randint(0, 10, sizes, generator=generator)
    return torch.randn(*sizes, 8, generator=generator)
def call(name, model, sizes):
    row, = [row for part, row in manager.stats() if part is model] or [None]
    before = row.hits if row else 0
    x = argument(name, *sizes)
    try:
        answer = model(x)
    except IndexError:
        return "IndexError"
    eagercache.wait(600)
    row, = [row for part, row in manager.stats() if part is model]
    expected = type(model).forward(model, x)
    if answer.stride() != expected.stride() or not torch.allclose(answer, expected, atol=1e-6):
        return "wrong"
    return "hit" if row.hits == before + 1 else "forward"
SIZES = {{
    "Positions": [(3, 7), (3, 9), (5, 12), (6, 31), (2, 40), (3, 41), (64, 2), (33, 17)],
    "Branches": [(4,), (7,), (20,), (2,), (30,), (21,), (13,), (21,), (21,), (19,)],
    "Unrolled": [(4,), (3,), (2,), (5,), (6,), (7,), (5,), (5,)],
}}
"""

FILL = (
    CALLS
    + """
eagercache.enable(ops=(), modules="auto", on_miss="background", choose="always")
rows = {{}}
with torch.no_grad():
    for name, sizes in SIZES.items():
        model = module_zoo.make(name)
        before = eagercache.stats().compiles
        said = [call(name, model, size) for size in sizes]
        rows[name] = dict(said=said, compiles=eagercache.stats().compiles - before,
                          lines=explain_module(model))
report(rows=rows)
"""
)


@pytest.fixture(scope="session")
def size_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A store that the calls have filled, and what was seen meanwhile."""
    path = tmp_path_factory.mktemp("sizes") / "cache"
    path.mkdir(mode=0o700)
    return path, run_program(FILL.format(here=HERE), path, timeout=900, fills=True)["rows"]


def test_one_kernel_answers_all_sizes_that_its_guards_admit(
    size_cache: tuple[Path, dict[str, Any]],
) -> None:
    row = size_cache[1]["Positions"]
    # The first call is before the module is looked at; the third is the second size. There are 40
    # positions: a sequence of 41 raises as it does without kernels.
    assert row["said"][:3] == ["forward"] * 3, row
    assert row["said"][3:] == ["hit", "hit", "IndexError", "hit", "hit"], row
    assert row["compiles"] == 1


def test_sizes_for_which_the_forward_is_another_program_have_another_kernel(
    size_cache: tuple[Path, dict[str, Any]],
) -> None:
    row = size_cache[1]["Branches"]
    assert "wrong" not in row["said"], row
    # The call with 30 rows, which the first kernel does not hold for, asks for one for many sizes.
    assert row["said"] == ["forward"] * 3 + ["hit", "forward"] + ["hit"] * 5, row
    assert row["compiles"] == 2


def test_where_no_size_can_be_open_few_kernels_are_made(
    size_cache: tuple[Path, dict[str, Any]],
) -> None:
    row = size_cache[1]["Unrolled"]
    assert "wrong" not in row["said"], row
    assert row["compiles"] <= 2
    assert row["said"].count("hit") == 0 or row["compiles"] == 2


@pytest.mark.once
def test_another_process_has_the_kernel_at_its_second_call(
    size_cache: tuple[Path, dict[str, Any]],
) -> None:
    seen = run_program(
        (
            CALLS
            + """
eagercache.enable(ops=(), modules="auto", on_miss="native", choose="always")
with torch.no_grad():
    model = module_zoo.make("Positions")
    said = [call("Positions", model, size) for size in [(9, 11), (10, 12), (9, 39), (2, 2)]]
report(said=said, compiles=eagercache.stats().compiles)
"""
        ).format(here=HERE),
        size_cache[0],
    )
    assert seen["said"] == ["forward", "hit", "hit", "hit"]
    assert seen["compiles"] == 0


@pytest.fixture
def branches(size_cache: tuple[Path, dict[str, Any]]) -> Iterator[tuple[nn.Module, Any]]:
    """A module whose calls of up to 20 rows a kernel answers here; the kernel with its sizes."""
    model = module_zoo.make("Branches")
    with module_kernels(size_cache[0]), torch.no_grad():
        model(torch.randn(5, 8))
        (known,) = [c.kernels for c in manager._sizes._classes.values() if c.kernels]
        yield model, known[0]


def _answered(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a kernel answered, rightly."""
    before = sum(row.hits for part, row in manager.stats() if part is model)
    torch.testing.assert_close(model(x), type(model).forward(model, x))
    return sum(row.hits for part, row in manager.stats() if part is model) == before + 1


def test_calls_that_are_not_of_the_class_are_the_forwards(branches: tuple[nn.Module, Any]) -> None:
    model, _ = branches
    x = torch.randn(40, 16)
    assert _answered(model, x[:7, :8].contiguous()), explain_module(model)
    assert not _answered(model, x[:7, :8])  # rows further apart
    assert not _answered(model, x[:8, :7].t().contiguous().t().repeat(1, 2)[:, :8])
    assert not _answered(model, x[:1, :8].contiguous())  # one row broadcasts
    assert _answered(model, x[:21, :8].contiguous())  # another branch of the forward, its kernel
    assert not _answered(model, x[:7, :1].contiguous())  # a size that is not open
    assert not _answered(model, x[:7, :8].double())


def test_a_function_replaced_meanwhile_has_no_part_in_a_kernel(
    branches: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(7, 8)
    monkeypatch.setattr(module_zoo, "waves", torch.cos)
    other = module_zoo.make("Branches")
    for _ in range(3):
        assert not _answered(other, x)


def _key_of(model: nn.Module, x: torch.Tensor) -> bytes:
    assert core is not None
    keys: list[bytes] = []
    core.set_module_handlers(
        lambda _module: "refuse",
        lambda _module: None,
        lambda _module, _args, _kwargs, key, *_: keys.append(key),
        lambda _module: None,
    )
    for _ in range(2):
        model(x)
    return keys[0]


def test_a_size_between_two_that_were_timed_needs_both(branches: tuple[nn.Module, Any]) -> None:
    assert core is not None
    model, known = branches
    info = manager._known.find(model)
    assert info is not None
    key = _key_of(model, torch.randn(1, 8))  # of another class: no kernel answers it

    def rows(count: int) -> bytes:
        word = core.module_form_tensors(key)[0][0] + 1
        return key[: 8 * word] + count.to_bytes(8, "little") + key[8 * (word + 1) :]

    choice = [(8 * 4, True), (8 * 8, True), (8 * 12, False), (8 * 16, True)]
    core.module_forget(model)
    core.module_adopt(model)
    version = core.module_version(model)
    from eagercache.callables.module_identity import identify

    entries = identify(model).guard_entries()
    assert core.module_set_guard(model, entries, info.identity, version)
    core.module_install_class(model, info.identity, rows(4), known.sizes, known.kernel, choice)
    said = [core.module_class_answers(model, rows(n)) for n in (1, 2, 4, 6, 8, 9, 12, 14, 16, 20)]
    assert said == ["", *["kernel"] * 4, *["native"] * 3, "kernel", "kernel"]
    assert core.module_class_answers(model, rows(21)) == ""
    with pytest.raises(ValueError, match="class of calls"):
        core.module_install_class(model, info.identity, rows(4), known.sizes, known.kernel, [])
    with pytest.raises(ValueError, match="another rank"):
        core.module_install_class(model, info.identity, rows(4), [[-1]], known.kernel, choice)


def test_the_number_of_kernels_for_one_structure_of_arguments_is_bounded(
    branches: tuple[nn.Module, Any],
) -> None:
    model, _ = branches
    book = SizeBook()
    form = sized_form(_key_of(model, torch.randn(1, 8)))
    made = [book.may_compile("m", form, f"digest {n}") for n in range(MAX_COMPILES + 3)]
    assert made == [True] * MAX_COMPILES + [False] * 3
    assert book.may_compile("m", form, "digest 0")  # counted once
    assert book.may_compile("another module", form, "digest")


MASKED = """
import torch, eagercache
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)

class Masked(torch.nn.Module):
    def forward(self, x, kept):
        place = torch.arange(x.size(1))
        seen = (place[None, :] <= place[:, None]) & kept[:, place][:, None, :]
        return torch.where(seen, x, 0.0)

model = Masked()
eagercache.enable(ops=(), modules="auto", on_miss="wait", choose="always")
right = []
with torch.no_grad():
    for size in (5, 6, 7, 40, 33, 5):
        x, kept = torch.randn(2, size, size), torch.rand(2, size + 1) < 0.8
        right.append(torch.equal(model(x, kept), Masked.forward(model, x, kept)))
    raised = False
    try:
        model(torch.randn(2, 9, 9), torch.ones(2, 8, dtype=torch.bool))
    except IndexError:
        raised = True
((_, row),) = manager.stats()
report(right=right, raised=raised, hits=row.hits, compiles=eagercache.stats().compiles,
       lines=explain_module(model))
"""


def test_an_index_that_sizes_decide_may_be_computed_with_too(tmp_path: Path) -> None:
    # As in a mask of attention: the same places are compared and choose what is not padding.
    seen = run_program(MASKED, tmp_path, timeout=300, fills=True)
    assert all(seen["right"]) and seen["raised"], seen
    assert seen["hits"] == 4 and seen["compiles"] <= 2, seen
