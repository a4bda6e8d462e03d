"""Artifacts of modules on a real GPU: round trip, updates and swaps beside calls, devices, C++."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpp_programs
import eagercache
import pytest
import torch
from eagercache import _C, DeployedModule, export_module, load_module
from eagercache.ahead import bundle
from eagercache.deploy import export as exporting
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "python" / "zoos"))

import deploy_zoo  # noqa: E402 - found there by compile workers too
from deploy_zoo import refusal  # noqa: E402

WIDTH, DEPTH = 1024, 4
SLEEP = 2_000_000_000  # cycles: about a second


def on_gpu(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), value)


@dataclass(frozen=True)
class Artifacts:
    """A folder of them, the modules that they were made of, and what the exports said."""

    folder: Path
    models: dict[str, nn.Module]
    made: dict[str, exporting.Exported]

    def load(self, name: str, **options: Any) -> DeployedModule:
        return load_module(self.folder / name, keys=[self.folder / "own.pub"], **options)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    folder = tmp_path_factory.mktemp("artifacts")
    bundle.keygen(folder / "own")
    torch.manual_seed(1)
    made = Artifacts(folder, {}, {})
    steps = deploy_zoo.Steps().eval()
    steps.load_state_dict(steps.state(1.0))
    args, kwargs = deploy_zoo.tied_call()
    wide = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)), nn.Tanh())
    x = torch.randn(4, 16)
    calls: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
        "steps": (steps, (torch.randn(2, 8),), {}, {"open_sizes": {"x": [0]}}),
        "tied": (deploy_zoo.Tied().eval(), args, kwargs, {}),
        "mixed": (deploy_zoo.Mixed().eval(), (x,), {}, {}),
        "wide": (wide.eval(), (torch.randn(8, WIDTH),), {}, {}),
    }
    with exporting.one_worker():
        for name, (model, args, kwargs, options) in calls.items():
            made.models[name] = model.cuda()
            with torch.autocast("cuda", torch.bfloat16, enabled=name == "mixed"):
                made.made[name] = export_module(
                    model, on_gpu(args), on_gpu(kwargs),
                    path=folder / name, key=folder / "own.pem", **options,
                )  # fmt: skip
    return made


@pytest.fixture
def steps(artifacts: Artifacts) -> DeployedModule:
    """Its answer says of which version its weights are."""
    return artifacts.load("steps", runners=8)


def ones() -> torch.Tensor:
    return torch.ones(2, 8, device="cuda")


def answer_of(module: DeployedModule) -> float:
    (value,) = set(module(ones()).flatten().tolist())
    return float(value)


def wide_state(value: float, device: str = "cuda") -> dict[str, torch.Tensor]:
    """With ones as input the answer is the tanh of `value`, whatever `value` is."""
    matrix = torch.full((WIDTH, WIDTH), 1 / WIDTH, device=device)
    state = {f"{i}.weight": matrix for i in range(DEPTH - 1)}
    return {**state, f"{DEPTH - 1}.weight": matrix * value}


# ---- export and calls ----------------------------------------------------------------------------


def test_exports_say_what_they_made(artifacts: Artifacts) -> None:
    kind = _C.cuda_architecture(0)
    assert kind.startswith("sm_")
    for name in artifacts.models:
        module = artifacts.load(name)
        assert module.facts["gpu"] == kind
        assert module.device == torch.device("cuda", torch.cuda.current_device())
    assert artifacts.made["steps"].folded == 1
    assert {3, 16, 33} <= set(artifacts.made["steps"].proved_sizes)
    assert artifacts.made["mixed"].folded >= 2, "the weights that autocast casts"
    keys = [artifacts.folder / "own.pub"]
    assert eagercache.verify_module(artifacts.folder / "wide", keys=keys).mismatches == ()


@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"verify_weights": True}])
@pytest.mark.parametrize("name", ["steps", "tied", "mixed", "wide"])
def test_answers_are_the_modules(artifacts: Artifacts, name: str, options: dict[str, Any]) -> None:
    module, model = artifacts.load(name, **options), artifacts.models[name]
    if name == "tied":
        args, kwargs = map(on_gpu, deploy_zoo.tied_call())
    else:
        sizes = [info or 5 for info in module.inputs[0].sizes]
        args, kwargs = (torch.randn(sizes, device="cuda"),), {}
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=name == "mixed"):
        expected = model(*args, **kwargs)
    for _ in range(3):
        answer = module(*args, **kwargs)
        torch.testing.assert_close(answer, expected)
    assert not any(
        t.requires_grad for t in torch.utils._pytree.tree_leaves(answer) if t is not None
    )


def test_open_sizes_strides_and_addresses(steps: DeployedModule) -> None:
    for size in (2, 3, 31, 257):
        answer = steps(torch.ones(size, 8, device="cuda"))
        assert answer.shape == (size, 4)
        assert set(answer.flatten().tolist()) == {deploy_zoo.Steps.answer(1.0)}
    x = torch.randn(8, 6, device="cuda").t()
    expected = steps(x.contiguous())
    assert torch.equal(steps(x), expected)
    for offset in (1, 2, 3):  # not where vector loads may begin
        memory = torch.empty(48 + offset, device="cuda")
        moved = memory[offset:].view(6, 8)
        moved.copy_(x)
        assert torch.equal(steps(moved), expected)
    with refusal("invalid_argument", "the input x", "[2, 7]"):
        steps(torch.ones(2, 7, device="cuda"))


def test_answers_come_on_the_current_stream(steps: DeployedModule) -> None:
    steps(ones())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(5):
            torch.cuda._sleep(SLEEP // 10)
            x = torch.empty(2, 8, device="cuda").fill_(float(number))
            answer = steps(x)
            waited = stream.query()
            # The first call on a stream may load what the driver has not loaded yet.
            assert number == 0 or not waited
            assert set(answer.flatten().tolist()) == {8.0 * number + 3}
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(ones())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captures_are_refused(artifacts: Artifacts, steps: DeployedModule) -> None:
    steps(ones())
    x, scratch = ones(), torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch.add_(1)
        with refusal("unsupported", "captured into a graph"):
            steps(x)
        with refusal("unsupported", "captured into a graph"):
            steps.update_constants({"shift": torch.ones(4)})
    graph.replay()
    assert answer_of(steps) == deploy_zoo.Steps.answer(1.0)
    assert bool((scratch == 1).all())


# ---- constants -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_updates_from_the_host_and_the_gpu_fold_and_swap(
    steps: DeployedModule, device: str
) -> None:
    def state(value: float) -> dict[str, torch.Tensor]:
        return {k: v.to(device) for k, v in deploy_zoo.Steps.state(value).items()}

    steps.update_constants(state(3.0), whole=True)
    assert answer_of(steps) == deploy_zoo.Steps.answer(3.0)
    given = torch.full((4,), 5.0, device=device)
    steps.update_constants({"shift": given})
    given.zero_()
    assert answer_of(steps) == (8 * 3 + 3 + 5 + 3) * 3, "the tensor was copied"
    steps.update_constants(state(2.0), inactive=True)
    assert answer_of(steps) == (8 * 3 + 3 + 5 + 3) * 3
    assert steps.constant_values(inactive=True)["scale"].tolist() == [2.0] * 4
    assert steps.constant_values()["scale"].device.type == "cuda"
    steps.swap_constants()
    assert answer_of(steps) == deploy_zoo.Steps.answer(2.0)
    steps.swap_constants()
    assert answer_of(steps) == (8 * 3 + 3 + 5 + 3) * 3
    steps.drop_inactive_constants()
    assert steps.inactive_version is None


def test_kept_tensors_are_on_the_gpu_and_folded_when_asked(steps: DeployedModule) -> None:
    state = on_gpu(deploy_zoo.Steps.state(1.0))
    steps.update_constants(state, inactive=True, copy=False)
    steps.swap_constants()
    for value in state.values():
        value.fill_(2.0)
    assert answer_of(steps) == (8 * 2 + 2 + 1 + 1) * 2, "folded values are the old ones"
    steps.fold_constants()
    assert answer_of(steps) == deploy_zoo.Steps.answer(2.0)
    with refusal("invalid_argument", "scale", "can only be kept where it is on cuda:0"):
        steps.update_constants({"scale": torch.ones(4)}, copy=False)
    with refusal("invalid_argument", "scale", "16 bytes"):
        steps.update_constants({"scale": torch.ones(5, device="cuda")[1:]}, copy=False)


def test_a_wrong_update_changes_nothing(artifacts: Artifacts, steps: DeployedModule) -> None:
    good = on_gpu(deploy_zoo.Steps.state(7.0))
    for inactive in (False, True):
        for values, text in [
            ({**good, "nothing": torch.ones(1)}, "there is no constant nothing"),
            ({**good, "scale": torch.ones(5, device="cuda")}, "[5]"),
            ({**good, "shift": torch.ones(4).double()}, "Double"),
            ({**good, "folded.0": torch.ones(4)}, "folded.0 is folded"),
        ]:
            with refusal("invalid_argument", text):
                steps.update_constants(values, inactive=inactive)
    assert answer_of(steps) == deploy_zoo.Steps.answer(1.0)
    assert steps.version == 1 and steps.inactive_version is None
    tied = artifacts.load("tied")
    wrong = torch.tensor([0, 1, 2, 4])
    for order in (wrong, wrong.cuda()):
        with refusal("invalid_argument", "order has an index outside of [0, 4)"):
            tied.update_constants({"order": order})
    with refusal("invalid_argument", "other names"):
        both = {"embed.weight": torch.zeros(16, 8), "head.weight": torch.ones(16, 8).cuda()}
        tied.update_constants(both)
    tied.update_constants({"head.weight": torch.zeros(16, 8)})
    args, kwargs = map(on_gpu, deploy_zoo.tied_call())
    assert tied(*args, **kwargs)["logits"].abs().max() == 0


# ---- calls that are under way --------------------------------------------------------------------


def test_calls_under_way_keep_the_old_weights(artifacts: Artifacts) -> None:
    """Their memory is not used again before the GPU is through with them."""
    module = artifacts.load("wide")
    module.update_constants(wide_state(0.5), whole=True)
    x = torch.ones(8, WIDTH, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        module(x)
    for turn in range(3):
        torch.cuda.synchronize()
        before = module(x).clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
            answer = module(x)
        value = 0.25 * (turn + 2)
        module.update_constants(wide_state(value), inactive=True)
        module.swap_constants()
        module.drop_inactive_constants()
        for _ in range(4):  # these would get the memory of the old ones
            module.update_constants(wide_state(float("nan")), inactive=True)
            module.drop_inactive_constants()
        assert not stream.query(), "nothing waited for the call"
        expected = torch.tanh(torch.tensor(value, device="cuda"))
        torch.testing.assert_close(module(x), expected.expand(8, WIDTH))
        stream.synchronize()
        assert torch.equal(answer, before)


def test_a_module_that_is_let_go_of_is_computed_to_the_end(artifacts: Artifacts) -> None:
    module = artifacts.load("wide")
    module.update_constants(wide_state(0.5), whole=True)
    x = torch.ones(8, WIDTH, device="cuda")
    before = module(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        answer = module(x)
    del module
    gc.collect()
    other = artifacts.load("wide")
    for _ in range(4):
        other.update_constants(wide_state(float("nan")))
    stream.synchronize()
    assert torch.equal(answer, before)


@pytest.mark.parametrize("how", ["swap", "active"])
def test_every_answer_is_of_one_whole_version(steps: DeployedModule, how: str) -> None:
    value_of = {1: 1.0}
    failures: list[str] = []
    stop = threading.Event()
    seen: set[int] = set()

    def ask() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = ones()
            while not stop.is_set() and not failures:
                (output,), version = steps.run_versioned([x])
                met = set(output.flatten().tolist())
                if met != {deploy_zoo.Steps.answer(value_of[version])}:
                    failures.append(f"version {version}: {met}")
                seen.add(version)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for n in range(300):
            version = n + 2
            value_of[version] = float(version % 61 + 1)
            state = deploy_zoo.Steps.state(value_of[version])
            if n % 2:
                state = on_gpu(state)
            steps.update_constants(state, inactive=how == "swap", whole=True)
            if how == "swap":
                steps.swap_constants()
            assert steps.version == version
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(seen) > 20


def test_memory_is_given_back(artifacts: Artifacts) -> None:
    def settled() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    state = wide_state(0.5)
    x = torch.ones(8, WIDTH, device="cuda")
    artifacts.load("wide")(x)  # what cuBLAS keeps for a stream
    before = settled()
    module = artifacts.load("wide")
    weights = DEPTH * WIDTH * WIDTH * 4
    assert weights <= settled() - before < weights + (1 << 20)
    for _ in range(100):
        module.update_constants(state)
        module(x)
    assert settled() - before < weights + (1 << 20)
    module.update_constants(state, inactive=True)
    assert settled() - before >= 2 * weights
    module.swap_constants()
    module.drop_inactive_constants()
    assert settled() - before < weights + (1 << 20)
    del module
    assert settled() == before


# ---- devices -------------------------------------------------------------------------------------


def test_tensors_and_modules_on_other_devices_are_refused(
    artifacts: Artifacts, steps: DeployedModule
) -> None:
    with refusal("invalid_argument", "the input x is no plain tensor of cuda:0"):
        steps(torch.ones(2, 8))
    with refusal("invalid_argument", "exported on a GPU", "cannot run on cpu"):
        artifacts.load("steps", device="cpu")
    with refusal("invalid_argument", "there is no cuda:64"):
        artifacts.load("steps", device=64)
    with refusal("invalid_argument", "'tpu' is no device"):
        artifacts.load("steps", device="tpu")
    key, path = artifacts.folder / "own.pem", artifacts.folder / "refused"
    with refusal("unsupported", "on several devices: cpu, cuda:0"):
        export_module(artifacts.models["steps"], (torch.randn(2, 8),), path=path, key=key)
    host = deploy_zoo.Steps().eval()
    export_module(host, (torch.randn(2, 8),), path=artifacts.folder / "host", key=key)
    assert artifacts.load("host").device == torch.device("cpu")
    with refusal("invalid_argument", "exported on the CPU", "cannot run on cuda"):
        artifacts.load("host", device="cuda")
    with refusal("invalid_argument", "no plain tensor of the CPU"):
        artifacts.load("host")(ones())


NO_GPU = """
import sys, eagercache, torch
assert not torch.cuda.is_available()
path, key = sys.argv[1:]
try:
    eagercache.load_module(path, keys=[key])
