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
    "scalars": _JOBS + "scalar_job:ScalarJob",
    "function": _JOBS + "function_job:FunctionJob",
    "cuda function": _JOBS + "function_job:FunctionCudaJob",
    "function shapes": _JOBS + "function_shape_job:FunctionShapeJob",
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
    on_cuda = description.get("dispatch_key") == "CUDA" and "record" not in request
    if "function" in description and "record" not in request:
        if kind == "shapes":
            return "function shapes"
        return "cuda function" if description["dispatch_key"] == "CUDA" else "function"
    if on_cuda:
        return "cuda"
    return kind if kind in ("shapes", "scalars") else ""
