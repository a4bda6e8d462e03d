"""Clusters that a warm-up can be given to, each as an executor of `concurrent.futures`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Future
from typing import Any, Protocol
from urllib.parse import urlsplit

from eagercache.ahead.errors import WarmError

_DASK_PORT, _RAY_PORT = 8786, 10001
# How long a cluster may take to answer at first.
_CONNECT_SECONDS = 10


class Engine(Protocol):
    """Runs functions on other machines."""

    shown: str  # its name for people
    workers: int  # how many calls of functions run there at a time

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Begins one. Raises what `lost` knows where the cluster is gone."""

    def lost(self, error: BaseException) -> bool:
        """Whether a future's error says that a machine is gone, and not that the call is wrong."""

    def close(self) -> None:
        """Cancels what is under way, and leaves the cluster as it was."""


def local_workers(text: str) -> int | None:
    """The N of "local:N": processes of this machine; None for another engine. Raises WarmError."""
    scheme, _, count = text.partition(":")
    if scheme != "local":
        return None
    if not (count.isascii() and count.isdecimal()) or int(count) < 1:
        raise WarmError(f"{text!r} names no number of workers; use local:8")
    return int(count)


def open_engine(text: str, *, gpu: bool) -> Engine:
    """The engine that "dask://HOST" or "ray://HOST" names. Raises WarmError: one line.

    ``gpu``: what it is given needs one.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise WarmError(f"{text!r} is no cluster: {error}") from error
    kinds: dict[str, tuple[str, Callable[..., Engine]]]
    kinds = {"dask": ("distributed", _Dask), "ray": ("ray", _Ray)}
    if parts.scheme not in kinds or not parts.hostname:
        raise WarmError(
            f"{text!r} is no cluster; use local:N, dask://HOST:PORT, ray://HOST:PORT or ray://auto"
        )
    package, kind = kinds[parts.scheme]
    if importlib.util.find_spec(package) is None:
        raise WarmError(f"{text!r} needs {package}: pip install 'eagercache[{parts.scheme}]'")
    try:
        engine = kind(text, parts.hostname, port, gpu)
    except Exception as error:  # each engine has a family of its own
        raise WarmError(f"{text!r} cannot be reached: {_reason(error)}") from error
    if engine.workers < 1:
        engine.close()
        raise WarmError(f"{text!r} has no workers; start some first")
    return engine


def _reason(error: Exception) -> str:
    """One line: of a server's traceback, which Ray passes on as the text of its error, the end."""
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1]
    return " ".join(text.split())[:200] or type(error).__name__


class _Dask:
    """A scheduler of Dask's, which runs again by itself what a lost worker had."""

    def __init__(self, shown: str, host: str, port: int | None, gpu: bool) -> None:
        import distributed

        self.shown = shown
        address = f"tcp://{host}:{port or _DASK_PORT}"
        self._client: Any = distributed.Client(
            address, timeout=_CONNECT_SECONDS, set_as_default=False
        )
        # What a batch compiles is another thing each time, whatever its arguments are.
        self._executor = self._client.get_executor(pure=False)
        self.workers = sum(self._client.nthreads().values())
        self._lost = (
            *(BrokenExecutor, CancelledError, OSError),
            *(distributed.scheduler.KilledWorker, distributed.CancelledError),
        )

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        future: Future[Any] = self._executor.submit(function, *arguments)
        return future

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, self._lost)

    def close(self) -> None:
        self._executor.shutdown(wait=False)
        self._client.close()


class _Ray:
    """A cluster of Ray's: through its client's server, or ("auto") from one of its machines."""

    def __init__(self, shown: str, host: str, port: int | None, gpu: bool) -> None:
        import ray

        self.shown = shown
        self._ray: Any = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            address = "auto" if host == "auto" else f"ray://{host}:{port or _RAY_PORT}"
            connect = functools.partial(
                ray.init, address=address, logging_level="ERROR", log_to_driver=False
            )
            try:
                connect()
            except ConnectionAbortedError:
                # The server starts a process for each client, and waits 30 s for it: on a machine
                # that is busy the second one finds its files read.
                connect()
        resource = "GPU" if gpu else "CPU"
        self.workers = int(ray.cluster_resources().get(resource, 0))
        # Ray hides GPUs from what does not ask for one. It does not try again: we do, and count.
        self._options = {"num_gpus": 1 if gpu else 0, "num_cpus": 1, "max_retries": 0}
        self._references: dict[Future[Any], Any] = {}

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        remote = self._ray.remote(**self._options)(function)
        reference = remote.remote(*arguments)
        future: Future[Any] = reference.future()
        self._references[future] = reference
        future.add_done_callback(lambda done: self._references.pop(done, None))
        return future

    def lost(self, error: BaseException) -> bool:
        # An error of the function itself is Ray's, too, and has the function's class besides.
        errors = self._ray.exceptions
        return isinstance(error, (errors.RayError, OSError)) and not isinstance(
            error, errors.RayTaskError
        )

    def close(self) -> None:
        for reference in list(self._references.values()):
            self._ray.cancel(reference, force=True)
        if self._ours:
            self._ray.shutdown()
