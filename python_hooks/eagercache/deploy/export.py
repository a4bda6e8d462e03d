"""Makes an artifact of a module: compiled and proved by a worker, written with its weights."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagercache.base import config, environment
from eagercache.base.load import core, usable, why_unavailable
from eagercache.base.signed_file import seconds_of
from eagercache.base.toolchain import pick_isa
from eagercache.base.worker_environment import trusted_paths
from eagercache.base.worker_variables import program_variables
from eagercache.callables import call_hooks
from eagercache.callables.arguments import argument_tensors
from eagercache.callables.module_identity import Unfit, identify
from eagercache.callables.module_transfer import pack
from eagercache.callables.outputs import build_unflatten
from eagercache.callables.standins import NotTransferable
from eagercache.callables.surroundings import autocast_here, own_attention_order
from eagercache.calls.global_state import GlobalState
from eagercache.calls.storage import extent
from eagercache.deploy.layout import (
    CannotDeploy,
    constant_rows,
    device_of,
    input_names,
    program_text,
)
from eagercache.modules.selection import class_name
from eagercache.service import cuda_gate
from eagercache.service.settings import ServiceSettings, for_gpu
from eagercache.service.worker_process import WorkerLost, WorkerProcess

_TIMEOUT = 3600.0  # seconds, for all that a worker does


class _Worker:
    """A compile worker, with a store of its own, in which nothing is published.

    Where exports are of modules on a GPU, a further one for each of those, which sees that alone.
    """

    def __init__(self, folder: Path) -> None:
        settings = config.read_settings()
        store = folder / "store"
        store.mkdir(mode=0o700)
        self._settings = ServiceSettings(
            store_root=str(store),
            environment=environment.environment_text(cxx=settings.cxx),
            cxx=settings.cxx,
            awaited=True,
            request_timeout=_TIMEOUT,
        )
        self._processes: dict[int | None, WorkerProcess] = {}

    def ask(
        self, description: Mapping[str, Any], output: Path, device: torch.device
    ) -> dict[str, Any]:
        """The response; libraries are in ``output``. Raises CannotDeploy."""
        gpu = device.index if device.type == "cuda" else None
        settings = self._settings if gpu is None else for_gpu(self._settings, gpu)
        request = {
            "description": description,
            "store_root": self._settings.store_root,
            "environment": self._settings.environment,
            "choose": "always",
            "numerics": "accurate",
            "margin": 0.0,
            "cxx": self._settings.cxx,
            "output": str(output),
            "variables": program_variables(os.environ),
        }
        try:
            if gpu not in self._processes:
                self._processes[gpu] = WorkerProcess(settings)
            return self._processes[gpu].ask(request, settings)
        except WorkerLost as error:
            # One that is lost is of no use to the next export.
            self._processes.pop(gpu).kill()
            raise CannotDeploy(str(error)) from error

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes.values():
            process.kill()


_shared: contextvars.ContextVar[_Worker | None] = contextvars.ContextVar("worker", default=None)


@contextlib.contextmanager
def one_worker() -> Iterator[None]:
    """Lets exports in the block, on this thread, share a compile worker, which starts slowly."""
    with tempfile.TemporaryDirectory(prefix="eagercache-export-") as folder:
        worker = _Worker(Path(folder))
        token = _shared.set(worker)
        try:
            yield
        finally:
            _shared.reset(token)
            worker.close()


@dataclass(frozen=True)
class Exported:
    """What `export_module` wrote.

    Attributes:
        bytes: of the file.
        constants: how many the module has, folded ones among them.
        folded: how many of them are computed once for each version of the weights.
        numerics: "bitwise" or "accurate": how the answers compare with the forward's.
        native_ns: time of the forward in the worker, in nanoseconds a call.
        kernel_ns: the same of the deployed module.
        proved_sizes: values of the open sizes at which it was compared.
    """

    path: Path
    bytes: int
    constants: int
    folded: int
    numerics: config.Numerics
    native_ns: float
    kernel_ns: float
    proved_sizes: tuple[int, ...] = ()


def export_module(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | os.PathLike[str],
    key: str | os.PathLike[str],
    open_sizes: Mapping[str, Sequence[int]] | None = None,
    threads: int | None = None,
    expires: datetime.datetime | datetime.timedelta | None = None,
) -> Exported:
    """Writes a signed file that answers calls like ``module(*args, **kwargs)``, weights included.

    Another process traces the call, compiles it, and compares the result with the forward on
    several draws of data, as for every kernel of a module; the module must be a pure function of
    tensors and its own state (``model.eval()`` before), on the CPU or on one GPU, on whose kind
    alone it runs then. What it computes from its weights alone is folded: computed here, stored,
    and again with each update. Under autocast its casts are part of it. Nothing of a cache is read
    or changed.

    Args:
        module: what to deploy. It is not changed.
        args: of a call like those that will be made.
        kwargs: the same, by name.
        path: the artifact; one that is there is replaced once the new one is whole.
        key: the private Ed25519 key to sign with (PEM), as of ``eagercache bundle keygen``.
        open_sizes: by an input's name, the dimensions whose sizes are left open, at least 2; all
            others are those of ``args``.
        threads: of torch, for compiled code of the CPU; ``torch.get_num_threads()`` by default.
        expires: when it is to be opened no more (a naive time is local), or in how long; None:
            never.

    Raises:
        DeployError: why the module cannot be deployed, in one line.
    """
    from eagercache.deploy.errors import DeployError

    if core is None or not usable():
        raise DeployError(why_unavailable(), "unsupported")
    try:
        seconds = seconds_of(expires)
    except (TypeError, ValueError) as error:
        raise DeployError(str(error), "invalid_argument") from None
    with tempfile.TemporaryDirectory(prefix="eagercache-export-") as folder:
        try:
            return _Export(module, tuple(args), dict(kwargs or {}), Path(folder)).write(
                Path(path), Path(key), dict(open_sizes or {}), threads, seconds
            )
        except (CannotDeploy, Unfit, NotTransferable) as error:
            raise DeployError(
                f"{class_name(module)} cannot be deployed: {error}", "unsupported"
            ) from error
        except core.StoreError as error:
            raise DeployError(str(error), error.code) from error


class _Export:
    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        folder: Path,
    ) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self._folder = folder
        self._identity = identify(module)
        self._arguments = argument_tensors(args, kwargs)
        self._device = device_of(self._identity, self._arguments)
        self._gpu = gpu_kind(self._device)

    def write(
        self,
        path: Path,
        key: Path,
        open_sizes: dict[str, Sequence[int]],
        threads: int | None,
        expires: int,
    ) -> Exported:
        assert core is not None
        core.check_signing_key(str(key))  # before minutes are spent
        made = self._compile(self._places_of(open_sizes), threads)
        layout = made["layout"]
        rows, places, tensors = constant_rows(self._identity, layout["folded"])
        text = program_text(layout, places, len(tensors))
        values = [tensor.detach() for tensor in tensors]
        libraries = made["libraries"]
        program = core.DeployedProgram.make(
            text,
            rows,
            [*values, *[None] * len(layout["folded"])],
            libraries,
            runners=1,
            gpu=self._gpu,
            device=str(self._device),
        )
        self._compare(program, layout)
        folded = program.values(False, True)
        values += [folded[row[0][0]] for row in rows[len(tensors) :]]
        size = core.write_module_artifact(
            str(path),
            environment.running_text(),
            list(pick_isa(core.host_cpu_features()).features),
            self._facts(made, text, threads),
            libraries,
            rows,
            [_stored(value) for value in values],
            str(key),
            expires,
        )
        return Exported(
            path=path,
            bytes=size,
            constants=len(rows),
            folded=len(layout["folded"]),
            numerics=made["numerics"],
            native_ns=made["native_ns"],
            kernel_ns=made["kernel_ns"],
            proved_sizes=tuple(made["proved_sizes"]),
        )

    def _facts(self, made: Mapping[str, Any], program: str, threads: int | None) -> dict[str, str]:
        return {
            **({"gpu": self._gpu} if self._gpu else {}),
            "program": program,
            "module": class_name(self._module),
            "identity": self._identity.digest,
            "torch": str(torch.__version__),
            "threads": str(threads or torch.get_num_threads()),
            "numerics": made["numerics"],
            "largest_error": f"{made['largest_error']:.4g}",
            "native_error": f"{made['native_error']:.4g}",
            "native_ns": f"{made['native_ns']:.1f}",
            "kernel_ns": f"{made['kernel_ns']:.1f}",
            "proved_sizes": " ".join(map(str, made["proved_sizes"])),
        }

    def _places_of(self, open_sizes: Mapping[str, Sequence[int]]) -> list[list[int]]:
        names = input_names(self._module, self._args, self._kwargs)
        places = []
        for name, dimensions in open_sizes.items():
            if name not in names:
                raise CannotDeploy(f"it has no input {name}; it has {', '.join(names)}")
            index = names.index(name)
            tensor = self._arguments[index]
            for dimension in dimensions:
                if not 0 <= dimension < tensor.dim() or tensor.size(dimension) < 2:
                    raise CannotDeploy(
                        f"dimension {dimension} of {name} cannot be open: it must be there, and at "
                        "least 2 in the call that is exported"
                    )
                places.append([index, dimension])
        return sorted(places)

    def _compile(self, places: list[list[int]], threads: int | None) -> dict[str, Any]:
        """What a worker made (deploy/worker/job.py). Raises CannotDeploy."""
        if len({id(tensor) for tensor in self._arguments}) != len(self._arguments):
            raise CannotDeploy("a tensor is given twice")
        state = GlobalState.current()
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            threads = 1  # as of all kernels there
            self._require_room()
        description = {
            "kind": "deploy",
            "digest": self._identity.digest,
            "op": class_name(self._module),
            "overload": "",
            "dispatch_key": "CUDA" if on_gpu else "CPU",
            "identity": self._identity.digest,
            "payload": pack(self._module, self._args, self._kwargs),
            "open": places,
            "python_path": trusted_paths(),
            "autocast": autocast_here(self._device.type),
            "state": {**state.as_json(), "num_threads": threads or state.num_threads},
            "attention": own_attention_order(self._device) if on_gpu else None,
            "gpu": self._gpu,
        }
        response = self._ask(description)
        if response.get("deployed") is None:
            raise CannotDeploy(str(response.get("reason") or "no kernel came of it"))
        return dict(response["deployed"])

    def _ask(self, description: Mapping[str, Any]) -> dict[str, Any]:
        output = self._folder / "made"
        output.mkdir(mode=0o700)
        with contextlib.nullcontext() if _shared.get() is not None else one_worker():
            worker = _shared.get()
            assert worker is not None
            return worker.ask(description, output, self._device)

    def _require_room(self) -> None:
        """Raises CannotDeploy where a worker has no room on the GPU beside this process."""
        assert core is not None
        tensors = [*(slot.tensor for slot in self._identity.slots), *self._arguments]
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        reason = cuda_gate.reason_to_stay_off_module(self._device.index, held, core)
        if reason:
            raise CannotDeploy(reason)

    def _compare(self, program: Any, layout: Mapping[str, Any]) -> None:
        """Raises CannotDeploy unless the program answers the very call as the module does."""
        from eagercache.callables.answers import difference_from_forward

        count = len(layout["outputs"])
        unflatten = build_unflatten(layout["out_spec"], count)
        with torch.no_grad(), call_hooks.originals():
            expected = self._module(*self._args, **self._kwargs)
            outputs, _ = program.run(self._arguments)
        answer = outputs[0] if unflatten is None else unflatten(outputs)
        difference = difference_from_forward(answer, expected)
        if difference:
            raise CannotDeploy(f"with its own weights it answers otherwise: {difference}")


def gpu_kind(device: torch.device) -> str:
    """What an artifact says of the GPUs that it is for; empty on the CPU."""
    assert core is not None
    return "" if device.type == "cpu" else str(core.cuda_architecture(device.index))


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, on the CPU; a copy where memory of others, then zeros, lies in between."""
    elements = extent(tensor.size(), tensor.stride())
    whole = elements == tensor.numel() and not tensor.is_conj() and not tensor.is_neg()
    if whole and tensor.device.type == "cpu":
        return tensor
    memory = torch.zeros(elements, dtype=tensor.dtype)
    return memory.as_strided(tensor.size(), tensor.stride()).copy_(tensor)
