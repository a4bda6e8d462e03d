"""Fixtures: private stores, and programs that run in a process of their own (launcher.py).

Hooks are registered once per process and stay, so what a test says about a whole program it says
about a fresh process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher import Finished, Launcher
from prepared_worker import Preparer, with_workers

PACKAGE_ROOT = str(Path(__import__("eagercache").__file__).parent.parent)

Program = Callable[..., dict[str, Any]]

# Names the folder in which all processes of a session keep what their workers precompile.
HEADERS = "TESTS_PRECOMPILED_HEADERS"


def pytest_configure(config: pytest.Config) -> None:
    """Makes that folder, in the process that starts the others."""
    if HEADERS not in os.environ:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        Path(folder.name, "compiled").mkdir()  # compiled_before.py
        os.environ[HEADERS] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop(HEADERS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share kernels run in one process (sharing.py)."""
    from sharing import make_scheduler

    return make_scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A share of the tests runs where one is asked for; the others count as deselected."""
    from sharing import left_out

    out = left_out([item.nodeid for item in items])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


def make_tools(folder: Path) -> Path:
    """A new folder for PATH, in which `python` and `eagercache` are this environment's."""
    folder.mkdir()
    for name, command in (("python", ""), ("eagercache", "-m eagercache ")):
        tool = folder / name
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command}"$@"\n')
        tool.chmod(0o755)
    return folder


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without eagercache's variables, with `extra` on top.

    No program of a test leaves a process that goes on compiling. Tests that run side by side, on
    two cores too, do not wait for each other's compiles.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EAGERCACHE_")}
    environment.pop(HEADERS, None)
    environment["EAGERCACHE_SLOTS"] = "16"
    environment["EAGERCACHE_LINGER"] = "0"
    environment["PYTHONPATH"] = PACKAGE_ROOT
    environment.update(extra)
    return environment


@contextlib.contextmanager
def module_kernels(store: Path, training: bool = False) -> Iterator[None]:
    """Kernels of whole modules that the store has answer in this process; nothing is compiled."""
    import eagercache
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with eagercache.enable(
            ops=(),
            modules="auto",
            training=training,
            on_miss="native",
            choose="always",
            cache_dir=store,
        ) as enabled:
            assert enabled.active
            yield
    finally:
        torch.set_num_threads(threads)


def module_hits(model: Any) -> int:
    """Calls of a module that a kernel answered."""
    from eagercache.modules.manager import manager

    return sum(row.hits for part, row in manager.stats() if part is model)


@functools.cache
def _launcher() -> Launcher:
    launcher = Launcher(clean_environment())
    atexit.register(launcher.close)
    return launcher


@functools.cache
def _preparer() -> Preparer:
    preparer = Preparer(clean_environment(), Path(os.environ[HEADERS]))
    atexit.register(preparer.close)
    return preparer


def with_prepared_workers(environment: dict[str, str]) -> dict[str, str]:
    """`environment` for programs that are not about workers and get them quickly, as `fills`."""
    return with_workers(_preparer().address, environment)


def run_python(
    code: str,
    environment: dict[str, str],
    *arguments: str,
    folder: Path | None = None,
    timeout: float = 240,
    fills: bool = False,
) -> Finished:
    """Runs `code` as a program of its own, in `folder`, until it ends: `python -c code arguments`.

    It is forked from a process that has imported torch, unless torch or the interpreter would read
    something else of `environment` when they start. One that is about what kernels answer, and not
    about how workers start, live and end, has them quickly (prepared_worker.py): `fills`.
    """
    changed = {
        name
        for name in environment.keys() | clean_environment().keys()
        if environment.get(name) != clean_environment().get(name)
    }
    folder = folder or Path.cwd()
    if all(name.startswith("EAGERCACHE_") or name == "PATH" for name in changed):
        workers = _preparer().address if fills else ""
        return _launcher().run(code, arguments, environment, folder, timeout, workers)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=with_prepared_workers(environment) if fills else environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def seeded(code: str) -> str:
    """The program with a seed where it first imports torch; its lines keep their numbers."""
    seed = "import torch; torch.manual_seed(0)"
    return re.sub(r"(?m)^import (.+, )?torch\b.*", rf"\g<0>; {seed}", code, count=1)


