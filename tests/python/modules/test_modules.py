"""Whole modules answered by kernels: what must be noticed, what is left alone, what is shared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import eagercache
import module_zoo
import pytest
import torch
from conftest import module_hits as hits
from conftest import module_kernels, run_program
from eagercache.base.load import core
from eagercache.modules import known
from eagercache.modules.manager import explain_module, manager
from eagercache.runtime.session import session
from eagercache.worker.inductor.compile import Tools
from eagercache.worker.jobs import module_job
from eagercache.worker.modules.compile import ModuleResult
from eagercache.worker.timing.timing import Timing
from torch import nn

HERE = str(Path(__file__).parent.parent)

# Fills the store, in a process of its own, and says what was compiled and how the answers compare.
FILL = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, module_zoo
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
eagercache.enable(ops=(), modules="auto", on_miss={on_miss!r}, choose="always")
rows = {{}}
with torch.no_grad():
    for name in {names!r}:
        model, x = module_zoo.make(name), module_zoo.example(name)
        answers = [model(x) for _ in range(4)]
        lines = explain_module(model)
        hits = sum(row.hits for part, row in manager.stats() if part in set(model.modules()))
        eagercache.disable()
        native = module_zoo.make(name)(x)
        eagercache.enable(ops=(), modules="auto", on_miss={on_miss!r}, choose="always")
        close = True
        if name not in ("Draws", "CountsInBuffer"):
            close = all(
                torch.allclose(a, b, atol=1e-6)
                for a, b in zip(torch.utils._pytree.tree_leaves(answers[-1]),
                                torch.utils._pytree.tree_leaves(native))
            )
        rows[name] = dict(hits=hits, lines=lines, close=close,
                          sums=len(getattr(model, "sums", [])),
                          calls=float(getattr(model, "calls", 0)),
                          differ=not torch.equal(answers[0], answers[1])
                          if isinstance(answers[0], torch.Tensor) else None)
report(rows=rows, compiles=eagercache.stats().compiles)
"""

