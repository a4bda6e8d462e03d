"""The tests that are run with every torch of the table: those that something of torch may break.

Hooks, operators, whole modules, functions, training, bundles and the C++ program, with what reads
Inductor's text; about 180 tests. `make test TORCH=...` runs all of them.
"""

from __future__ import annotations

# Below tests/python.
FILES = (
    "ahead/test_bundle.py",
    "base/test_load.py",
    "callables/test_custom_operators.py",
    "deploy/test_cpp_service.py",
    "modules/test_module_sizes.py",
    "modules/test_module_training.py",
    "programs/test_function_sizes.py",
    "programs/test_main_job.py",
    "programs/test_shapes.py",
    "programs/test_upstream_behaviours.py",
    "programs/test_writes.py",
    "worker/test_bare.py",
    "worker/test_module_joint.py",
    "worker/test_module_layout.py",
)
