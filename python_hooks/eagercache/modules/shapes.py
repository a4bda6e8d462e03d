"""Modules called with tensors of many sizes: which calls share a kernel, and how many are made.

Forms of call that differ in sizes of at least 2 alone are a class. The second size of one asks for
a kernel with symbolic sizes, in which those are open that were seen to change; a later one of the
class is for sizes that the first does not hold for. Where there can be none, each size has a kernel
of its own, and no more than `MAX_COMPILES` of all kinds are made or taken from the store.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from eagercache.base.load import core
from eagercache.callables.arguments import OPEN
from eagercache.callables.used_functions import changed_function
from eagercache.calls.trace_rows import rows_in

MAX_COMPILES = 6  # of one module and structure of arguments, whatever their sizes
MAX_KERNELS = 3  # with symbolic sizes, of one class
# Calls of one size before it gets a kernel of its own where that of its class is slower.
EXACT_AT = 64
_MET = 32  # sizes that are remembered
_TOLD = 3  # of them to a worker

Sizes = tuple[tuple[int, ...], ...]
Rows = tuple[tuple[int, ...], ...]  # sizes, OPEN where open
Places = tuple[tuple[int, int], ...]
Load = Callable[[str, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class SizedForm:
    """A form of call, its sizes apart.

    Attributes:
        structure: its key without sizes.
        pattern: its key with sizes of 1 and the order of strides, and what is not dense as it is;
            None where there is no tensor.
        sizes: of each tensor and count; zeros of a tensor that was given before.
    """

    structure: bytes
    pattern: bytes | None
    sizes: Sizes


def sized_form(key: bytes) -> SizedForm:
    """Takes a form's key (read_arguments of nn_modules/arguments.h) apart."""
    assert core is not None
    words = list(struct.unpack(f"<{len(key) // 8}Q", key))
    structure = list(words)
    rows = core.module_form_tensors(key)
    told = []
    for word, sizes, order, kind in rows:
        rank = len(sizes)
        told.append((0,) * rank if kind == "same" else tuple(sizes))
        if kind == "count":
            structure[word + 1] = words[word + 1] = 0
            continue
        structure[word + 1 : word + 1 + 2 * rank] = [0] * (2 * rank)
        if kind == "dense":  # another one is as it is
            words[word + 1 : word + 1 + rank] = [1 if size == 1 else 0 for size in sizes]
            words[word + 1 + rank : word + 1 + 2 * rank] = order
        elif kind == "same":
            words[word + 1 : word + 1 + 2 * rank] = [0] * (2 * rank)
    return SizedForm(
        struct.pack(f"<{len(structure)}Q", *structure),
        struct.pack(f"<{len(words)}Q", *words) if rows else None,
        tuple(told),
    )


@dataclass
class _Kernel:
    """A loaded kernel with symbolic sizes; every module of the identity may have it."""

    kernel: Any
    sizes: list[list[int]]
    choice: list[tuple[int, bool]]
    functions: list[list[str]]  # what the trace ran, for `changed_function`


@dataclass
class SizeClass:
    """What is known of one class of calls of one kind of module. Guarded by the book's lock."""

    name: str  # digest of what its entries' names are made of
    met: dict[Sizes, None] = field(default_factory=dict)
    kernels: list[_Kernel] = field(default_factory=list)
    tried: list[Rows] = field(default_factory=list)
    closed: str = ""  # why no further kernel with symbolic sizes is made
    asked: bool = False  # a worker makes one

    def changed(self) -> Places:
        """(tensor or count, dimension) of the sizes that differ among those met."""
        all_sizes = list(self.met)
        first = all_sizes[0]
        return tuple(
            (tensor, dimension)
            for tensor, sizes in enumerate(first)
            for dimension in range(len(sizes))
            if len({other[tensor][dimension] for other in all_sizes}) > 1
        )

    def digest(self, index: int) -> str:
        """The store's name of its kernel number ``index``."""
        return hashlib.sha256(f"{self.name} sizes {index}".encode()).hexdigest()

    def told(self, sizes: Sizes, places: Places) -> list[list[int]]:
        """Values of the places among the sizes met, the given ones left out."""
        others = [other for other in self.met if other != sizes]
        return [[other[t][d] for t, d in places] for other in others[-_TOLD:]]