NAMES = [
    "Block",
    "Words",
    "Picks",
    "Computes",
    "Views",
    "Prints",
    "Logs",
    "Warns",
    "Collects",
    "Appends",
    "Draws",
    "Remembers",
    "CountsInBuffer",
    "ReturnsInput",
    "Chatty",
    "Settles",
    "Conditional",
    "Loops",
    "CallsCustom",
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's directory."""
    path = tmp_path_factory.mktemp("modules") / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(scope="module")
def filled(store: Path) -> dict[str, Any]:
    """What the program that filled the store reported."""
    return run_program(
        FILL.format(here=HERE, on_miss="wait", names=NAMES), store, timeout=600, fills=True
    )


@pytest.fixture
def warm(store: Path, filled: dict[str, Any]) -> Iterator[None]:
    """Kernels of the filled store answer in this process; nothing is compiled."""
    assert filled["rows"]["Block"]["hits"] > 0, filled
    with module_kernels(store):
        yield


@pytest.fixture
def own_store(store: Path, filled: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the filled store, to be changed."""
    assert filled["rows"]["Block"]["hits"] > 0, filled
    return Path(shutil.copytree(store, tmp_path / "cache"))


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the module's own forward answers."""
    return type(model).forward(model, *args, **kwargs)


def answered_by_kernel(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """The module's answer to its next call, and whether a kernel gave it."""
    before = hits(model)
    answer = model(*args, **kwargs)
    return answer, hits(model) == before + 1


@pytest.fixture
def block(warm: None) -> nn.Module:
    """A block that its kernel answers."""
    model, x = module_zoo.make("Block"), module_zoo.example("Block")
    with torch.no_grad():
        model(x)
        answer, by_kernel = answered_by_kernel(model, x)
        assert by_kernel, explain_module(model)
        torch.testing.assert_close(answer, forward(model, x))
    return model


def test_kernels_answer_and_equal_the_forward(filled: dict[str, Any]) -> None:
    for name in ("Block", "Words"):
        assert filled["rows"][name]["hits"] >= 2, filled["rows"][name]
    assert all(row["close"] for row in filled["rows"].values()), filled["rows"]


def test_another_process_compiles_nothing_and_hits_from_the_second_call(
    store: Path, filled: dict[str, Any]
) -> None:
    code = FILL.format(here=HERE, on_miss="native", names=["Block", "Words"])
    again = run_program(code, store)
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
    monkeypatch.setattr(known, "function_values", lambda *_: [])
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
        ("CountsInBuffer", "buffers"),
        ("ReturnsInput", "shares memory"),
        ("Conditional", "branches or loops on its data (cond)"),
        ("Loops", "branches or loops on its data (while_loop)"),
        ("CallsCustom", "custom operator module_zoo.doubled"),
    ],
)
def test_a_forward_that_does_more_than_compute_is_left_alone(
    filled: dict[str, Any], name: str, reason: str
) -> None:
    row = filled["rows"][name]
    assert row["hits"] == 0
    assert "refused" in row["lines"][0]
    expected = {"Prints": "prints"}.get(name, reason)
    assert expected in row["lines"][0], row["lines"]


def test_effects_go_on(filled: dict[str, Any]) -> None:
    assert filled["stdout"].count("called\n") == 5  # four calls, and one with eagercache disabled
    assert filled["rows"]["Draws"]["differ"]
    assert filled["rows"]["Remembers"]["sums"] == 4
    assert filled["rows"]["CountsInBuffer"]["calls"] == 4


def test_parts_of_a_module_that_cannot_are_tried(filled: dict[str, Any]) -> None:
    row = filled["rows"]["Chatty"]
    assert row["hits"] > 0
    assert any(line.startswith("first (") and "by kernel" in line for line in row["lines"])


def test_a_module_whose_first_call_settles_what_hangs_off_it_gets_a_kernel(
    filled: dict[str, Any],
) -> None:
    row = filled["rows"]["Settles"]
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


def test_new_values_are_seen_without_a_new_kernel(block: nn.Module) -> None:
    x = module_zoo.example("Block")
    with torch.no_grad():
        block.up.weight.mul_(0.5)
        block.shift.add_(1)
        state = {name: value + 0.125 for name, value in block.state_dict().items()}
        answer, by_kernel = answered_by_kernel(block, x)
        assert by_kernel
        torch.testing.assert_close(answer, forward(block, x))
        block.load_state_dict(state)
        answer, by_kernel = answered_by_kernel(block, x)
        assert by_kernel
        torch.testing.assert_close(answer, forward(block, x))


def _set_attribute(block: Any) -> None:
    block.scale = 3.0


def _set_attribute_below(block: Any) -> None:
    block.norm.eps = 0.5


def _replace_submodule(block: Any) -> None:
    block.norm = nn.Sequential(nn.LayerNorm(48), nn.ReLU())


def _replace_submodule_directly(block: Any) -> None:
    block._modules["norm"] = nn.Identity()


def _replace_parameter(block: Any) -> None:
    block.up.weight = nn.Parameter(torch.zeros(96, 48).t().contiguous().t())


def _replace_parameter_directly(block: Any) -> None:
    block.up._parameters["weight"] = nn.Parameter(torch.ones(96, 48, dtype=torch.float32) * 0.01)


def _remove_parameter(block: Any) -> None:
    block.up.bias = None


def _hook(block: Any) -> None:
    block.down.register_forward_hook(lambda module, args, output: output + 7)


def _pre_hook(block: Any) -> None:
    block.register_forward_pre_hook(lambda module, args: (args[0] + 7,))


def _parametrize(block: Any) -> None:
    class Halve(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    nn.utils.parametrize.register_parametrization(block.up, "weight", Halve())


def _other_class(block: Any) -> None:
    class Doubled(module_zoo.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    block.__class__ = Doubled


def _own_forward(block: Any) -> None:
    block.forward = lambda x: x * 0


def _double(block: Any) -> None:
    block.double()


@pytest.mark.parametrize(
    "change",
    [
        _set_attribute,
        _set_attribute_below,
        _replace_submodule,
        _replace_submodule_directly,
        _replace_parameter,
        _replace_parameter_directly,
        _remove_parameter,
        _hook,
        _pre_hook,
        _parametrize,
        _other_class,
        _own_forward,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
def test_a_change_between_two_calls_is_noticed(
    block: nn.Module, change: Callable[[Any], None]
) -> None:
    x = module_zoo.example("Block")
    with torch.no_grad():
        before = block(x)
        change(block)
        answer = block(x)
        with eagercache.enable(ops=(), on_miss="native"):
            expected = block(x)
    torch.testing.assert_close(answer, expected)
    assert not torch.allclose(answer, before, atol=1e-3)


def test_a_method_of_the_class_is_replaced(
    block: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = module_zoo.example("Block")
    monkeypatch.setattr(module_zoo.Block, "forward", lambda self, x: x - 5)
    with torch.no_grad():
        torch.testing.assert_close(block(x), x - 5)


def test_training_mode_and_back(block: nn.Module) -> None:
    x = module_zoo.example("Block")
    with torch.no_grad():
        block.train()
        _, by_kernel = answered_by_kernel(block, x)
        assert not by_kernel  # the kernel was made for eval mode
        block.eval()
        block(x)
        _, by_kernel = answered_by_kernel(block, x)
        assert by_kernel


def test_calls_that_need_gradients_are_the_forwards(block: nn.Module) -> None:
    x = module_zoo.example("Block")
    answer, by_kernel = answered_by_kernel(block, x)
    assert not by_kernel
    answer.sum().backward()
    assert block.up.weight.grad is not None
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    _, by_kernel = answered_by_kernel(block, x)
    assert by_kernel
    _, by_kernel = answered_by_kernel(block, x.clone().requires_grad_())
    assert not by_kernel


def test_global_hooks_autocast_modes_and_inference(block: nn.Module) -> None:
    x = module_zoo.example("Block")
    with torch.no_grad():
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: output + 1 if module is block else None
        )
        try:
            hooked, by_kernel = answered_by_kernel(block, x)
        finally:
            handle.remove()
        assert not by_kernel
        torch.testing.assert_close(hooked, forward(block, x) + 1)
        with torch.autocast("cpu", torch.bfloat16):
            _, by_kernel = answered_by_kernel(block, x)
            assert not by_kernel
    with torch.inference_mode():
        answer, by_kernel = answered_by_kernel(block, x)
        assert by_kernel and answer.is_inference()


class PlayedService:
    """Stands for the compile service and remembers what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]] = []

    def submit(
        self, description: dict[str, Any], on_done: Callable[[dict[str, Any]], None]
    ) -> None:
        self.asked.append((description, on_done))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> PlayedService:
    """Stands for the compile service."""
    played = PlayedService()
    monkeypatch.setattr(session, "compile_service", lambda: played)
    return played


def undecided(store: Any, kernel: dict[str, Any], measured: int) -> None:
    """Puts the verdict into the kernel's place that noise hid whether it is faster."""
    store.remove(kernel["key"])
    facts = {**kernel["facts"], "reason": "undecided", "measured": str(measured)}
    store.publish({"key": kernel["key"], "kind": "native", "facts": facts})


def meet_in_background(store: Path, model: nn.Module, x: torch.Tensor) -> None:
    """Calls the module until what the store says of it has been heard."""
    eagercache.enable(
        ops=(), modules="auto", on_miss="background", choose="always", cache_dir=store
    )
    for _ in range(4):
        model(x)
        manager.wait()


def test_a_module_whose_gain_noise_hid_is_measured_again_and_gets_its_kernel(
    own_store: Path, service: PlayedService
) -> None:
    with module_kernels(own_store), torch.no_grad():
        entries = session.store.entries()
        (kernel,) = [
            row
            for row in entries
            if row["kind"] == "kernel" and row["facts"]["op"].endswith("module_zoo.Block")
        ]
        objects = [("so", str(next(own_store.rglob(f"{kernel['objects'][0]['digest']}.so"))))]
        undecided(session.store, kernel, 1)
        model, x = module_zoo.make("Block"), module_zoo.example("Block")
        meet_in_background(own_store, model, x)
        assert hits(model) == 0 and "undecided" in explain_module(model)[0]
        ((first, answer_first),) = service.asked
        assert (first["digest"], first["again"]) == (kernel["key"], 1) and first["payload"]

        answer_first({"verdict": "failed"})  # nothing is known that was not
        assert len(service.asked) == 1
        meet_in_background(own_store, model, x)
        _, answer_second = service.asked[1]
        undecided(session.store, kernel, 2)
        answer_second({"verdict": "native"})
        third, answer_third = service.asked[2]
        assert third["again"] == 2 and hits(model) == 0

        session.store.remove(kernel["key"])
        kept = ("key", "kind", "facts", "cpu_features")
        manifest = {name: kernel[name] for name in kept}
        session.store.publish(manifest, objects)
        answer_third({"verdict": "kernel"})
        answer, by_kernel = answered_by_kernel(model, x)
        assert by_kernel and len(service.asked) == 3
        torch.testing.assert_close(answer, forward(model, x))


def test_the_third_measurement_of_a_module_is_final(
    own_store: Path, service: PlayedService
) -> None:
    with module_kernels(own_store), torch.no_grad():
        for kernel in session.store.entries():
            if kernel["kind"] == "kernel":
                undecided(session.store, kernel, 3)
        model, x = module_zoo.make("Block"), module_zoo.example("Block")
        meet_in_background(own_store, model, x)
        assert "undecided" in explain_module(model)[0]
        assert not [row for row, _ in service.asked if "again" in row]


@pytest.mark.parametrize(
    ("before", "reason", "disturbed", "after"),
    [
        (0, "undecided", False, "1"),
        (1, "undecided", False, "2"),
        (0, "undecided", True, "1"),  # it is to be measured
        (2, "undecided", True, "2"),  # and this was no measurement
        (0, "slower", False, None),
    ],
)
def test_a_worker_counts_the_measurements_of_a_module_that_noise_hid(
    before: int,
    reason: str,
    after: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    disturbed: bool,
) -> None:
    timing = Timing(2.0, 1.0, 0.4, 1.2, 9, 1, disturbed=disturbed)
    result = ModuleResult(tmp_path, {}, timing)
    monkeypatch.setattr(module_job, "compile_module", lambda *_: result)
    monkeypatch.setattr(module_job, "decide", lambda *_: (False, reason))
    job = module_job.ModuleJob({"description": {}, "margin": 0.03, "choose": "faster"}, None)
    monkeypatch.setattr(job, "_enter", lambda _: None)
    job._directory, job._measured = tmp_path, before
    tools = mock.Mock(spec=Tools)
    job.begin(lambda: None, lambda _: tools)
    assert job.outcome is not None
    assert (job.outcome.verdict, job.outcome.reason) == ("native", reason)
    tools.rest.assert_called_once()
    assert job.outcome.facts == ({} if after is None else {"measured": after})


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


def test_a_selection_by_class_name_or_function(store: Path, filled: dict[str, Any]) -> None:
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
            options = {"on_miss": "native", "choose": "always", "cache_dir": store}
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
