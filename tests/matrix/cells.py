"""What is tried with each torch, a process each: `python -m matrix.cells NAME FOLDER`.

A cell ends with one line that says what was seen. What it expects and does not find is an
exception, whose last line then stands in the table. FOLDER is shared by the cells of one torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "examples" / "cpp_service"
# The service answers these; three calls of each are of hooked operators.
REQUESTS = 40


def imported(folder: Path) -> str:
    """The extension loads, and every operator of the default set has its hook."""
    import eagercache
    import torch
    from eagercache import _build_info

    with eagercache.enable(on_miss="native", cache_dir=folder / "import") as enabled:
        assert eagercache.available() and enabled.active
        x = torch.randn(8, 8)
        for _ in range(3):
            torch.var(x, -1)
        assert eagercache.stats().misses > 0, "no hook saw the call"
    return (
        f"{len(eagercache.default_operators())} operators, built with {_build_info.TORCH_VERSION}"
    )


def operator(folder: Path) -> str:
    """Kernels of single operators, with a gradient, an update in place and `out=`."""
    import eagercache
    import torch

    torch.manual_seed(0)
    x = torch.randn(64, 96)

    def calls() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        soft = torch.softmax(leaf, -1)
        soft.square().sum().backward()
        total, out = x.clone(), torch.empty(64, 96)
        total.mul_(3.0)
        torch.add(x, total, alpha=0.5, out=out)
        return [torch.var(x, -1), soft.detach(), total, out, leaf.grad]

    native = calls()
    names = ["var.correction", "_softmax", "_softmax_backward_data", "mul_.Tensor", "add.out"]
    with eagercache.enable(names, on_miss="wait", choose="always", cache_dir=folder / "operator"):
        calls()
        before = eagercache.stats().hits
        answers = calls()
        hits = eagercache.stats().hits - before
    for answer, expected in zip(answers, native, strict=True):
        torch.testing.assert_close(answer, expected)
    assert hits >= len(names), f"{hits} calls by kernels: {_decisions()}"
    forms = {kernel.facts.get("form", "") for kernel in eagercache.kernels()}
    assert "bare" in forms, f"no bare kernel: {forms}"
    return f"{hits} calls by kernels"


def module(folder: Path) -> str:
    """A whole module, in inference: the second size shares or gets a kernel too."""
    import eagercache
    import torch

    model = _block()
    first, second = torch.randn(16, 64), torch.randn(24, 64)
    native = [model(first), model(second)]
    with torch.inference_mode(), _modules(folder / "module") as used:
        for _ in range(4):
            answers = [model(first), model(second)]
        eagercache.wait()
        answers = [model(first), model(second)]
        hits = used(model)
    for answer, expected in zip(answers, native, strict=True):
        torch.testing.assert_close(answer, expected.detach(), rtol=1e-4, atol=1e-5)
    assert hits > 0, eagercache.explain_module(model)
    return f"{hits} calls by kernels"


def training(folder: Path) -> str:
    """A whole module in training: forward and backward by kernels, the same steps as eager."""
    import copy

    import eagercache
    import torch

    model = _block()
    other = copy.deepcopy(model)
    x = torch.randn(16, 64)

    def steps(trained: torch.nn.Module, count: int) -> list[float]:
        optimizer = torch.optim.SGD(trained.parameters(), 1e-2)
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = trained(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    native = steps(other, 8)
    with _modules(folder / "training", training=True) as used:
        losses = steps(model, 8)
        hits = used(model)
    torch.testing.assert_close(losses, native, rtol=1e-4, atol=1e-6)
    assert hits > 0, eagercache.explain_module(model)
    return f"{hits} steps by kernels"


def function(folder: Path) -> str:
    """A function of several operators as one operator: its forward and its gradient."""
    import eagercache
    import torch
    from torch.nn import functional

    def gated(x, y):
        return functional.silu(x) * y

    gate = eagercache.op("matrix::gate", schema="(Tensor x, Tensor y) -> Tensor")(gated)

    x, y = (torch.randn(64, 96, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad((functional.silu(x) * y).square().sum(), (x, y))
    with eagercache.enable((), on_miss="wait", choose="always", cache_dir=folder / "function"):
        for _ in range(3):
            gradients = torch.autograd.grad(gate(x, y).square().sum(), (x, y))
        hits = eagercache.stats().hits
    torch.testing.assert_close(gradients, expected)
    decisions = {kernel.op: kernel.decision for kernel in eagercache.kernels()}
    assert set(decisions.values()) == {"kernel"} and len(decisions) == 2, decisions
    assert hits >= 4, f"{hits} calls by kernels"
    return f"{hits} calls by kernels"


def bundle(folder: Path) -> str:
    """A signed bundle of `operator`'s kernels, used where no compiler is to be found."""
    store, taken = folder / "operator", folder / "bundle"
    shutil.rmtree(taken, ignore_errors=True)
    taken.mkdir(mode=0o700)
    command = [sys.executable, "-m", "eagercache", "bundle"]
    _run([*command, "keygen", "release"], taken)
    _run([*command, "export", "k.bundle", "--key", "release.pem", "--dir", str(store)], taken)
    nowhere = {"PATH": "/nowhere", "CXX": ""}
    _run([*command, "import", "k.bundle", "--key", "release.pub", "--dir", "d"], taken, **nowhere)
    code = """
import eagercache, torch
torch.manual_seed(0)
x = torch.randn(64, 96)
with eagercache.enable(["var.correction", "_softmax"], on_miss="native", choose="always"):
    torch.var(x, -1), torch.softmax(x, -1)
    s = eagercache.stats()
assert (s.hits, s.misses, s.compiles) == (2, 0, 0), s
print(s.hits)
"""
    variables = {**nowhere, "EAGERCACHE_DIR": str(taken / "d")}
    said = _run([sys.executable, "-c", code], taken, **variables)
    return f"{said.strip()} calls by kernels, no compiler"


