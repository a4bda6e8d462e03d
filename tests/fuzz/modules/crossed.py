"""Sources that are the product of kinds of objects and of the places that hold one.

In the text of a kind O is the object, and VALUE what is in it.
"""

from __future__ import annotations

import re
from random import Random

from fuzz.modules.worlds import Source

# Its name: (statements of the file, the object, how 2.0 is read of it).
KINDS: dict[str, tuple[str, str, str]] = {
    "float subclass": ("class Kind_N(float): pass", "Kind_N(VALUE)", "O * 1.0"),
    "int subclass": ("class Kind_N(int): pass", "Kind_N(VALUE)", "O * 1.0"),
    "str subclass": ("class Kind_N(str): pass", "Kind_N('a' * int(VALUE))", "len(O) * 1.0"),
    "bytes subclass": ("class Kind_N(bytes): pass", "Kind_N(b'a' * int(VALUE))", "len(O) * 1.0"),
    "tuple subclass": ("class Kind_N(tuple): pass", "Kind_N((VALUE,))", "O[0]"),
    "tuple with an attribute": (
        "class Kind_N(tuple):\n    def __new__(cls, value):\n        made = tuple.__new__(cls)\n"
        "        made.value = value\n        return made",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "list with an attribute": (
        "class Kind_N(list):\n    def __init__(self, value): self.value = value",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "dict with an attribute": (
        "class Kind_N(dict):\n    def __init__(self, value): self.value = value",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "set with an attribute": (
        "class Kind_N(set):\n    def __init__(self, value): self.value = value",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "slots": (
        "class Kind_N:\n    __slots__ = ('value',)\n    def __init__(self, value): "
        "self.value = value",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "slots and attributes": (
        "class Kind_N:\n    __slots__ = ('value', '__dict__')\n    def __init__(self, value): "
        "self.value, self.more = value, 1.0",
        *("Kind_N(VALUE)", "O.value * O.more"),
    ),
    "object": (
        "class Kind_N:\n    def __init__(self, value): self.value = value",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "object in an object": (
        "class Kind_N:\n    def __init__(self, value): self.value = value",
        *("Kind_N(Kind_N(VALUE))", "O.value.value"),
    ),
    "object with a property": (
        "class Kind_N:\n    def __init__(self, value): self._value = value\n"
        "    value = property(lambda self: self._value)",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "callable object": (
        "class Kind_N:\n    def __init__(self, value): self.value = value\n"
        "    def __call__(self): return self.value",
        *("Kind_N(VALUE)", "O()"),
    ),
    "bound method": (
        "class Kind_N:\n    def __init__(self, value): self.value = value\n"
        "    def get(self): return self.value",
        *("Kind_N(VALUE).get", "O()"),
    ),
    "closure": ("def kind_N(value): return lambda: value", "kind_N(VALUE)", "O()"),
    "default": ("", "(lambda value=VALUE: value)", "O()"),
    "lambda": ("", "(lambda: VALUE)", "O()"),
    "partial": (
        "import functools\ndef kind_N(value): return value",
        *("functools.partial(kind_N, VALUE)", "O()"),
    ),
    "partial of partial": (
        "import functools\ndef kind_N(value, more): return value",
        *("functools.partial(functools.partial(kind_N, VALUE), 1.0)", "O()"),
    ),
    "namedtuple": (
        "import collections\nKind_N = collections.namedtuple('Kind_N', ['value'])",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass Kind_N:\n    value: float",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "frozen dataclass": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Kind_N:\n    value: float",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "type": ("def kind_N(value): return type('Kind_N', (), {'value': value})", "kind_N(VALUE)",
             "O.value"),
    "enum": (
        "import enum\nclass Kind_N(enum.Enum):\n    TWO = 2.0\n    THREE = 3.0",
        *("Kind_N(float(VALUE))", "O.value"),
    ),
    "date": ("import datetime", "datetime.date(2000 + int(VALUE), 1, 1)", "O.year - 2000.0"),
    "timedelta": ("import datetime", "datetime.timedelta(int(VALUE))", "O.days * 1.0"),
    "Fraction": ("import fractions", "fractions.Fraction(int(VALUE))", "O.numerator * 1.0"),
    "Decimal": ("import decimal", "decimal.Decimal(int(VALUE))", "float(O)"),
    "path": ("import pathlib", "pathlib.Path('a' * int(VALUE))", "len(O.name) * 1.0"),
    "pattern": ("import re", "re.compile('a' * int(VALUE))", "len(O.pattern) * 1.0"),
    "range": ("", "range(int(VALUE))", "len(O) * 1.0"),
    "slice": ("", "slice(int(VALUE))", "O.stop * 1.0"),
    "complex": ("", "complex(VALUE, 1.0)", "O.real"),
    "bytes": ("", "bytes(int(VALUE))", "len(O) * 1.0"),
    "frozenset": ("", "frozenset(range(int(VALUE)))", "len(O) * 1.0"),
    "set": ("", "set(range(int(VALUE)))", "len(O) * 1.0"),
    "tuple": ("", "(1.0, (VALUE,))", "O[1][0]"),
    "long tuple": ("", "(0.0,) * 99 + (VALUE,)", "O[99]"),
    "long list": ("", "[0.0] * 99 + [VALUE]", "O[99]"),
    "deep list": (
        "", "[[[[[[[[[[[[[[[VALUE]]]]]]]]]]]]]]]",
        "O[0][0][0][0][0][0][0][0][0][0][0][0][0][0][0]",
    ),
    "dict": ("", "{'a': VALUE}", "O['a']"),
    "dict by numbers": ("", "{VALUE: 'a'}", "next(iter(O))"),
    "deque": ("import collections", "collections.deque([VALUE])", "O[0]"),
    "array": ("import array", "array.array('d', [VALUE])", "O[0]"),
    "numpy scalar": ("import numpy", "numpy.float64(VALUE)", "float(O)"),
    "numpy array": ("import numpy", "numpy.array([VALUE])", "float(O[0])"),
    "numpy dtype": ("import numpy", "numpy.dtype('f4' if VALUE == 2.0 else 'f8')",
                    "(2.0 if O.itemsize == 4 else 3.0)"),
    "SimpleNamespace": ("import types", "types.SimpleNamespace(value=VALUE)", "O.value"),
    "Namespace": ("import argparse", "argparse.Namespace(value=VALUE)", "O.value"),
    "UserDict": ("import collections", "collections.UserDict(a=VALUE)", "O['a']"),
    "UserList": ("import collections", "collections.UserList([VALUE])", "O[0]"),
    "OrderedDict": ("import collections", "collections.OrderedDict(a=VALUE)", "O['a']"),
    "defaultdict": ("import collections", "collections.defaultdict(float, a=VALUE)", "O['a']"),
    "Counter": ("import collections", "collections.Counter(a=VALUE)", "O['a']"),
    "mappingproxy": ("import types", "types.MappingProxyType({'a': VALUE})", "O['a']"),
    "exception": ("", "ValueError(VALUE)", "O.args[0]"),
    "exception subclass": ("class Kind_N(Exception): pass", "Kind_N(VALUE)", "O.args[0]"),
    "deque subclass": (
        "import collections\nclass Kind_N(collections.deque): pass", "Kind_N([VALUE])", "O[0]"
    ),
    "threading.local subclass": (
        "import threading\nclass Kind_N(threading.local):\n"
        "    def __init__(self, value): self.value = value",
        *("Kind_N(VALUE)", "O.value"),
    ),
    "itemgetter": ("import operator", "operator.itemgetter(int(VALUE))", "O((0.0, 1.0, 2.0, 3.0))"),
    "torch.Size": ("", "torch.Size([int(VALUE)])", "O[0] * 1.0"),
    "torch.dtype": (
        "", "{2.0: torch.float16, 3.0: torch.float32}[float(VALUE)]", "O.itemsize * 1.0"
    ),
    "torch.finfo": ("", "torch.finfo({2.0: torch.float16, 3.0: torch.float32}[float(VALUE)])",
                    "O.bits / 8.0"),
    "torch.device": ("", "torch.device('cpu', 0) if VALUE == 2.0 else torch.device('meta')",
                     "(2.0 if O.type == 'cpu' else 3.0)"),
    "Generator": ("", "torch.Generator().manual_seed(int(VALUE))", "O.initial_seed() * 1.0"),
    "transformers' config": (
        "import transformers", "transformers.PretrainedConfig(value=VALUE)", "O.value"
    ),
    "ModelOutput": (
        "from transformers.utils import ModelOutput", "ModelOutput(value=VALUE)", "O['value']"
    ),
    "module": ("", "nn.LeakyReLU(VALUE)", "O.negative_slope"),
    "string": ("", "('a' * int(VALUE))", "len(O) * 1.0"),
    "big integer": ("", "(10 ** 30 + int(VALUE))", "(O - 10 ** 30) * 1.0"),
    "function of torch": (
        "", "{2.0: torch.numel, 3.0: torch.is_tensor}[float(VALUE)]", "O(torch.zeros(2)) * 1.0"
    ),
    "method of Tensor": (
        "", "{2.0: torch.Tensor.dim, 3.0: torch.Tensor.numel}[float(VALUE)]",
        "O(torch.zeros(2, 2)) * 1.0",
    ),
    "builtin": ("", "{2.0: min, 3.0: max}[float(VALUE)]", "O(2.0, 3.0)"),
    "method of a builtin": ("", "'a'.__mul__ if VALUE == 2.0 else 'aa'.__mul__", "len(O(2)) * 1.0"),
    "function of math": (
        "import math", "{2.0: math.floor, 3.0: math.ceil}[float(VALUE)]", "O(2.5) * 1.0"
    ),
    "method of a list": ("", "[VALUE].__len__ if VALUE == 2.0 else [1, 1].__len__", "O() * 1.0"),
}  # fmt: skip

# Its name: sections of a source (worlds.py), with O for the object and READ for the value.
PLACES: dict[str, dict[str, str]] = {
    "global": {"setup": "HELD_N = O", "set": "HELD_N = O", "at": "HELD_N"},
    "attribute": {"init": "self.held_N = O", "set": "self.held_N = O", "at": "self.held_N"},
    "attribute of a submodule": {
        "init": "self.part_N = nn.Identity(); self.part_N.held = O",
        "set": "self.part_N.held = O",
        "at": "self.part_N.held",
    },
    "attribute of the class": {
        "body": "    held_N = [O]", "set": "World.held_N = [O]", "at": "self.held_N[0]",
    },
    "global object": {
        "setup": "class Place_N: pass\nPLACE_N = Place_N()\nPLACE_N.held = O",
        "set": "PLACE_N.held = O",
        "at": "PLACE_N.held",
    },
    "namespace": {
        "setup": "import argparse\nARGS_N = argparse.Namespace(held=O)",
        "set": "ARGS_N.held = O",
        "at": "ARGS_N.held",
    },
    "global class": {
        "setup": "class Place_N:\n    held = [O]", "set": "Place_N.held = [O]",
        "at": "Place_N.held[0]",
    },
    "default": {
        "setup": "def place_N(held=O): return READ",
        "set": "place_N.__defaults__ = (O,)",
        "read": "place_N()",
        "at": "held",
        "object": "place_N.__defaults__[0]",
    },
    "cell": {
        "setup": "def make_N(held): return lambda: READ\nplace_N = make_N(O)",
        "set": "place_N.__closure__[0].cell_contents = O",
        "read": "place_N()",
        "at": "held",
        "object": "place_N.__closure__[0].cell_contents",
    },
    "list": {"setup": "LIST_N = [O]", "set": "LIST_N[0] = O", "at": "LIST_N[0]"},
    "dict": {"setup": "DICT_N = {'a': O}", "set": "DICT_N['a'] = O", "at": "DICT_N['a']"},
    "tuple": {"setup": "TUPLE_N = (O,)", "set": "TUPLE_N = (O,)", "at": "TUPLE_N[0]"},
    "list of the module": {
        "init": "self.list_N = [O]", "set": "self.list_N[0] = O", "at": "self.list_N[0]",
    },
    "dict beside a submodule": {
        "init": "self.sub_N = nn.Identity(); self.dict_N = {'sub': self.sub_N, 'held': O}",
        "set": "self.dict_N['held'] = O",
        "at": "self.dict_N['held']",
    },
}  # fmt: skip


def crossed(seed: int, count: int, word: str) -> list[Source]:
    """That many products whose names match ``word``, drawn by the seed."""
    every = [
        (kind, place) for kind in KINDS for place in PLACES if re.search(word, _name(kind, place))
    ]
    chosen = Random(f"{seed}:crossed").sample(every, min(count, len(every)))
    return [_source(kind, place) for kind, place in sorted(chosen)]


def _name(kind: str, place: str) -> str:
    return f"crossed: {kind} in a {place}"


def _source(kind: str, place: str) -> Source:
    setup, made, read = KINDS[kind]
    parts = PLACES[place]
    start = made.replace("VALUE", "2.0")
    at = read.replace("O", parts["at"]) if place not in ("default", "cell") else read

    def filled(text: str, held: str) -> str:
        inner = read.replace("O", "held")
        return text.replace("READ", inner).replace("(O", f"({held}").replace(
            "[O]", f"[{held}]").replace("=O)", f"={held})").replace("= O", f"= {held}").replace(
            ": O}", f": {held}}}")  # fmt: skip

    has = {
        "read": [parts.get("read", at)],
        "set": [filled(parts["set"], made)],
        "values": ["3.0, 2, 2.5"],
        "start": ["2.0"],
    }
    inside = re.match(r"O[.\[][\w.'\[\]]+", read)
    if inside:  # the same object with another value in it; where that cannot be, it is not made
        target = inside[0].replace("O", parts.get("object", parts["at"]), 1)
        has["also"] = [f"{target} = 3.0 // {target} = 2.0"]
    if "init" in parts:
        has["init"] = [filled(parts["init"], start)]
    lines = setup.splitlines() + filled(parts.get("setup", ""), start).splitlines()
    return Source(_name(kind, place), lines, filled(parts.get("body", ""), start).splitlines(), has)
