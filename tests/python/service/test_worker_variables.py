"""The variables that a compile worker has: a list, and what a program's own code may ask for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import run_program
from eagercache.base.environment import VARIABLES
from eagercache.base.worker_variables import (
    PASSED,
    as_in_program,
    is_withheld,
    passed_variables,
    program_variables,
)
from eagercache.service.settings import ServiceSettings
from eagercache.service.worker_process import worker_environment

SETTINGS = ServiceSettings(store_root="/nowhere", environment="")
# Loaders, interpreters and compilers; a user's threads; other code generation; secrets; proxies.
FOREIGN = (
    *("LD_PRELOAD", "LD_AUDIT", "GLIBC_TUNABLES", "GCONV_PATH", "CUDA_INJECTION64_PATH"),
    *("PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONHASHSEED", "PYTHONWARNINGS", "BASH_ENV", "PERL5LIB"),
    *("CPATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "LIBRARY_PATH"),
    *("OMP_NUM_THREADS", "OMP_SCHEDULE", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "MKL_NUM_THREADS"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CPP_WRAPPER", "TRITON_HOME", "TORCH_LOGS"),
    *("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DEBUG", "CONDA_PREFIX", "PYTORCH_CUDA_ALLOC_CONF"),
    *("EAGERCACHE_CHOOSE", "EAGERCACHE_PROGRAM", "EAGERCACHE_DIR"),
    *("http_proxy", "HTTPS_PROXY", "NO_PROXY", "AWS_SECRET_ACCESS_KEY", "ANYTHING"),
)


def test_a_worker_starts_with_the_variables_of_a_list() -> None:
    wanted = {*PASSED, *VARIABLES, "LC_ALL", "LC_CTYPE"}
    environ = dict.fromkeys([*wanted, *FOREIGN], "/x")
    assert set(passed_variables(environ)) == wanted
    made = {"CUDA_VISIBLE_DEVICES", "EAGERCACHE_INSIDE_WORKER", "PYTHONPATH", "PYTHONSAFEPATH"}
    made |= {"TORCHINDUCTOR_COMPILE_THREADS", "EAGERCACHE_INSIDE_WORKER_PATHS"}
    assert wanted <= set(worker_environment(SETTINGS, environ)) <= wanted | made


def test_a_worker_finds_libraries_and_compilers_where_the_program_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"LD_LIBRARY_PATH": ":lib:/opt/lib:", "PATH": "bin:", "CC": "bin/cc", "CXX": "g++-12"}
    kept = worker_environment(SETTINGS, environ)
    assert kept["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:/opt/lib"
    assert (kept["PATH"], kept["CC"], kept["CXX"]) == (
        f"{tmp_path}/bin",
        f"{tmp_path}/bin/cc",
        "g++-12",
    )


def test_what_passes_and_says_how_code_is_made_is_in_the_key() -> None:
    """Of what passes, nothing has the name of a setting of a code generator but what is keyed."""
    makers = ("AOT", "ATEN", "TORCHINDUCTOR", "TRITON", "MKL_CBWR", "ONEDNN", "DNNL", "NVIDIA")
    passes = passed_variables(dict.fromkeys([*PASSED, *FOREIGN], "1"))
    assert not [name for name in passes if name.startswith(makers)]


_ASKED = re.compile(
    r"""(?:environ(?:\.get|\.pop|\.setdefault)?\s*[\[(]|getenv\(|env_name_\w+\s*=)\s*"""
    r"""(?:\[\s*)?["']([A-Za-z_0-9]+)["']|["']([A-Z_0-9]+)["'] (?:not )?in os\.environ"""
)


# Of triton: what its own tests are run with.
_OF_TESTS = ("_compile_warmup", "_internal_testing", "_test_runner")


def _asked_for() -> Iterator[tuple[str, str]]:
    folder = Path(torch.__file__).parent
    parts = ("_inductor", "_dynamo", "_functorch", "_decomp", "_prims", "_refs", "fx", "_higher*")
    files = [path for part in parts for path in folder.glob(f"{part}/**/*.py")]
    files += [*folder.glob("*.py"), *folder.glob("cuda/*.py")]
    files += folder.parent.glob("triton/**/*.py")
    for path in files:
        if path.name.startswith(_OF_TESTS):
            continue
        for match in _ASKED.finditer(path.read_text(errors="replace")):
            yield match[1] or match[2], str(path)


def test_no_variable_that_torch_asks_for_comes_with_a_request() -> None:
    asked = dict(_asked_for())
    assert {"TORCHINDUCTOR_MAX_AUTOTUNE", "CXX", "FAKE_ALLOW_META"} <= asked.keys()
    # A process's number in a job, folders of Windows, where files are kept: no kernel's business.
    others = {"ROLE_RANK", "ProgramFiles", "NVTOOLSEXT_PATH", "WINDOWS_CUDA_HOME"}
    left = {name for name in asked.keys() - others if not is_withheld(name)}
    assert not {(name, asked[name]) for name in left if not name.startswith("XDG_")}


def test_a_programs_variables_are_there_for_its_request_and_for_python_alone() -> None:
    given = program_variables({"GAIN": "2", "LD_PRELOAD": "x.so", "HOME": "/h", "ODD": "\udcff"})
    assert given == {"GAIN": "2", "ODD": "\udcff"}
    before = dict(os.environ)
    with as_in_program({**given, "TORCHINDUCTOR_CPP_WRAPPER": "1"}):
        assert os.environ["GAIN"] == os.getenv("GAIN") == "2"
        assert os.environ["ODD"] == "\udcff"
        assert "TORCHINDUCTOR_CPP_WRAPPER" not in os.environ
        child = [sys.executable, "-S", "-c", "import os; print(os.environ.get('GAIN'))"]
        done = subprocess.run(child, capture_output=True, text=True, check=True)
        assert done.stdout == "None\n"
    assert dict(os.environ) == before


FORWARD = """
import os, sys
import torch, eagercache
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * float(os.environ["GAIN"]) + 1
net, x = Net(), torch.randn(64, 96)
expected = net(x)
eagercache.enable(ops=(), modules=Net, on_miss="wait", choose="always")
with torch.no_grad():
    same = [torch.equal(net(x), expected) for _ in range(3)]
    os.environ["GAIN"] = "-3"
    other = [torch.equal(net(x), torch.relu(x) * -3 + 1) for _ in range(3)]
report(same=same, other=other, reason=str(eagercache.explain_module(net)))
"""


# A worker of its own is started with the same variables whatever torch it imports. It compiles
# without what prepared workers share, in six times the time.
@pytest.mark.parametrize(
    "fills", [True, pytest.param(False, marks=[pytest.mark.once, pytest.mark.long])]
)
def test_a_forward_that_asks_for_a_variable_has_a_kernel_for_its_value(
    cache: Path, fills: bool
) -> None:
    done = run_program(FORWARD, cache, fills=fills, GAIN="2")
    assert done["same"] == done["other"] == [True] * 3
    assert list(cache.rglob("*.so")), done["reason"]


LIST = """
import os, torch, eagercache
from eagercache.service.settings import ServiceSettings
from eagercache.service.worker_process import WorkerProcess
process = WorkerProcess(ServiceSettings(store_root="/nowhere", environment="a: 1\\n"))
process._read(120.0, "start")
body = open(f"/proc/{process.pid}/environ", "rb").read().decode()
report(names=[row.partition("=")[0] for row in body.split("\\0") if row])
process.kill()
"""


def test_a_real_worker_has_nothing_that_is_not_listed() -> None:
    strange = {"ANYTHING": "1", "TORCH_LOGS": "+all", "OMP_NUM_THREADS": "3", "CPATH": "/x"}
    done = run_program(LIST, None, **strange)
    assert not set(done["names"]) & set(strange)
    assert {"PATH", "PYTHONPATH", "EAGERCACHE_INSIDE_WORKER"} <= set(done["names"])