def cpp_program(folder: Path) -> str:
    """A program without Python, built against this torch, with kernels that Python made."""
    made = folder / "cpp_program"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(mode=0o700)
    import eagercache
    import torch

    run = [sys.executable, "-m", "eagercache", "run", "--on-miss", "wait", "--choose", "always"]
    _run([*run, "--dir", "kernels", str(SERVICE / "model.py"), "weights.bin"], made)
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    prefix = f"-DCMAKE_PREFIX_PATH={eagercache.cmake_prefix_path}"
    variables = {"EAGERCACHE_TORCH_ROOT": str(Path(torch.__file__).parent)}
    _run([cmake, "-S", str(SERVICE), "-B", "build", prefix], made, **variables)
    _run([cmake, "--build", "build"], made, **variables)
    rows = "".join(
        f"r{i} {' '.join(str((i * j) % 7) for j in range(16))}\n" for i in range(REQUESTS)
    )
    service = [str(made / "build/cpp_service"), "--weights", "weights.bin", "--store", "kernels"]
    done = subprocess.run(
        [*service, "--always"], input=rows, cwd=made, capture_output=True, text=True, check=False,
        env={**_environment(), "PATH": "/nowhere"},
    )  # fmt: skip
    calls = 3 * REQUESTS
    expected = f"kernels answered {calls} of {calls} calls"
    assert done.returncode == 0 and expected in done.stderr, done.stderr.strip()
    assert len(done.stdout.splitlines()) == REQUESTS
    return f"{calls} calls by kernels"


CELLS: dict[str, Callable[[Path], str]] = {
    "import": imported,
    "operator": operator,
    "module": module,
    "training": training,
    "function": function,
    "bundle": bundle,
    "C++ program": cpp_program,
}


def _block() -> torch.nn.Module:  # noqa: F821 - torch is imported by the cells
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.LayerNorm(64), torch.nn.Linear(64, 128), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, 64))


def _modules(store: Path, training: bool = False):
    """Kernels of whole modules; the block gets a function that counts a module's calls by them."""
    import contextlib

    import eagercache
    from eagercache.modules.manager import manager

    @contextlib.contextmanager
    def block():
        choices = {"on_miss": "wait", "choose": "always", "cache_dir": store}
        with eagercache.enable((), modules="Sequential", training=training, **choices):
            yield lambda model: sum(row.hits for part, row in manager.stats() if part is model)

    return block()


def _decisions() -> dict[str, str]:
    import eagercache

    return {kernel.op: kernel.reason or kernel.decision for kernel in eagercache.kernels()}


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHONPATH")}


def _run(command: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        raise RuntimeError(f"{Path(command[0]).name} {command[1]}: status {done.returncode}")
    return done.stdout


def main() -> None:
    """The command line."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    print("SAW " + CELLS[name](folder))


if __name__ == "__main__":
    main()