except eagercache.DeployError as error:
    print(error.code, error)
print(eagercache.verify_module(path, keys=[key]).mismatches)
"""


def test_without_a_gpu_it_is_refused(artifacts: Artifacts) -> None:
    names = [str(artifacts.folder / "steps"), str(artifacts.folder / "own.pub")]
    done = subprocess.run(
        [sys.executable, "-c", NO_GPU, *names],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("incompatible "), done.stdout
    assert "this process has none that torch can use" in done.stdout
    assert f"('gpu', '{_C.cuda_architecture(0)}', '(missing)')" in done.stdout


@pytest.fixture
def for_another(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path of an artifact that says that it is for another kind of GPU."""
    facts = exporting._Export._facts
    other = {"gpu": "sm_35 13 multiprocessors"}
    monkeypatch.setattr(exporting._Export, "_facts", lambda *a: {**facts(*a), **other})
    path = artifacts.folder / "other"
    model = artifacts.models["steps"]
    export_module(model, (ones(),), path=path, key=artifacts.folder / "own.pem")
    yield path


def test_another_kind_of_gpu_is_refused(artifacts: Artifacts, for_another: Path) -> None:
    with refusal("incompatible", "sm_35 13 multiprocessors", "cuda:0 is another kind (sm_"):
        artifacts.load("other")
    row = eagercache.verify_module(for_another, keys=[artifacts.folder / "own.pub"]).mismatches
    assert row == (("gpu", "sm_35 13 multiprocessors", _C.cuda_architecture(0)),)