def run_program(
    code: str,
    cache: Path | None,
    *,
    timeout: float = 240,
    check: bool = True,
    fills: bool = False,
    **variables: str,
) -> dict[str, Any]:
    """Runs `code` as a program of its own; it may call `report(name=value, ...)` once.

    Returns the reported values, plus "stdout", "stderr" and "returncode". For `fills` see
    `run_python`. torch's random numbers are the same in each run, so that what failed fails again.
    """
    prelude = textwrap.dedent(
        """
        import json, sys
        def report(**values):
            print("REPORT " + json.dumps(values), flush=True)
        """
    )
    if cache is not None:
        variables.setdefault("EAGERCACHE_DIR", str(cache))
    done = run_python(
        prelude + seeded(textwrap.dedent(code)),
        clean_environment(**variables),
        timeout=timeout,
        fills=fills,
    )
    if check and done.returncode != 0:
        pytest.fail(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    values: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            values.update(json.loads(line[len("REPORT ") :]))
    return {**values, "stderr": done.stderr, "stdout": done.stdout, "returncode": done.returncode}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A private empty directory for a store."""
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def program(cache: Path) -> Program:
    """`run_program` with this test's own store."""

    def run(code: str, **variables: Any) -> dict[str, Any]:
        return run_program(code, cache, **variables)

    return run


# Calls whose kernels the tests of neighbours share; compiled once a session.
SHARED_CALLS = """
import torch
torch.manual_seed(0)
x = torch.randn(64, 96)
w = torch.randn(96)
def forward(t):
    z = torch.nn.functional.layer_norm(t, (96,), w, w)
    return torch.relu(z)
def shared_calls():
    torch.var(x, -1)
    torch.softmax(x, -1)
    torch.nn.functional.silu(x)
    forward(x)
"""
SHARED_OPS = (
    "['var.correction', 'native_layer_norm', '_softmax', 'silu', 'relu', 'threshold_backward']"
)


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store that holds kernels for SHARED_CALLS, forward and backward."""
    path = tmp_path_factory.mktemp("warm") / "cache"
    path.mkdir(mode=0o700)
    run_program(
        SHARED_CALLS
        + f"""
import eagercache
eagercache.enable({SHARED_OPS}, on_miss="wait", choose="always")
shared_calls()
y = x.clone().requires_grad_()
forward(y).square().sum().backward()
bad = [k for k in eagercache.kernels() if k.decision != "kernel"]
assert not bad, bad
# A kernel that is bitwise, and one that is not and is stored all the same.
torch.use_deterministic_algorithms(True)
torch.relu(x)
torch.var(x, -1)
""",
        path,
        timeout=600,
        fills=True,
    )
    yield path


@pytest.fixture
def warm_program(warm_cache: Path) -> Program:
    """Programs on the warm store: SHARED_CALLS first, hooks enabled, nothing is compiled."""

    def run(code: str, **variables: Any) -> dict[str, Any]:
        head = (
            textwrap.dedent(SHARED_CALLS)
            + f"import eagercache\neagercache.enable({SHARED_OPS}, on_miss='native',"
            " choose='always')\n"
        )
        return run_program(head + textwrap.dedent(code), warm_cache, **variables)

    return run


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Artifacts of modules: a `deploy_zoo.Deployed`."""
    import deploy_zoo

    return deploy_zoo.export_all(tmp_path_factory.mktemp("deployed"), run_program)


@pytest.fixture(scope="session")
def filled_modules(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store with kernels of modules: a `module_fill.Filled`."""
    import module_fill

    return module_fill.fill(tmp_path_factory.mktemp("modules"), run_program)


@pytest.fixture(scope="session")
def training_store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store with kernels of calls that need gradients: a `training_checks.Trained`."""
    import training_checks

    return training_checks.fill(tmp_path_factory.mktemp("training"), run_program)


@pytest.fixture
def training_kernels(training_store: Any) -> Iterator[None]:
    """The kernels of `training_store` answer in this process; nothing is compiled."""
    assert training_store.report["rows"]["ConvNorm"]["hits"] == [3], training_store.report
    with module_kernels(training_store.store, training=True):
        yield


@pytest.fixture
def server() -> Iterator[Any]:
    """A server on loopback that keeps bytes: a `remote_server.RemoteServer`."""
    import remote_server

    with remote_server.serving() as running:
        yield running


@pytest.fixture
def world(tmp_path: Path) -> Any:
    """Keys, and stores that share no disk: a `remote_world.World`."""
    import remote_world

    return remote_world.World(tmp_path)
