"""Which tests run in one process of pytest-xdist's, and which run where a share is asked for.

Those that share what a fixture compiles run in one process. Only names of tests reach the process
that hands them out, so that this is told from the text of their files.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
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


# Scopes and files of over half a minute, the costliest first: 86 % of the time of all tests.
COSTLY = (
    *("test_module_objects.py", "test_docs.py", "shared", "test_module_guards.py", "training"),
    *("test_module_writes.py", "test_recurrent_modules.py", "test_writes.py"),
    *("test_drawn_numbers.py", "test_untried_torch.py", "test_parametrized_modules.py"),
    *("test_worker_compilers.py", "test_collected_states.py", "test_cluster.py", "test_locks.py"),
    *("test_shapes.py", "test_module_autocast.py", "test_programs.py", "test_conformance.py"),
    *("test_module_trials.py", "test_custom_operators.py", "test_cpp_service.py", "test_fuzz.py"),
    *("test_ordinary_programs.py", "test_cuda_modules.py", "test_edited_programs.py"),
    *("test_graph_modules.py", "test_profiler.py", "test_untried.py", "modules"),
    *("test_module_object_changes.py", "test_training_objects.py", "test_foreign_modules.py"),
    *("test_module_script_objects.py", "test_empty_tensors.py", "test_timeline.py"),
    *("test_bare.py", "test_module_numerics.py", "test_load.py", "test_two_stages.py"),
    *("test_worker.py", "test_function_sizes.py", "test_custom_calls.py", "test_main_job.py"),
    *("test_compare.py", "test_remote_programs.py", "test_tracing_state.py"),
    *("test_training_sizes.py", "test_sizes_of_losses.py", "test_opaque_attributes.py"),
    *("test_held_submodules.py", "test_other_tensors.py", "test_tensors_given_twice.py"),
    *("test_expanded_arguments.py", "test_checkpoints.py", "test_copied_objects.py"),
)
# "1/3": of what is costly the second of three parts runs, and all else. Files that CHANGED names,
# by their paths from the root, run in every part.
SHARE = "TESTS_SHARE"
CHANGED = "TESTS_CHANGED"


def left_out(nodeids: Sequence[str]) -> set[str]:
    """Those of ``nodeids`` that are not of the share that the environment asks for.

    Raises ValueError for a share that is none.
    """
    part, _, parts = os.environ.get(SHARE, "0/1").partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise ValueError(f"{SHARE}={part}/{parts}: 0/3, 1/3 and 2/3 are the thirds")
    changed = {path.rpartition("/")[2] for path in os.environ.get(CHANGED, "").split()}
    others = {unit for at, unit in enumerate(COSTLY) if at % int(parts) != int(part)}

    def is_left_out(nodeid: str) -> bool:
        file = nodeid.partition("::")[0].rpartition("/")[2]
        return bool(others & {file, _scope_of_file(file)}) and file not in changed

    return {nodeid for nodeid in nodeids if is_left_out(nodeid)}


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
