"""What an enabling asks for: devices, operators, a policy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from eagercache.base import config, operators
from eagercache.base.load import core
from eagercache.base.untried.standing import standing
from eagercache.base.warn import warn_once
from eagercache.runtime.session import Configuration

if TYPE_CHECKING:
    from eagercache.remote.plan import RemotePlan

DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def dispatch_keys(devices: Iterable[str] | str | None) -> list[str]:
    """The dispatch keys of the named devices; of all there are for None. Raises ValueError."""
    assert core is not None
    if devices is None:
        devices = ("cpu", "cuda") if torch.version.cuda and core.has_cuda_driver() else ("cpu",)
    keys = []
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        devices = (devices,)
    for device in devices:
        if device not in DISPATCH_KEYS:
            raise ValueError(
                f"devices: {device!r} is not one of {', '.join(map(repr, DISPATCH_KEYS))}"
            )
        keys.append(DISPATCH_KEYS[device])
    return keys


def configuration(
    settings: config.Settings, on_miss: str, choose: str, numerics: str, training: bool = False
) -> Configuration:
    """The policy; what the environment's variables say goes before. Raises ValueError."""
    for name, value, allowed in (
        ("on_miss", on_miss, config.ON_MISS),
        ("choose", choose, config.CHOOSE),
        ("numerics", numerics, config.NUMERICS),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")
    check_training(training)
    return Configuration(
        on_miss=settings.on_miss or on_miss,
        choose=settings.choose or choose,
        numerics=settings.numerics or numerics,
        replicas=_has_replicas(),
        wait_seconds=settings.wait_seconds,
        trials=settings.trials,
        training=training,
    )


def check_training(training: Any) -> None:
    """Raises ValueError for what is no value of ``training``."""
    if not isinstance(training, bool):
        raise ValueError(  # noqa: TRY004 - a bad value, as of the other options
            f"training={training!r} is not True or False; with True, kernels of whole modules "
            "answer calls that need gradients, too"
        )


def remote_plan(settings: config.Settings, remote: Any) -> RemotePlan | None:
    """The remotes to ask; None for none. Raises ValueError for what ``remote`` itself says wrong.

    Of the environment's variables it warns once, and then there are no remotes.
    """
    if remote is None and not settings.remote:
        return None
    from eagercache.remote.plan import RemoteError, plan_of

    try:
        return plan_of(remote, settings)
    except RemoteError as error:
        if remote is not None:
            raise
        warn_once(f"remote:{error}", f"EAGERCACHE_REMOTE is not used: {error}")
        return None


def _has_replicas() -> bool:
    """Whether this process is one of several of a distributed job."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size() > 1
    size = os.environ.get(
        "WORLD_SIZE", ""
    )  # what torchrun and others set before init_process_group
    return size.isdecimal() and int(size) > 1


def selected(
    ops: str | Iterable[Any] | None, skip: set[operators.OperatorName], keys: list[str]
) -> list[tuple[operators.OperatorName, str]]:
    """(operator, dispatch key) pairs to hook. Raises ValueError for a name that cannot be."""
    assert core is not None
    pairs: list[tuple[operators.OperatorName, str]] = []
    for key in keys:
        if ops is None or ops == "default":
            names = [(str(n), str(o)) for n, o in core.default_operators(key)]
        elif ops == "all":
            names = [(str(n), str(o)) for n, o in core.eligible_operators(key)]
        else:
            specs = ops if is_several(ops) else [ops]
            names = [name for spec in specs for name in operators.require_eligible(spec, key)]
        pairs.extend((name, key) for name in dict.fromkeys(names) if name not in skip)
    return pairs


def kept(names: Any) -> Any:
    """The same, where it is not an iterator that gives its names but once."""
    return list(names) if isinstance(names, Iterator) else names


def is_several(names: Any) -> bool:
    """Whether ``names`` is a collection of names, and not one."""
    return isinstance(names, Iterable) and not isinstance(names, str)


def skipped(settings: config.Settings, skip: Iterable[Any]) -> set[operators.OperatorName]:
    """The operators to leave alone. Raises ValueError; of EAGERCACHE_SKIP it warns."""
    names = operators.resolve_all(skip if is_several(skip) else [skip])
    for text in settings.skip:
        try:
            names.update(operators.resolve(text))
        except ValueError as error:
            warn_once(f"skip:{text}", f"EAGERCACHE_SKIP names {text!r}: {error}")
    return names


def is_inert(settings: config.Settings) -> bool:
    """Whether nothing is ever enabled here: switched off, a worker, a platform or torch unfit."""
    unfit = core is None or bool(standing.problem())
    return unfit or settings.disable or bool(os.environ.get(config.WORKER_VARIABLE))
