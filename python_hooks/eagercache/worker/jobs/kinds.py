"""Which class of job a request asks for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagercache.worker.jobs.job import Job

# By name, so that a worker imports what its requests need, and no package knows those above it.
_JOBS = "eagercache.worker.jobs."
_CLASSES = {
    "": _JOBS + "job:Job",
    "cuda": _JOBS + "cuda_job:CudaJob",
    "shapes": _JOBS + "shape_job:ShapeJob",
    "cuda shapes": _JOBS + "cuda_shape_job:CudaShapeJob",
    "scalars": _JOBS + "scalar_job:ScalarJob",
    "cuda scalars": _JOBS + "cuda_scalar_job:CudaScalarJob",
    "function": _JOBS + "function_job:FunctionJob",
    "cuda function": _JOBS + "function_job:FunctionCudaJob",
    "function shapes": _JOBS + "function_shape_job:FunctionShapeJob",
    "cuda function shapes": _JOBS + "function_shape_job:FunctionCudaShapeJob",
    "module": _JOBS + "module_job:ModuleJob",
    "deploy": "eagercache.deploy.worker.job:DeployJob",
}


def make_job(request: Mapping[str, Any], core: Any) -> Job:
    """The job of a request. It has not begun."""
    module, _, name = _CLASSES[_kind(request)].partition(":")
    job: Job = getattr(importlib.import_module(module), name)(request, core)
    return job


def _kind(request: Mapping[str, Any]) -> str:
    description = request["description"]
    kind = str(description.get("kind") or "")
    if kind in ("module", "deploy"):
        return kind
    if "record" in request:
        return kind if kind in ("shapes", "scalars") else ""
    words = ["cuda"] if description.get("dispatch_key") == "CUDA" else []
    words += ["function"] if "function" in description else []
    words += [kind] if kind in ("shapes", "scalars") else []
    return " ".join(words)
