"""Values that a forward reads beside its arguments: when they change no kernel has the old ones.

And where it is as it was, kernels answer again.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import module_reading
import pytest
import torch
from conftest import module_hits as hits
from conftest import module_kernels, run_program
from eagercache.base.load import core
from eagercache.modules import held_parts, watched_rows
from eagercache.modules.manager import explain_module, manager

HERE = str(Path(__file__).parents[1] / "zoos")

FILL = """
import sys
sys.path.insert(0, {here!r})
import torch, eagercache, module_reading
from eagercache.modules.manager import explain_module, manager
torch.set_num_threads(1)
torch.manual_seed(1)
model = module_reading.Reading().eval()
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    for _ in range(3):
        model(torch.ones(4, 8))
    report(hits=[row.hits for part, row in manager.stats() if part is model],
           lines=explain_module(model))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the module's kernel."""
    path = tmp_path_factory.mktemp("watch") / "cache"
    path.mkdir(mode=0o700)
    filled = run_program(FILL.format(here=HERE), path, timeout=300, fills=True)
    assert filled["hits"] == [2], filled
    return path


@pytest.fixture
def reading(store: Path) -> Iterator[Any]:
    """The module, answered by the kernel of the store."""
    torch.manual_seed(1)
    model = module_reading.Reading().eval()
    with module_kernels(store), torch.no_grad():
        assert settle(model)
        yield model


def settle(model: torch.nn.Module) -> bool:
    """Whether kernels answer, after as many calls as it takes to look."""
    x = torch.linspace(-1, 1, 32).view(4, 8)
    for _ in range(4):
        model(x)
        manager.wait(60)
    before = hits(model)
    model(x)
    return hits(model) > before


def right(model: torch.nn.Module) -> bool:
    """Whether the next call is what the module's forward gives."""
    x = torch.linspace(-1, 1, 32).view(4, 8)
    assert core is not None
    answer = model(x)
    core.set_answering(False)
    try:
        return torch.allclose(answer, model(x), atol=1e-5)
    finally:
        core.set_answering(True)


Undo = Callable[[], object]


def _set(owner: Any, name: str, value: Any) -> Undo:
    old = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old)


def _put(owner: Any, key: Any, value: Any) -> Undo:
    old = owner[key]
    owner[key] = value
    return lambda: owner.__setitem__(key, old)


def _shadow(_: Any) -> Undo:
    """An attribute of the object where there was one of its class."""
    module_reading.SETTINGS.power = lambda: 3.0  # type: ignore[method-assign]
    return lambda: delattr(module_reading.SETTINGS, "power")


def _cell(_: Any) -> Undo:
    (cell,) = module_reading.times.__closure__  # type: ignore[attr-defined]
    cell.cell_contents = 0.9
    return lambda: setattr(cell, "cell_contents", 0.75)


def _append(owner: list[Any], value: Any) -> Undo:
    owner.append(value)
    return owner.pop


def _leave_out(_: Any) -> Undo:
    module_reading.NAMES.remove("tanh")
    module_reading.NAMES.add("sin")
    return lambda: (module_reading.NAMES.clear(), module_reading.NAMES.add("tanh"))


def _environment(_: Any) -> Undo:
    os.environ["TEST_READING"] = "2"
    return lambda: os.environ.pop("TEST_READING")


r = module_reading
CHANGES: dict[str, Callable[[Any], Undo]] = {
    "global number": lambda m: _set(r, "FACTOR", 2.5),
    "global function": lambda m: _set(r, "shifted", torch.sin),
    "global object": lambda m: _set(r, "SETTINGS", type("Other", (r.Settings,), {"gain": 7.0})()),
    "key of a table": lambda m: _put(r.TABLE, "mode", "sin"),
    "item of a list in a table": lambda m: _put(r.TABLE["scale"], 1, 4.0),
    "set": _leave_out,
    "value of a class": lambda m: _set(r.Settings, "gain", -1.0),
    "value of an object": lambda m: _set(r.SETTINGS, "offset", 9.0),
    "value behind a method": lambda m: _put(r.SETTINGS.nested, "power", 3.0),
    "method, shadowed": _shadow,
    "default": lambda m: _put(r.shifted.__defaults__[0], 0, 5.0),
    "closure": _cell,
    "object in an attribute": lambda m: _set(m.config, "offset", -2.0),
    "list in an attribute": lambda m: _put(m.steps, 0, 2.0),
    "dict behind a proxy in an attribute": lambda m: _put(r.BEHIND, "shift", -3.0),
    "list in the class": lambda m: _append(r.Reading.weights, 1.0),
    "environment variable": _environment,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_changes_while_kernels_answer_is_noticed(reading: Any, name: str) -> None:
    undo = CHANGES[name](reading)
    try:
        before = hits(reading)
        assert right(reading), explain_module(reading)
        assert hits(reading) == before
        settle(reading)
        assert right(reading), explain_module(reading)
    finally:
        undo()
    assert settle(reading), explain_module(reading)
    assert right(reading)


def test_an_equal_value_is_no_change(reading: Any) -> None:
    before = hits(reading)
    undo = [
        _set(r, "FACTOR", float("1.5")),
        _put(r.TABLE, "mode", "".join(["ta", "nh"])),
        _put(r.TABLE["scale"], 1, float("3.0")),
        _set(reading.config, "offset", float("0.5")),
    ]
    assert right(reading)
    assert hits(reading) == before + 1
    for one in undo:
        one()


def test_what_the_forward_does_not_read_may_change(reading: Any) -> None:
    r.UNREAD = 1  # type: ignore[attr-defined]
    try:
        before = hits(reading)
        assert right(reading)
        assert hits(reading) == before + 1
    finally:
        del r.UNREAD  # type: ignore[attr-defined]


def test_values_that_never_stay_refuse_the_module(reading: Any) -> None:
    factor = r.FACTOR
    try:
        for step in range(40):
            r.FACTOR = factor * (step % 2 + 1)
            assert right(reading)
            manager.wait(60)
    finally:
        r.FACTOR = factor
    assert "change from call to call" in "".join(explain_module(reading))


def test_what_is_looked_at_may_change_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[Any, Any] = {"a": 1.0, "b": [2.0]}
    names = {"c", "d"}
    plain = held_parts.plain_value

    def grown(value: Any) -> Any:
        table[len(table)] = 0.0
        names.add(str(len(names)))
        return plain(value)

    monkeypatch.setattr(held_parts, "plain_value", grown)
    values = watched_rows.Rows()
    values.inside(table)
    values.inside(names)
    assert sorted(sort for sort, *_ in values.made) == ["dict", "list", "set"]


def test_nothing_lives_longer_for_being_watched(reading: Any) -> None:
    class Holder:
        def __init__(self, held: object) -> None:
            self.held = held

    values = watched_rows.Rows()
    tensor = torch.ones(3)
    cycle: list[Any] = [1.0]
    cycle.append(cycle)
    for value in (Holder(reading), [tensor], {"a": (1, {"b": tensor})}, cycle, Holder(2.0)):
        values.inside(value)
    # Of those with a module or tensor inside there is nothing; of the others what is in them.
    assert sorted(sort for sort, *_ in values.made) == ["class", "dict", "list", "type"]
    model = module_reading.Reading().eval()
    assert settle(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_more_values_than_are_watched_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_rows, "_MAX_VALUES", 2)
    values = watched_rows.Rows()
    with pytest.raises(watched_rows.Unwatchable, match="more than 2 values"):
        for name in ("FACTOR", "TABLE", "NAMES"):
            values.chain((name,), vars(module_reading))
