"""On PYTHONPATH, this folder makes every kernel for a GPU a container.

Python imports this file when it starts, the compile workers' Python too. Inductor's text is
understood for nearly every call; here no text is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _NothingUnderstood(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, _path: Any, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "eagercache.worker.cuda.compile":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)

            def read_wrapper(_text: str) -> Any:
                raise module.NotUnderstood("a planted statement")

            module.read_wrapper = read_wrapper
            module.read_open = lambda text, _symbols: read_wrapper(text)

        loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, _NothingUnderstood())
