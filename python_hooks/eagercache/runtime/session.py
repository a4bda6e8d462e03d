"""What this process has switched on."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagercache.service.service import CompileService


@dataclass(frozen=True)
class Configuration:
    """A policy, by the names that `enable()` takes."""

    on_miss: str
    choose: str
    numerics: str
    replicas: bool = False  # one of several processes that hold the same parameters
    wait_seconds: float = 600.0  # at most, for a kernel, where on_miss is "wait"
    trials: bool = True  # the program's own calls are timed, a few of them
    training: bool = False  # kernels of whole modules answer calls that need gradients, too


class Session:
    """What this process has switched on. Guarded by `lock`, but the service, which has its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.service: CompileService | None = None  # once there was something to compile
        self.cuda_services: dict[int, CompileService] = {}  # their workers see one GPU each
        self._service_lock = threading.Lock()
        self._service_settings: dict[str, Any] | None = None
        self._service_owner = 0
        self.store: Any = None
        # directory, environment text, what is revoked
        self.store_identity: tuple[Path, str, bytes] | None = None
        self.configuration: Configuration | None = None
        self.enables = 0  # calls of enable()
        self.linger: float | None = None  # EAGERCACHE_LINGER
        self.graph_bytes = 0  # EAGERCACHE_GRAPH_BYTES
        self.waited_in_vain = False  # a call of a module, since the latest verdict on one

    def services(self) -> list[CompileService]:
        """The compile services that have been started."""
        first = [self.service] if self.service is not None else []
        return [*first, *list(self.cuda_services.values())]

    def configure_service(self, **settings: Any) -> None:
        """Says how kernels are compiled from now on: fields of `ServiceSettings`."""
        with self._service_lock:
            self._service_settings = settings
            self._service_owner = os.getpid()
            for running in self.services():
                running.reconfigure(**settings)

    def compile_service(self) -> CompileService | None:
        """The compile service, which the first caller makes; None where nothing is compiled."""
        with self._service_lock:
            if self.service is None and self._service_settings is not None:
                if self._service_owner != os.getpid():
                    return None  # a forked child
                from eagercache.service.service import CompileService
                from eagercache.service.settings import ServiceSettings

                self.service = CompileService(ServiceSettings(**self._service_settings))
            return self.service

    def cuda_compile_service(self, gpu: int) -> CompileService | None:
        """The service whose workers see GPU ``gpu`` alone; as `compile_service` otherwise."""
        beside = self.compile_service()
        if beside is None:
            return None
        with self._service_lock:
            if gpu not in self.cuda_services:
                from eagercache.service.service import CompileService
                from eagercache.service.settings import for_gpu

                self.cuda_services[gpu] = CompileService(for_gpu(beside.settings, gpu))
            return self.cuda_services[gpu]

    def close_service(self, timeout: float) -> None:
        """Ends the services within about `timeout` seconds each; none is made afterwards."""
        with self._service_lock:
            self._service_settings = None
            running = self.services()
        for service in running:
            service.close(timeout=timeout)

    def after_fork(self) -> None:
        """In a child: its copies of locks may be held by threads that do not exist there."""
        self.lock = threading.RLock()
        self._service_lock = threading.Lock()


session = Session()
