"""One form of call of one module: its name in the store, its way to a worker, and its kernel."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagercache.base.load import core
from eagercache.base.worker_environment import trusted_paths
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_transfer import pack
from eagercache.callables.objects import CallObjects
from eagercache.callables.outputs import building
from eagercache.callables.standins import NotTransferable
from eagercache.calls.contract import module_contracts
from eagercache.calls.global_state import GlobalState
from eagercache.modules.gains import note_kernel
from eagercache.modules.selection import class_name
from eagercache.modules.shapes import Places, SizeClass
from eagercache.runtime.session import session
from eagercache.service import cuda_gate

FORMAT = 8

# What the queue is told of a module's time: more than of an operator's.
MODULE_NS = 1e7

_WORD_BYTES = 8


@dataclass(frozen=True)
class Form:
    """One form of call of one module, waiting for a verdict."""

    module: weakref.ref[torch.nn.Module]
    identity: str
    key: bytes
    calls: int = 0
    gradients: bool = False

    @property
    def gpu(self) -> int | None:
        """The index of the GPU that the call's tensors are on; None for the CPU."""
        return gpu_of(self.key)


def gpu_of(key: bytes) -> int | None:
    """What the last word of a form's key says (put_state of nn_modules/call/call_state.cc)."""
    word = int.from_bytes(key[-_WORD_BYTES:], "little")
    return word - 1 if word else None


@dataclass
class Missed:
    """A call without a verdict."""

    form: Form
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    state: GlobalState | None = None
    autocast: dict[str, str] = field(default_factory=dict)
    open: Places = ()  # sizes that are to be symbolic, of a kernel for this class
    met: list[list[int]] = field(default_factory=list)
    size_class: SizeClass | None = None
    description: dict[str, Any] | None = None  # what the compile service was sent
    written: torch.cuda.Event | None = None  # behind what wrote the call's tensors
    done: threading.Event = field(default_factory=threading.Event)

    def let_go(self) -> None:
        """Of the call's tensors, when it is described, or will not be."""
        self.args, self.kwargs, self.written, self.state = (), {}, None, None


def describe(digest: str, module: torch.nn.Module, missed: Missed) -> dict[str, Any]:
    """What a compile worker is sent. Raises NotTransferable."""
    tensors = argument_tensors(missed.args, missed.kwargs)
    _refuse_shared(module, missed, tensors)
    gpu = missed.form.gpu
    held = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*tensors, *module.parameters(), *module.buffers())
    )
    state = missed.state
    assert state is not None
    return {
        "kind": "module",
        "digest": digest,
        "op": class_name(module),
        "overload": "",
        "dispatch_key": "CPU" if gpu is None else "CUDA",
        "native_ns": MODULE_NS,
        "tensor_bytes": held,
        "identity": missed.form.identity,
        # The forward may have run already, and left arguments of another kind.
        "key": missed.form.key.hex() if gpu is None and not missed.open else "",
        "payload": pack(module, missed.args, missed.kwargs),
        "open": missed.open,
        "met": missed.met,
        "python_path": trusted_paths(),
        "autocast": missed.autocast,
        "gradients": missed.form.gradients,
        "state": state.as_json() if gpu is None else {**state.as_json(), "num_threads": 1},
        "attention": None if gpu is None else torch._C._get_sdp_priority_order(),
    }


def reason_to_stay_off(form: Form, description: dict[str, Any]) -> str:
    """Why no worker may compile a described call now, for its GPU; empty where one may."""
    if form.gpu is None:
        return ""
    return cuda_gate.reason_to_stay_off_module(form.gpu, description["tensor_bytes"], core)


def _refuse_shared(
    module: torch.nn.Module, missed: Missed, tensors: Sequence[torch.Tensor]
) -> None:
    """Raises NotTransferable for a tensor that is reached twice, where a trace could not be told.

    That two arguments are one tensor is in the key, and the trace is of such a call.
    """
    known: set[int] = set()
    twice: list[torch.Tensor] = []
    for tensor in tensors:
        if id(tensor) in known:
            twice.append(tensor)
        known.add(id(tensor))
    if twice and CallObjects(missed.args, missed.kwargs).found:
        raise NotTransferable("a tensor is given twice, beside an object")
    if any(id(held) in known for held in (*module.parameters(), *module.buffers())):
        raise NotTransferable("it is called with a tensor of its own")


def load_kernel(digest: str, form: Form, entry: Mapping[str, Any]) -> Any:
    """The kernel of an entry. Raises RuntimeError, or what facts that are none lead to."""
    facts = entry["facts"]
    assert core is not None
    assert session.store is not None
    configuration = session.configuration
    replicas = configuration is not None and configuration.replicas
    strides = json.loads(facts["output_strides"])
    training = json.loads(facts["training"]) if form.gradients else None
    kernel = core.load_module(
        (session.store, digest),
        "cpu" if form.gpu is None else f"cuda:{form.gpu}",
        [(bool(kind), index) for kind, index in json.loads(facts["inputs"])],
        [tuple(row) for row in json.loads(facts["ranges"])],
        strides,
        plan=training,
        differs_on_replicas=replicas and facts.get("numerics") != "bitwise",
        writes=[(bool(kind), index, times) for kind, index, times in json.loads(facts["writes"])],
        checks=facts["checks"] == "1",
        contracts=module_contracts(digest, facts, entry["cpu_features"], training),
        noise=json.loads(facts.get("noise", "[]")),
        **building(facts["outputs"], len(strides)),
    )
    note_kernel(form.identity, form.gradients, digest, facts)
    return kernel


def entry_digest(identity: str, key: bytes, choose: str) -> str:
    """The store's name for one form of call of one kind of module: for all GPUs of one kind."""
    assert core is not None
    gpu = gpu_of(key)
    where = "cpu" if gpu is None else f"cuda {core.cuda_architecture(gpu)}"
    form = key[:-_WORD_BYTES].hex()
    text = json.dumps(["eagercache-module", FORMAT, identity, form, where, choose])
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def beside_the_call(missed: Missed) -> Iterator[None]:
    """Lets the block read the call's tensors: on a stream of its own, which waits for theirs.

    The program's streams do not wait, and graphs that its other threads capture stay whole.
    """
    if missed.written is None:
        yield
        return
    assert core is not None
    device = torch.device("cuda", missed.form.gpu)
    with core.RelaxedCapture(), torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_event(missed.written)
        with torch.cuda.stream(stream):
            yield