class SizeBook:
    """All classes of calls of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._classes: dict[str, SizeClass] = {}
        self._compiles: dict[tuple[str, bytes], set[str]] = {}

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._classes.clear()
            self._compiles.clear()

    def meet(self, name: str, form: SizedForm) -> SizeClass | None:
        """The class that a call without a kernel of its own belongs to.

        ``name``: of the entry whose key is the form's pattern.
        """
        if form.pattern is None:
            return None
        with self._lock:
            known = self._classes.setdefault(name, SizeClass(name))
            known.met.pop(form.sizes, None)
            known.met[form.sizes] = None
            while len(known.met) > _MET:
                del known.met[next(iter(known.met))]
            return known

    def wants(self, size_class: SizeClass, sizes: Sizes) -> Places:
        """The sizes that a further kernel, for a call of ``sizes``, is to leave open.

        No kernel that is there answers that call.
        None: there is to be no such kernel. Else the caller asks a worker for it and says
        `asked_for` when that is over.
        """
        with self._lock:
            places = size_class.changed()
            rows = tuple(
                tuple(OPEN if (tensor, d) in places else size for d, size in enumerate(row))
                for tensor, row in enumerate(sizes)
            )
            full = len(size_class.kernels) >= MAX_KERNELS
            if not places or full or size_class.closed or size_class.asked:
                return ()
            # A kernel that is there and leaves as much open has said that it does not hold: the
            # forward is another program for such sizes.
            if not size_class.kernels and any(_covers(tried, rows) for tried in size_class.tried):
                return ()
            size_class.tried.append(rows)
            size_class.asked = True
            return places

    def asked_for(self, size_class: SizeClass, *, again: bool = False) -> None:
        """The worker has answered. ``again``: with nothing, so that it may be asked once more."""
        with self._lock:
            size_class.asked = False
            if again and size_class.tried:
                size_class.tried.pop()

    def may_compile(self, identity: str, form: SizedForm, digest: str) -> bool:
        """Whether one more kernel may be made for calls of this structure; if so, counts it."""
        with self._lock:
            made = self._compiles.setdefault((identity, form.structure), set())
            if digest not in made and len(made) >= MAX_COMPILES:
                return False
            made.add(digest)
            return True

    def retire(self, digest: str, reason: str) -> None:
        """No kernel of the class whose entry ``digest`` is is used or made any more."""
        with self._lock:
            for known in self._classes.values():
                if digest in map(known.digest, range(len(known.kernels))):
                    known.kernels.clear()
                    known.closed = reason

    def load(
        self,
        size_class: SizeClass,
        store: Any,
        numerics: str,
        module: torch.nn.Module,
        load: Load,
    ) -> None:
        """Takes the class's kernels from the store, as many as there are.

        ``load(digest, entry)`` opens one. Raises StoreError.
        """
        assert core is not None
        while not size_class.closed and len(size_class.kernels) < MAX_KERNELS:
            digest = size_class.digest(len(size_class.kernels))
            entry = store.find(digest)
            if entry is None:
                return
            facts = entry["facts"]
            if entry["kind"] != "kernel":
                size_class.closed = facts.get("reason") or "its forward is faster"
                return
            if numerics == "bitwise" and facts.get("numerics") != "bitwise":
                size_class.closed = "the kernel does not equal the forward bit for bit"
                return
            functions = rows_in(facts["functions"])
            if changed_function(functions, module) is not None:
                store.remove(digest)
                return
            kernel = load(digest, entry)
            core.module_open_sizes(kernel)
            choice = [(int(count), bool(chosen)) for count, chosen in json.loads(facts["choice"])]
            with self._lock:
                sizes = json.loads(facts["sizes"])
                size_class.kernels.append(_Kernel(kernel, sizes, choice, functions))
                size_class.tried.append(tuple(map(tuple, sizes)))

    def install(
        self, size_class: SizeClass, module: torch.nn.Module, identity: str, key: bytes
    ) -> str:
        """Gives the module the class's kernels; what they say to its call ``key``.

        "kernel", "native" (one holds for it, and is slower) or "".
        """
        assert core is not None
        for known in list(size_class.kernels):
            # Code may be replaced in a running process, too.
            if changed_function(known.functions, module) is None:
                core.module_install_class(
                    module, identity, key, known.sizes, known.kernel, known.choice
                )
        return core.module_class_answers(module, key)


def _covers(tried: Rows, rows: Rows) -> bool:
    """Whether a kernel that leaves open what ``tried`` does is for all that ``rows`` stand for."""
    return all(
        mine in (OPEN, other)
        for sizes, others in zip(tried, rows, strict=True)
        for mine, other in zip(sizes, others, strict=True)
    )
