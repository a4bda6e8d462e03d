"""Data-parallel replicas stay equal bit for bit, whatever each one's cache holds."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from conftest import SHARED_CALLS, SHARED_OPS
from gloo import run_ranks

TRAINING = """
import hashlib, json, os, sys
import torch.distributed as dist
rank, kind = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
import eagercache
eagercache.enable(OPS, on_miss="native", choose="always")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(96)
        self.line = torch.nn.Linear(96, 64)
    def forward(self, t):
        y = torch.softmax(torch.relu(self.norm(t)), -1)
        return self.line(torch.nn.functional.silu(y.view(64, 96)))

torch.manual_seed(0)
model = Model()
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
    parameters = model.parameters
else:
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    parameters = model.parameters

def whole(parameter):
    value = parameter.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).contiguous()

optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(1 + rank)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(64, 96)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if kind == "ddp":
        # What every replica computes again from equal data: a decay by the weights' own variance.
        with torch.no_grad():
            spread = torch.var(model.module.line.weight, -1)
            for parameter in model.parameters():
                parameter.mul_(1 - 1e-3 * spread.mean())
digests = [hashlib.sha256(whole(p).numpy().tobytes()).hexdigest() for p in parameters()]
s = eagercache.stats()
print("REPORT " + json.dumps({"digests": digests,
    "hits": {n: o.hits for n, o in s.operators.items()},
    "kernels": {f"{k.op}.{k.overload}": k.numerics for k in eagercache.kernels()
                if k.decision == "kernel"}}))
dist.destroy_process_group()
"""


def _train(kind: str, caches: list[Path]) -> list[dict[str, object]]:
    """One process per cache; what each reported."""
    code = textwrap.dedent(SHARED_CALLS) + TRAINING.replace("OPS", SHARED_OPS)
    return run_ranks(code, caches, kind)


@pytest.mark.parametrize(
    "kind", ["ddp", pytest.param("fsdp", marks=(pytest.mark.once, pytest.mark.long))]
)
def test_a_warm_and_an_empty_cache_give_equal_parameters_after_100_steps(
    kind: str, warm_cache: Path, cache: Path
) -> None:
    warm, cold = _train(kind, [warm_cache, cache])
    assert warm["digests"] == cold["digests"]
    hits = warm["hits"]
    assert isinstance(hits, dict)
    assert hits["aten::native_layer_norm"] >= 99
    assert hits["aten::_softmax"] >= 99
    assert not any(cold["hits"].values())  # type: ignore[attr-defined]
    if kind == "ddp":
        kernels = warm["kernels"]
        assert isinstance(kernels, dict)
        if kernels["aten::var.correction"] == "accurate":
            assert hits["aten::var.correction"] == 0  # without gradients: native, on every replica
