"""Which environment variables a compile worker has.

Its environment is a list of what passes: how programs, libraries and devices are found, what Python
needs to start, and the variables of the environment key (`environment.VARIABLES`). Whatever else a
program runs under stays with it, so that nothing outside of the key reaches what is compiled.

What a program's own code reads while it is traced (a forward that asks `os.environ`) comes with the
request instead, is there for that request alone, and in Python's `os.environ` alone: libraries and
compilers that the worker starts have it not. The environment key need not hold it: a kernel keeps
a digest of the values that its functions read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from eagercache.base.environment import VARIABLE_PREFIXES, VARIABLES

# What is needed to find the same interpreter, libraries and devices as the program. None of it says
# how code is generated; which compiler CXX is, and which torch was found, is in the key.
PASSED = frozenset(
    {
        # files and users
        *("HOME", "LOGNAME", "PATH", "TEMP", "TMP", "TMPDIR", "TZ", "USER"),
        *("LANG", "LANGUAGE"),
        # compilers: CC makes Triton's launchers
        *("CC", "CXX"),
        # the libraries that torch and CUDA were loaded from; compilers do not get it
        "LD_LIBRARY_PATH",
        # CUDA_VISIBLE_DEVICES is made for each worker
        *("CUDA_CACHE_DISABLE", "CUDA_CACHE_PATH", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH"),
        *("CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_PIPE_DIRECTORY"),
        # how Python starts; PYTHONPATH and PYTHONSAFEPATH are made for each worker
        *("PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONIOENCODING", "PYTHONNOUSERSITE"),
        *("PYTHONOPTIMIZE", "PYTHONPYCACHEPREFIX", "PYTHONUSERBASE", "PYTHONUTF8"),
        # without these some installations end when torch or numpy is imported
        *("KMP_DUPLICATE_LIB_OK", "MKL_SERVICE_FORCE_INTEL", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
        # threads that numpy starts and workers do not use
        "OPENBLAS_NUM_THREADS",
    }
)
PASSED_PREFIXES = ("LC_",)

# What loaders, interpreters, compilers and the libraries of torch read: never handed on as a
# program's own. `test_worker_variables` holds the names to what torch's sources ask for.
_WITHHELD_PREFIXES = (
    *VARIABLE_PREFIXES,
    *("AOT_", "ATEN_", "C10_", "CUBLAS_", "CUDA", "CUDNN_", "CUTEDSL_", "CUTLASS_", "DNNL_"),
    *("EAGERCACHE_", "FLYDSL_", "FX_GRAPH_", "GCC_", "GLIBC_", "GOMP_", "HALIDE_", "HIP_"),
    *("INDUCTOR_", "KMP_", "LC_", "LD_", "LIBOMP_", "MALLOC_", "MKL_", "NVIDIA_", "OMP_"),
    "ONEDNN_",
    *("OPENBLAS_", "PARTITIONER_", "PT2_", "PYTHON", "PYTORCH_", "ROCM_", "ROCR_", "TORCH", "XLA_"),
    "_TORCH",
)
_WITHHELD = frozenset(
    {
        *PASSED,
        *("COMPILER_PATH", "CONDA_EXE", "CONDA_PREFIX", "CPATH", "CPLUS_INCLUDE_PATH"),
        *("C_INCLUDE_PATH", "LIBRARY_PATH", "OBJC_INCLUDE_PATH", "SDKROOT", "SOURCE_DATE_EPOCH"),
        *("CI", "DISABLE_CUPTI_LAZY_REINIT", "DISABLE_LLVM_OPT", "DUMP_AOTI_MINIFIER"),
        *("ENABLE_HOST_SIDE_TMA", "ENABLE_PERSISTENT_TMA_MATMUL", "ENABLE_TEMPLATE_AUTOWS"),
        *("ENABLE_TEMPLATE_TMA_STORE", "ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE", "FAKE_ALLOW_META"),
        *("FX_PATCH_GETITEM", "HSA_OVERRIDE_GFX_VERSION", "JAX_PLATFORMS", "ONEAPI_ROOT"),
        *("LEVEL_ZERO_V1_SDK_PATH", "LOG_AUTOTUNE_RESULTS", "LOG_TLPARSE", "MAST_HPC_JOB_NAME"),
        *("SYSTEMROOT", "TEARDOWN_CUPTI", "TENSORIFY_PYTHON_SCALARS", "TVM_SCHEDULER"),
        *("UNSAFE_SKIP_FSDP_MODULE_GUARDS", "_SPLITTER_MERGE_OVERLAPPING_FUSIONS"),
    }
)


def passed_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What of ``environ`` a worker starts with."""
    return {
        name: value
        for name, value in environ.items()
        if name in PASSED or name in VARIABLES or name.startswith(PASSED_PREFIXES)
    }


def is_withheld(name: str) -> bool:
    """Whether a variable is read by something else than a program's own code."""
    return name in _WITHHELD or name.startswith(_WITHHELD_PREFIXES)


def program_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What of ``environ`` only a program's own code may ask for: it comes with a request."""
    return {name: value for name, value in environ.items() if not is_withheld(name)}


@contextlib.contextmanager
def as_in_program(variables: Mapping[str, str] | None) -> Iterator[None]:
    """In a worker: Python code in the block finds ``variables`` in `os.environ`; nobody else does.

    Those of a request that name something withheld are left out.
    """
    if not variables:
        yield
        return
    # Not through `os.environ` itself, which sets the process's own.
    data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    added = {
        os.fsencode(name): os.fsencode(value)
        for name, value in program_variables(variables).items()
    }
    before = {name: data[name] for name in added if name in data}
    data.update(added)
    try:
        yield
    finally:
        for name in added:
            data.pop(name, None)
        data.update(before)