def test_the_second_gpu(artifacts: Artifacts) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    module = artifacts.load("steps", device="cuda:1")
    x = torch.ones(2, 8, device="cuda:1")
    for value in (1.0, 4.0):
        module.update_constants(on_gpu(deploy_zoo.Steps.state(value)))
        for current in (0, 1):
            with torch.cuda.device(current):
                answer = module(x)
            assert answer.device.index == 1
            assert set(answer.flatten().tolist()) == {deploy_zoo.Steps.answer(value)}
    with refusal("invalid_argument", "no plain tensor of cuda:1"):
        module(ones())
    with torch.cuda.device(1):
        assert artifacts.load("steps").device == torch.device("cuda:1")


# ---- C++ -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpp") / "cpp_artifact"
    return cpp_programs.build(HERE / "cpp_artifact", folder)


@pytest.mark.parametrize("device", ["default", "cuda:0"])
def test_a_program_without_python(
    artifacts: Artifacts, program: Path, tmp_path: Path, device: str
) -> None:
    names = (artifacts.folder / "steps", artifacts.folder / "own.pub")
    ran = cpp_programs.run(program, *names, device, folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "device cuda:0"
    words = lines[1].split()
    assert int(words[1]) >= 300 and words[2:] == ["wrong", "0", "failed", "0"], lines[1]
    assert lines[2].startswith("host: the input x is no plain tensor of cuda:0")
    assert lines[3] == "values there"
    cpp_programs.expect_no_python(ran)


def test_a_program_without_python_says_what_is_refused(
    artifacts: Artifacts, program: Path, tmp_path: Path, for_another: Path
) -> None:
    key = artifacts.folder / "own.pub"
    for path, device, env, text in (
        (artifacts.folder / "steps", "cpu", {}, "invalid_argument: "),
        (artifacts.folder / "steps", "default", {"CUDA_VISIBLE_DEVICES": ""}, "has none that"),
        (for_another, "default", {}, "is another kind (sm_"),
    ):
        ran = cpp_programs.run(program, path, key, device, folder=tmp_path, **env)
        assert ran.returncode == 2, ran.stdout + ran.stderr
        assert ran.stdout.startswith("refused ") and text in ran.stdout, ran.stdout
