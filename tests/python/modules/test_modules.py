"""Whole modules answered by kernels: what must be noticed, what is left alone, what is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eagercache
import module_zoo
import pytest
import torch
from conftest import module_hits as hits
from conftest import module_kernels, run_program
from eagercache.base.load import core
from eagercache.modules import known
from eagercache.modules.manager import explain_module
from eagercache.runtime.session import session
from module_fill import Filled, answered_by_kernel, block, command, forward, own_store, warm
from torch import nn

__all__ = ["block", "own_store", "warm"]


def test_kernels_answer_and_equal_the_forward(filled_modules: Filled) -> None:
    rows = filled_modules.report["rows"]
    for name in ("Block", "Words"):
        assert rows[name]["hits"] >= 2, rows[name]
    assert all(row["close"] for row in rows.values()), rows


def test_another_process_compiles_nothing_and_hits_from_the_second_call(
    filled_modules: Filled,
) -> None:
    code = command("native", ["Block", "Words"])
    again = run_program(code, filled_modules.store)
    assert again["compiles"] == 0
    assert again["rows"]["Block"]["hits"] == 3
    assert again["rows"]["Words"]["hits"] == 3


def test_a_checked_call_finds_what_was_not_noticed(
    own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert core is not None
    model, x, old = module_zoo.make("Block"), module_zoo.example("Block"), torch.tanh
    other = module_zoo.make("Block")
    # As if this were something that is not watched.
    monkeypatch.setattr(known, "function_values", lambda *_: ([], []))
    with module_kernels(own_store), torch.no_grad():
        model(x)
        other(x)
        assert answered_by_kernel(other, x)[1]
        core.set_verification_share(1.0)
        try:
            _, by_kernel = answered_by_kernel(model, x)
            assert by_kernel  # and right
            monkeypatch.setattr(torch, "tanh", lambda x: old(x) + 1)
            answer, by_kernel = answered_by_kernel(model, x)
        finally:
            core.set_verification_share(0.0)
        assert not by_kernel
        assert torch.equal(answer, forward(model, x))
        assert not answered_by_kernel(model, x)[1]
        assert not answered_by_kernel(other, x)[1]
        assert "a checked call differed from its forward" in explain_module(model)[0]
        assert session.store is not None and session.store.quarantined == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Prints", "traced"),
        ("Logs", "it logs"),
        ("Warns", "it warns"),
        ("Collects", "changes module_zoo.FEATURES"),
        ("Appends", "changes module_zoo.SEEN"),
        ("Draws", "random"),
        ("Remembers", "attributes"),
        ("ReturnsInput", "shares memory"),
        ("Conditional", "branches or loops on its data (cond)"),
        ("Loops", "branches or loops on its data (while_loop)"),
    ],
)
def test_a_forward_that_does_more_than_compute_is_left_alone(
    filled_modules: Filled, name: str, reason: str
) -> None:
    row = filled_modules.report["rows"][name]
    assert row["hits"] == 0
    assert "refused" in row["lines"][0]
    expected = {"Prints": "prints"}.get(name, reason)
    assert expected in row["lines"][0], row["lines"]


def test_effects_go_on(filled_modules: Filled) -> None:
    # Four calls, and one with eagercache disabled.
    assert filled_modules.report["stdout"].count("called\n") == 5
    rows = filled_modules.report["rows"]
    assert rows["Draws"]["differ"]
    assert rows["Remembers"]["sums"] == 4
    assert rows["CountsInBuffer"]["calls"] == 4  # by its kernel, which writes the buffer
    assert rows["CountsInBuffer"]["hits"] == 3


def test_parts_of_a_module_that_cannot_are_tried(filled_modules: Filled) -> None:
    row = filled_modules.report["rows"]["Chatty"]
    assert row["hits"] > 0
    assert any(line.startswith("first (") and "by kernel" in line for line in row["lines"])


def test_a_module_whose_first_call_settles_what_hangs_off_it_gets_a_kernel(
    filled_modules: Filled,
) -> None:
    row = filled_modules.report["rows"]["Settles"]
    assert row["close"] and row["lines"][0].startswith("(root)"), row
    assert " 0 by kernel" not in row["lines"][0], row


def test_parts_of_a_module_that_is_given_an_object_are_tried(warm: None) -> None:
    model: Any = module_zoo.make("TakesObject")
    x = module_zoo.example("Block")
    with torch.no_grad():
        for _ in range(5):
            answer = model(x, object())
        assert hits(model.inner) >= 1, explain_module(model)
        torch.testing.assert_close(answer, forward(model.inner, x) + 1)
    assert "object" in explain_module(model)[0]


def test_other_tensors_take_another_way(block: nn.Module) -> None:
    x = module_zoo.example("Block")

    class Marked(torch.Tensor):
        pass

    with torch.no_grad():
        for other in (x[:2], x.double().float()[:, :].t().contiguous().t(), x[:0]):
            answer, _ = answered_by_kernel(block, other)
            torch.testing.assert_close(answer, forward(block, other))
        answer, by_kernel = answered_by_kernel(block, x.as_subclass(Marked))
        assert not by_kernel and type(answer) is Marked
        with torch.device("cpu"):  # a function mode
            _, by_kernel = answered_by_kernel(block, x)
            assert not by_kernel
        mapped = torch.vmap(block)(x[None])
        torch.testing.assert_close(mapped[0], forward(block, x))


def test_wrong_arguments_raise_what_the_forward_raises(block: nn.Module) -> None:
    with torch.no_grad():
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            block()
        with pytest.raises(RuntimeError, match="normalized_shape"):
            block(torch.randn(4, 47))


def test_an_index_out_of_range_raises_and_does_not_end_the_process(warm: None) -> None:
    words, ids = module_zoo.make("Words"), module_zoo.example("Words")
    with torch.no_grad():
        words(ids)
        (rows, squares), by_kernel = answered_by_kernel(words, ids)
        assert by_kernel and isinstance(squares, dict)
        torch.testing.assert_close(rows, forward(words, ids)[0])
        with pytest.raises(IndexError):
            words(ids + 10)
        with pytest.raises(IndexError):
            words(ids - 100)
        _, by_kernel = answered_by_kernel(words, 9 - ids)
        assert by_kernel


def test_what_is_gathered_has_indices_in_range(warm: None) -> None:
    picks, ids = module_zoo.make("Picks"), module_zoo.example("Picks")
    with torch.no_grad():
        picks(ids)
        answer, by_kernel = answered_by_kernel(picks, ids)
        assert by_kernel
        torch.testing.assert_close(answer, forward(picks, ids))
        for wrong in (ids + 10, ids - 1, ids - 100):
            with pytest.raises((IndexError, RuntimeError), match="out of"):
                picks(wrong)
        with pytest.raises(IndexError):  # from behind what was gathered
            picks.kinds.fill_(5)
            picks(ids)
        picks.kinds.fill_(2)
        answer, by_kernel = answered_by_kernel(picks, ids)
        assert by_kernel
        torch.testing.assert_close(answer, forward(picks, ids))


def test_outputs_that_share_memory_do_so_as_the_forwards_do(warm: None) -> None:
    views, x = module_zoo.make("Views"), module_zoo.example("Views")
    with torch.no_grad():
        views(x)
        answer, by_kernel = answered_by_kernel(views, x)
        assert by_kernel
        y, column, turned, part = answer
        torch.testing.assert_close(answer, forward(views, x))
        assert part.storage_offset() == 5
        y.fill_(3)
        assert bool((column == 3).all()) and bool((turned == 3).all())


def test_computed_indices_are_checked_by_the_kernel(warm: None) -> None:
    computes, ids = module_zoo.make("Computes"), module_zoo.example("Computes")
    with torch.no_grad():
        computes(ids)
        for _ in range(2):
            answer, by_kernel = answered_by_kernel(computes, ids)
            assert by_kernel
            torch.testing.assert_close(answer, forward(computes, ids))
            for wrong in (ids + 10, ids - 1, ids - 100):
                with pytest.raises(IndexError):
                    computes(wrong)
                with pytest.raises(IndexError):
                    forward(computes, wrong)
        one_outside = ids.clone()
        one_outside[3, 5] = 10
        with pytest.raises(IndexError):
            computes(one_outside)


def test_two_objects_of_one_class_share_a_kernel_and_not_their_values(block: nn.Module) -> None:
    other, x = module_zoo.Block().eval(), module_zoo.example("Block")
    with torch.no_grad():
        other.up.weight.fill_(0.01)
        other(x)
        answer, by_kernel = answered_by_kernel(other, x)
        assert by_kernel
        torch.testing.assert_close(answer, forward(other, x))
        assert not torch.allclose(answer, block(x))


def test_copies_pickles_and_compiles_of_an_accelerated_module(block: nn.Module) -> None:
    import copy
    import pickle

    x = module_zoo.example("Block")
    with torch.no_grad():
        expected = forward(block, x)
        torch.testing.assert_close(copy.deepcopy(block)(x), expected)
        torch.testing.assert_close(pickle.loads(pickle.dumps(block))(x), expected)
        torch.testing.assert_close(torch.compile(block, backend="eager")(x), expected)
        torch.testing.assert_close(torch.jit.trace(block, (x,))(x), expected)
        exported = torch.export.export(block, (x,))
        torch.testing.assert_close(exported.module()(x), expected)
    # torch.compile leaves a mark of its own in 2.15.
    attributes = set(vars(block)) - {"_is_torch_compile"}
    assert sorted(attributes) == sorted(vars(module_zoo.make("Block")))


def test_no_kernel_is_picked_up_after_freeze(block: nn.Module) -> None:
    x = module_zoo.example("Block")
    other = module_zoo.make("Block")
    eagercache.freeze()
    with torch.no_grad():
        assert answered_by_kernel(block, x)[1]
        for _ in range(3):
            answer, by_kernel = answered_by_kernel(other, x)
            assert not by_kernel
            torch.testing.assert_close(answer, forward(other, x))


def test_modules_are_forgotten_when_they_die(block: nn.Module) -> None:
    import gc
    import weakref

    reference = weakref.ref(block)
    model = module_zoo.make("Block")
    x = module_zoo.example("Block")
    with torch.no_grad():
        model(x)
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None
    assert reference() is block


def test_a_selection_by_class_name_or_function(filled_modules: Filled) -> None:
    x = module_zoo.example("Block")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for selection in (
            module_zoo.Block,
            "Block",
            ["module_zoo.Block"],
            lambda module: isinstance(module, module_zoo.Block),
        ):
            outer = nn.Sequential(module_zoo.make("Block"))
            options = {"on_miss": "native", "choose": "always", "cache_dir": filled_modules.store}
            with eagercache.enable(ops=(), modules=selection, **options), torch.no_grad():
                outer(x)
                outer(x)
                assert hits(outer[0]) == 1
                assert hits(outer) == 0
        with pytest.raises(ValueError, match="no subclass of torch"):
            eagercache.enable(ops=(), modules=dict)
    finally:
        torch.set_num_threads(threads)


def test_a_program_may_end_while_a_module_is_being_packed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    ended = run_program(
        """
        import threading, time
        import torch, eagercache
        from eagercache.modules import forms
        packing = threading.Event()

        def pack(module, args, kwargs):
            packing.set()
            value, end = torch.ones(8), time.monotonic() + 1.0
            while time.monotonic() < end:
                value.to(torch.float64)
            raise RuntimeError("packed nothing")

        forms.pack = pack
        eagercache.enable(ops=(), modules="auto")
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).eval()
        with torch.no_grad():
            for _ in range(200):
                model(torch.ones(2, 8))
                if packing.wait(0.05):
                    break
        report(packing=packing.is_set())
        """,
        cache,
        check=False,
    )
    assert ended["packing"]
    assert ended["returncode"] == 0, ended["stderr"]
