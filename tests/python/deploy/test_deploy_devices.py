"""Where artifacts run, as far as it can be said without a GPU (tests/gpu has the rest)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deploy_zoo
import pytest
import torch
from deploy_zoo import Deployed, answer_of, refusal
from eagercache import _C, export_module, load_module, verify_module
from eagercache.base import environment
from eagercache.callables.module_identity import identify
from eagercache.deploy.export import gpu_kind
from eagercache.deploy.layout import CannotDeploy, device_of

H200 = "sm_90 132 multiprocessors"

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_one_for_the_cpu_runs_there(deployed: Deployed) -> None:
    for device in (None, "cpu", torch.device("cpu")):
        module = deployed.load("steps", device=device)
        assert module.device == torch.device("cpu")
        assert answer_of(module) == deploy_zoo.Steps.answer(1.0)
    assert "gpu" not in deployed.load("steps").facts
    for device in ("cuda", "cuda:1", 0, torch.device("cuda", 0)):
        with refusal("invalid_argument", "exported on the CPU", "cannot run on cuda"):
            deployed.load("steps", device=device)
    for device in ("tpu", "cuda:x", 1.5):
        with refusal("invalid_argument", "is no device"):
            deployed.load("steps", device=device)


@pytest.fixture
def for_gpu(deployed: Deployed, tmp_path: Path) -> Path:
    """A file that says that it is for a GPU, and holds nothing of use."""
    path, library = tmp_path / "module", tmp_path / "main.so"
    library.write_bytes(b"no library")
    row = (["weight"], 0, "float32", [1], [1])
    facts = {"program": "{}", "gpu": H200}
    _C.write_module_artifact(
        str(path), environment.running_text(), [], facts, [str(library)], [row],
        [torch.ones(1)], str(deployed.folder / "own.pem"),
    )  # fmt: skip
    return path


@without_gpu
def test_one_for_a_gpu_is_refused_where_there_is_none(deployed: Deployed, for_gpu: Path) -> None:
    keys = [deployed.folder / "own.pub"]
    for device in (None, "cuda", "cuda:3"):
        with refusal("incompatible", str(for_gpu), H200, "has none that torch can use"):
            load_module(for_gpu, keys=keys, device=device)
    with refusal("invalid_argument", H200, "cannot run on cpu"):
        load_module(for_gpu, keys=keys, device="cpu")
    assert verify_module(for_gpu, keys=keys).mismatches == (("gpu", H200, "(missing)"),)
    with pytest.raises(_C.StoreError, match="has none that torch can use"):
        _C.DeployedProgram.make("{}", [], [], [], gpu=H200)


def test_a_module_is_on_one_device() -> None:
    model = deploy_zoo.Steps().eval()
    x = torch.randn(2, 8)
    assert device_of(identify(model), [x]) == torch.device("cpu")
    assert device_of(identify(torch.nn.Identity()), []) == torch.device("cpu")
    assert gpu_kind(torch.device("cpu")) == ""

    class Elsewhere:
        slots: tuple[Any, ...] = ()

    with pytest.raises(CannotDeploy, match="on several devices: cpu, meta"):
        device_of(identify(model), [x.to("meta")])
    with pytest.raises(CannotDeploy, match=r"it is on meta: only the CPU and GPUs \(cuda\)"):
        device_of(Elsewhere(), [x.to("meta")])  # type: ignore[arg-type]


def test_a_call_on_several_devices_is_not_exported(deployed: Deployed, tmp_path: Path) -> None:
    key = deployed.folder / "own.pem"
    with refusal("unsupported", "Steps cannot be deployed", "several devices: cpu, meta"):
        x = torch.empty(2, 8, device="meta")
        export_module(deploy_zoo.Steps().eval(), (x,), path=tmp_path / "made", key=key)
    assert not (tmp_path / "made").exists()
