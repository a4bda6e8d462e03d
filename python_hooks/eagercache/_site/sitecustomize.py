"""Python runs this when it starts a program of `eagercache run` or `record`; see program.py.

Nothing is imported here that the program might not have, and nothing of what goes wrong reaches it.
The environment's own `sitecustomize` is run as ever.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys

# Neither typing nor importlib.abc, which imports it: this runs in every interpreter.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Sequence
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is slow to import


def _run_the_next_one() -> None:
    """The `sitecustomize` that this one hides."""
    path = sys.path[:]
    sys.path[:] = [entry for entry in path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
    mine = sys.modules.pop("sitecustomize", None)
    try:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
    finally:
        if mine is not None:
            sys.modules.setdefault("sitecustomize", mine)


class _TorchLoader:
    """Torch's own loader, and then eagercache."""

    def __init__(self, loader: Any, body: dict[str, Any]) -> None:
        self._loader = loader
        self._body = body

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """As torch's loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """As torch's loader does; then eagercache is switched on."""
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _begin(self._body)


class _TorchFinder:
    """Waits for `import torch`, once."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Torch's, with our loader around its own; nothing else is looked for."""
        if name != "torch":
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = _TorchLoader(spec.loader, self._body)
            spec.loader = loader
        return spec


def _measure(folder: str) -> None:
    """Has this process write down at its end what `eagercache compare` cannot see from outside."""
    import atexit

    owner = os.getpid()

    def write() -> None:
        if os.getpid() != owner:
            return  # a fork
        note: dict[str, Any] = {"pid": owner, "gpu_bytes": None}
        with contextlib.suppress(Exception), open("/proc/self/status") as lines:  # noqa: PTH123
            peak = next(line for line in lines if line.startswith("VmHWM:"))
            note["peak_bytes"] = int(peak.split()[1]) * 1024
        torch = sys.modules.get("torch")
        with contextlib.suppress(Exception):
            if torch is not None and torch.cuda.is_initialized():
                gpus = range(torch.cuda.device_count())
                note["gpu_bytes"] = sum(map(torch.cuda.max_memory_allocated, gpus))
        program = sys.modules.get("eagercache.cli.program")
        if program is not None:
            note.update(program.counters())
        with contextlib.suppress(OSError), open(f"{folder}/{owner}.part", "w") as file:  # noqa: PTH123
            json.dump(note, file)
            os.rename(file.name, f"{folder}/{owner}.json")  # noqa: PTH104

    atexit.register(write)


def _say_that_it_does_not_fit(error: Exception, body: dict[str, Any]) -> None:
    """Once in a program: what this process starts from here on does not try again."""
    text = " ".join(str(error).split())
    if not isinstance(error, ImportError):
        text = f"torch cannot be used: {type(error).__name__}: {text}"
    print(f"eagercache: is not active: {text}", file=sys.stderr)
    os.environ.pop("EAGERCACHE_PROGRAM", None)
    if body.get("report"):
        with contextlib.suppress(OSError), open(f"{body['report']}/inactive", "w"):  # noqa: PTH123
            pass


def _begin(body: dict[str, Any]) -> None:
    added = body["package"] not in sys.path
    if added:
        sys.path.append(body["package"])
    try:
        from eagercache.cli import program
    except Exception as error:
        _say_that_it_does_not_fit(error, body)
        return
    finally:
        if added:
            with contextlib.suppress(ValueError):
                sys.path.remove(body["package"])
    program.begin(body)


def _main() -> None:
    _run_the_next_one()
    text = os.environ.get("EAGERCACHE_PROGRAM", "")
    if not text or os.environ.get("EAGERCACHE_INSIDE_WORKER"):
        return
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("package"), str):
        # Of another program, or of another version of eagercache.
        print(
            f"eagercache: is not active in process {os.getpid()}: EAGERCACHE_PROGRAM is not what "
            "`eagercache run` sets; unset it",
            file=sys.stderr,
        )
        return
    if body.get("measure"):
        _measure(body["measure"])
    if not body.get("native"):
        sys.meta_path.insert(0, _TorchFinder(body))


_main()
