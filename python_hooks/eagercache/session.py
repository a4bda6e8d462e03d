"""What this process has switched on."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagercache.service import CompileService


@dataclass(frozen=True)
class Configuration:
    """A policy, by the names that `enable()` takes."""

    on_miss: str
    choose: str
    numerics: str
    replicas: bool = False  # one of several processes that hold the same parameters


class Session:
    """What this process has switched on. Guarded by `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.service: CompileService | None = None
        self.cuda_service: CompileService | None = None  # its workers see the GPUs
        self.store: Any = None
        self.store_identity: tuple[Path, str] | None = None  # directory, environment text
        self.configuration: Configuration | None = None
        self.warned: set[str] = set()

    def services(self) -> list[CompileService]:
        """The compile services that have been started."""
        return [one for one in (self.service, self.cuda_service) if one is not None]

    def warn(self, key: str, message: str) -> None:
        """Warns once per process for each `key`."""
        if key not in self.warned:
            self.warned.add(key)
            warnings.warn(f"eagercache: {message}", RuntimeWarning, stacklevel=4)


session = Session()
