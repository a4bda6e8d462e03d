"""Changes of objects' classes, and around objects, while kernels answer calls with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import run_program
from object_world import PRELUDE

HERE = str(Path(__file__).parents[1] / "zoos")

CHECK = """def is_right(model, make):
    def one():
        box = make()
        return inside((model(tokens(1), box), box))
    mine = one()
    core.set_answering(False)
    eager = one()
    core.set_answering(True)
    return is_close(mine, eager)

def check(name, model, make, change):
    steps = [is_right(model, make) for _ in range(4)]
    had = hits(model)
    undo = change()
    steps += [is_right(model, make) for _ in range(4)]
    rows[name] = [had, steps, explain_module(model)[:1]]
    if undo is not None:
        undo()

"""

CHANGES = (
    PRELUDE
    + CHECK
    + """
def update(self, keys):
    self.keys = torch.cat([keys, self.keys], dim=1)
    return self.keys * 3.0

rows = {{}}
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
    model = Reader(Reader.grow)
    check("class attribute", model, lambda: Cache(4), lambda: setattr(Layer, "scale", 2.0))
    check("method", model, lambda: Cache(4), lambda: setattr(Layer, "update", update))
    model = Reader(Reader.aliased)
    boxes = [Box(step=4.0)]
    def own():
        boxes[0] = model.shared
        model.shared.step = 4.0
    def fresh_or_shared():
        if boxes[0] is model.shared:
            model.shared.step = 4.0
            return model.shared
        return Box(step=4.0)
    check("the module has it too", model, fresh_or_shared, own)
    model = Reader(Reader.attribute)
    made = [object_kinds.Box]
    class Box(object_kinds.Box):
        def __init__(self, **held):
            super().__init__(**held)
    Box.__module__, Box.__qualname__ = "object_kinds", "Box"
    check("another class of the name", model, lambda: made[0](value=2.0),
          lambda: made.__setitem__(0, Box))
report(rows=rows)
"""
)


@pytest.fixture(scope="module")
def changed(store: Path) -> dict[str, Any]:
    """Each change: hits before it, whether each answer was right, the explanation."""
    found = run_program(CHANGES.format(here=HERE), store, timeout=500, fills=True)["rows"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "name",
    ["class attribute", "method", "the module has it too", "another class of the name"],
)
def test_a_change_around_an_object_is_noticed(name: str, changed: dict[str, Any]) -> None:
    had, steps, lines = changed[name]
    assert all(steps), (steps, lines)
    assert had > 0 or name in ("method",), lines


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the programs."""
    path = tmp_path_factory.mktemp("objects") / "cache"
    path.mkdir(mode=0o700)
    return path


def put(kind: str, change: str, call: str) -> str:
    return f"    check({change!r}, Reader(Reader.{kind}), lambda: {call}, lambda: {change})\n"


# Of the classes of objects: what a forward reads there, and what says where an object holds it.
OF_CLASSES = {
    "a table in it": put("table", "put(K.Tabled.TABLE, 'a', 3.0)", "K.Tabled()"),
    "items of a named tuple": put(
        "first_of_two",
        "exchange(K.Odd, 'first', 'second')",
        "K.Odd(tokens(1), tokens(1) + 1.0)",
    ),
    "a default of a named tuple": put(
        "named", "defaults(K.Sides.__new__, (5.0,))", "K.Pair(tokens(2))"
    ),
    "a method of a named tuple": put(
        "named", "put(K.Pair, 'scaled', lambda self: self.hidden)", "K.Pair(tokens(2))"
    ),
    "a value of a member": put(
        "level",
        "put(K.Number.FIVE, '_value_', 7)",
        "Box(level=K.Level.LOW, number=K.Number.FIVE, parts=K.Parts.FIRST)",
    ),
    "what a member holds": put("rich", "put(K.Rich.ONE, 'factor', 9.0)", "Box(level=K.Rich.ONE)"),
    "a member": put(
        "level",
        "exchange(K.Level._member_map_, 'LOW', 'HIGH')",
        "Box(level=K.Level.LOW, number=K.Number.TWO, parts=K.Parts.SECOND)",
    ),
    "a slot": put(
        "attribute",
        "put(K.Fixed, 'value', property(lambda self: 5.0))",
        "fixed()",
    ),
    "a slot that can be set": put(
        "attribute", "put(K.Slotted, 'value', property(lambda self: 5.0))", "slotted()"
    ),
    "the constructor of a dataclass": put(
        "replaced", "put(K.Options, '__init__', doubled)", "K.Options(2.0, tokens(1))"
    ),
    # The last: the fields are in another order after it.
    "a field of a dataclass": put(
        "with_fields",
        "put(K.Options.__dataclass_fields__, 'count', None)",
        "K.Options(2.0, tokens(1), 4)",
    ),
}

CLASS_CHANGES = (
    PRELUDE
    + CHECK
    + """
def put(place, name, value):
    held = place if isinstance(place, dict) else vars(place)
    old, had = held.get(name), name in held
    def write(value):
        if isinstance(place, dict):
            place[name] = value
        else:
            setattr(place, name, value)
    if isinstance(place, dict) and value is None:
        del place[name]
    else:
        write(value)
    return lambda: write(old)

def defaults(function, value):
    old, function.__defaults__ = function.__defaults__, value
    return lambda: setattr(function, "__defaults__", old)

def exchange(place, one, other):
    held = place if isinstance(place, dict) else dict(vars(place))
    undo = [put(place, one, held[other]), put(place, other, held[one])] if place is not held else [
        put(place, one, held[other])]
    return lambda: [step() for step in undo]

def doubled(self, value, mask, count=3, box=None):
    vars(self).update(value=value * 2.0, mask=mask, count=count, box=box)

def slotted():
    made = object.__new__(K.Slotted)
    SLOT.__set__(made, 2.0)
    return made

import object_kinds as K
SLOT = vars(K.Slotted)["value"]
FIELDS = [vars(K.Fixed)[name] for name in ("value", "mask")]

def fixed():
    made = object.__new__(K.Fixed)
    for field, value in zip(FIELDS, (2.0, tokens(1))):
        field.__set__(made, value)
    return made
rows = {{}}
with torch.no_grad(), eagercache.enable((), modules="auto", on_miss="wait", choose="always"):
"""
    + "".join(OF_CLASSES.values())
    + "report(rows=list(rows.values()))\n"
)


@pytest.fixture(scope="module")
def classes(store: Path) -> dict[str, Any]:
    """The same for changes of classes."""
    program = CLASS_CHANGES.format(here=HERE)
    found = run_program(program, store, timeout=500, fills=True)["rows"]
    return dict(zip(OF_CLASSES, found, strict=True))


@pytest.mark.parametrize("name", OF_CLASSES)
def test_a_change_of_an_objects_class_is_noticed(name: str, classes: dict[str, Any]) -> None:
    had, steps, lines = classes[name]
    assert all(steps), (steps, lines)
    assert had > 0, lines
