"""Which tests run in one process of pytest-xdist's: those that share what a fixture compiles.

Only names of tests reach the process that hands them out, so that this is told from the text of
their files.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# Of conftest.py: fixtures that compile kernels for tests of several files, with what is made of
# them, and the scope of their tests. One file uses kernels of operators and artifacts both.
SHARED = {
    "warm_cache": "shared",
    "warm_program": "shared",
    "deployed": "shared",
    "filled_modules": "modules",
    "training_store": "training",
    "training_kernels": "training",
}
# Those that take longest, which begin first: what begins last has one processor to itself. A file
# that has no such fixture is here because of one test.
LONGEST = (
    *("test_module_objects.py", "test_module_guards.py", "shared", "training", "modules"),
    *("test_recurrent_modules.py", "test_parametrized_modules.py", "test_custom_operators.py"),
    *("test_untried_torch.py", "test_conformance.py", "test_worker.py", "test_docs.py"),
    *("test_writes.py", "test_graph_modules.py", "test_worker_variables.py"),
)
# A file's own.
_OWN = re.compile(r"@pytest\.fixture\(scope=\"(session|module)\"")


@functools.cache
def _scope_of_file(name: str) -> str:
    text = next(FOLDER.rglob(name)).read_text()
    for fixture, scope in SHARED.items():
        if re.search(rf"\b{fixture}\b", text):
            return scope
    return name if _OWN.search(text) or name in LONGEST else ""


def scope_of(nodeid: str) -> str:
    """Tests of the same scope run in one process, in their order."""
    return _scope_of_file(nodeid.partition("::")[0].rpartition("/")[2]) or nodeid


def make_scheduler(config: Any, log: Any) -> Any:
    """A scheduler that hands out whole scopes: the longest, then those with the most tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            long = next((scope for scope in LONGEST if scope in self.workqueue), None)
            if long is not None:
                self.workqueue.move_to_end(long, last=False)
            super()._assign_work_unit(node)

    return Scheduler(config, log)
