"""State of process and thread that a call depends on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@contextlib.contextmanager
def autocast_set(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast on ``device`` to ``dtype``, or none, for the block; no cast is kept for later.

    Unlike `torch.autocast` for every dtype, as a thread's state may be set, and with no end of a
    block at which casts that the caller keeps would be dropped.
    """
    enabled, before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, dtype is not None)
    torch.set_autocast_dtype(device, dtype or before)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, before)
        torch.set_autocast_cache_enabled(keeps)


@dataclass(frozen=True)
class GlobalState:
    """State of process and thread that is part of the key."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warn_only: bool
    fill_uninitialized_memory: bool
    num_threads: int
    # (device type, dtype) of the autocast under which an operator that is a function was called.
    autocast: tuple[str, torch.dtype] | None = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The state set for the block, the previous one restored after it."""
        before = GlobalState.current()
        self._set()
        casts = contextlib.nullcontext() if self.autocast is None else autocast_set(*self.autocast)
        try:
            with casts:
                yield
        finally:
            before._set()

    def _set(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(
            self.deterministic, warn_only=self.deterministic_warn_only
        )
        torch.utils.deterministic.fill_uninitialized_memory = self.fill_uninitialized_memory
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)

    @staticmethod
    def current() -> GlobalState:
        """The state of this process and thread, but for autocast."""
        return GlobalState(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            fill_uninitialized_memory=torch.utils.deterministic.fill_uninitialized_memory,
            num_threads=torch.get_num_threads(),
        )

    def as_json(self) -> dict[str, Any]:
        """The state as descriptions have it, but for autocast."""
        return {
            "default_dtype": str(self.default_dtype).removeprefix("torch."),
            "deterministic": self.deterministic,
            "deterministic_warn_only": self.deterministic_warn_only,
            "fill_uninitialized_memory": self.fill_uninitialized_memory,
            "num_threads": self.num_threads,
        }
