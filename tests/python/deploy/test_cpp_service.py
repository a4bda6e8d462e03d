"""A program without Python (examples/cpp_service), made as its page of the documentation says."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import clean_environment, make_tools, run_python
from eagercache import _C
from eagercache.base import environment
from test_docs import ROOT, program_of

pytestmark = pytest.mark.once

PAGE = ROOT / "docs" / "how-to" / "serve-from-cpp.md"
SOURCES = ROOT / "examples" / "cpp_service"
REQUESTS = {f"r{i}": [(i * i + j * 5) % 17 + i / 8 for j in range(16)] for i in range(200)}
HOOKED = 3  # calls of a request that kernels may answer: layer norm, silu, softmax


@dataclass(frozen=True)
class Served:
    """How the service ended: its answers by the requests' names, and what else it said."""

    returncode: int
    answers: dict[str, list[float]]
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Service:
    """The folder in which the page's commands ran: build/, kernels.bundle, release.pub, ..."""

    folder: Path

    def run(
        self,
        *arguments: object,
        trace: tuple[str, ...] = (),
        folder: Path | None = None,
        **env: str,
    ) -> Served:
        """Runs the service over REQUESTS, with no program to be found in its PATH."""
        command = [*trace, str(self.folder / "build/cpp_service"), "--always"]
        command += ["--weights", str(self.folder / "weights.bin"), *map(str, arguments)]
        variables = {**clean_environment(**env), "PATH": "/nowhere"}
        variables.pop("PYTHONPATH")
        lines = [f"{name} {' '.join(map(str, row))}\n" for name, row in REQUESTS.items()]
        done = subprocess.run(
            command, input="".join(lines), env=variables, cwd=folder or self.folder,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        rows = [line.split() for line in done.stdout.splitlines()]
        answers = {row[0]: [float(number) for number in row[1:]] for row in rows}
        return Served(done.returncode, answers, done.stdout, done.stderr)

    def signed(self, path: Path) -> tuple[object, ...]:
        """Arguments for a bundle and a store of the test's own."""
        return (
            "--bundle",
            path,
            "--key",
            self.folder / "release.pub",
            "--store",
            path.parent / "s",
        )


@pytest.fixture(scope="session")
def cpp_service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    """What a reader of the page has at its end."""
    if shutil.which("cmake") is None:
        pytest.skip("NOT RUN: cmake not found")
    folder = tmp_path_factory.mktemp("cpp_service")
    (folder / "examples").symlink_to(ROOT / "examples")
    tools = make_tools(folder / "bin")
    variables = clean_environment(EAGERCACHE_TORCH_ROOT=str(Path(torch.__file__).parent))
    variables["PATH"] = f"{tools}:{variables['PATH']}"
    done = run_python(program_of(PAGE), variables, folder=folder, timeout=600, fills=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Service(folder)


@pytest.fixture(scope="session")
def expected() -> dict[str, torch.Tensor]:
    """What eager PyTorch answers."""
    spec = importlib.util.spec_from_file_location("cpp_service_model", SOURCES / "model.py")
    assert spec is not None and spec.loader is not None
    model: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    weights = model.make_weights()
    with torch.inference_mode():
        return {
            name: model.classify(torch.tensor([row]), weights)[0] for name, row in REQUESTS.items()
        }


def expect_answers(served: Served, expected: dict[str, torch.Tensor]) -> None:
    assert served.returncode == 0, served.stderr
    assert served.answers.keys() == expected.keys()
    for name, row in served.answers.items():
        torch.testing.assert_close(torch.tensor(row), expected[name], rtol=1e-5, atol=1e-6)


def expect_hits_only(served: Served) -> None:
    calls = HOOKED * len(REQUESTS)
    said = f"kernels answered {calls} of {calls} calls of hooked operators; "
    assert served.stderr.startswith(said) and served.stderr.count("\n") == 1, served.stderr


def expect_refusal(served: Served, *texts: str) -> None:
    assert served.returncode == 2, served.stderr
    assert served.stdout == ""
    assert served.stderr.startswith("cpp_service: ") and served.stderr.count("\n") == 1
    for text in texts:
        assert text in served.stderr


def test_a_bundle_answers_every_call_of_several_threads_and_nothing_is_started(
    cpp_service: Service, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = shutil.copy(cpp_service.folder / "kernels.bundle", tmp_path)
    arguments = (*cpp_service.signed(Path(path)), "--threads", 4)
    if shutil.which("strace") is None:
        expect_hits_only(cpp_service.run(*arguments))
        pytest.skip("NOT RUN: strace not found, so no call of exec or fork could be looked for")
    log = tmp_path / "trace"
    calls = "execve,execveat,fork,vfork,clone,clone3,openat"
    strace = (str(shutil.which("strace")), "-f", "-o", str(log), "-e", f"trace={calls}")
    served = cpp_service.run(*arguments, trace=strace)
    expect_answers(served, expected)
    expect_hits_only(served)
    text = log.read_text(errors="replace")
    assert len(re.findall(r"\bexec(?:ve|veat)\(", text)) == 1, "the service itself"
    made = [line for line in text.splitlines() if re.search(r"\b(v?fork|clone3?)\(", line)]
    assert made and all("CLONE_THREAD" in line for line in made), made
    assert "libtorch_cpu.so" in text  # the trace sees what is loaded
    assert "libpython" not in text and "libtorch_python" not in text


def test_the_store_that_python_filled_hits_too(
    cpp_service: Service, expected: dict[str, torch.Tensor]
) -> None:
    served = cpp_service.run("--store", cpp_service.folder / "kernels")
    expect_answers(served, expected)
    expect_hits_only(served)


def test_settings_of_the_environment_are_heard(
    cpp_service: Service, expected: dict[str, torch.Tensor]
) -> None:
    store = str(cpp_service.folder / "kernels")
    named = cpp_service.run(EAGERCACHE_DIR=store)
    expect_hits_only(named)
    skipping = cpp_service.run(EAGERCACHE_DIR=store, EAGERCACHE_SKIP="silu, aten::_softmax")
    expect_answers(skipping, expected)
    assert f"answered {len(REQUESTS)} of {len(REQUESTS)} calls" in skipping.stderr
    disabled = cpp_service.run("--or-native", EAGERCACHE_DIR=store, EAGERCACHE_DISABLE="1")
    expect_answers(disabled, expected)
    assert "EAGERCACHE_DISABLE is set" in disabled.stderr
    assert "answered 0 of 0 calls" in disabled.stderr
    verified = cpp_service.run(EAGERCACHE_DIR=store, EAGERCACHE_VERIFY="1", EAGERCACHE_LOG="info")
    expect_answers(verified, expected)
    assert "event=verdict" in verified.stderr and "put aside" not in verified.stderr
    wrong = cpp_service.run(EAGERCACHE_DIR=store, EAGERCACHE_VERIFY="much")
    assert "EAGERCACHE_VERIFY='much' is ignored: use a number from 0 to 1" in wrong.stderr


def test_altered_truncated_unsigned_and_foreign_bundles_are_refused_with_the_reason(
    cpp_service: Service, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "kernels.bundle"
    whole = (cpp_service.folder / "kernels.bundle").read_bytes()
    _C.make_signing_key(str(tmp_path / "other.pem"), str(tmp_path / "other.pub"))
    arguments = cpp_service.signed(path)
    for content, reason in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), "was altered or cut off"),
        (whole[: len(whole) // 2], "was altered or cut off"),
        (whole[:20] + bytes(96) + whole[116:], "is not among those that are trusted"),
        (b"import torch\n", "is no whole bundle"),
    ):
        path.write_bytes(content)
        expect_refusal(cpp_service.run(*arguments), "kernels.bundle", reason)
    path.write_bytes(whole)
    foreign = ("--bundle", path, "--key", tmp_path / "other.pub", "--store", tmp_path / "s")
    expect_refusal(cpp_service.run(*foreign), "which is not among those that are trusted")
    expect_refusal(
        cpp_service.run("--bundle", path, "--store", tmp_path / "s"), "no key is trusted"
    )
    assert not (tmp_path / "s").exists()
    native = cpp_service.run(*foreign, "--or-native")
    expect_answers(native, expected)
    assert "not among those" in native.stderr and "answered 0 of 0 calls" in native.stderr


def _other_torch(text: str) -> str:
    return re.sub(r"^torch\.version: .*$", "torch.version: 1.0", text, flags=re.MULTILINE)


def test_a_bundle_that_is_revoked_or_has_expired_is_refused(
    cpp_service: Service, tmp_path: Path
) -> None:
    text, now = environment.environment_text(), int(time.time())
    opened = _C.Store(str(tmp_path / "made"), text)
    opened.publish({"key": "1" * 64, "kind": "native", "facts": {}})
    path, key = tmp_path / "old.bundle", str(cpp_service.folder / "release.pem")
    _C.write_bundle(str(path), opened, text, key, now - 9, now - 99)
    expect_refusal(cpp_service.run(*cpp_service.signed(path)), "old.bundle expired on")
    digest = _C.write_bundle(str(path), opened, text, key)["digest"]
    listed = tmp_path / "revoked"
    listed.write_text(digest)
    revoked = cpp_service.run(*cpp_service.signed(path), EAGERCACHE_REVOKED=str(listed))
    expect_refusal(revoked, "old.bundle", "is revoked")
    assert not (tmp_path / "s").exists()


def test_kernels_for_another_torch_are_refused_with_the_field(
    cpp_service: Service, tmp_path: Path
) -> None:
    text = _other_torch(environment.environment_text())
    opened = _C.Store(str(tmp_path / "old"), text)
    opened.publish({"key": "1" * 64, "kind": "native", "facts": {}})
    path = tmp_path / "old.bundle"
    _C.write_bundle(str(path), opened, text, str(cpp_service.folder / "release.pem"))
    reason = f"torch.version is {torch.__version__} and it was made with 1.0"
    expect_refusal(cpp_service.run(*cpp_service.signed(path)), "old.bundle cannot be used", reason)
    expect_refusal(cpp_service.run("--store", tmp_path / "old"), "cannot be used here", reason)
    assert not (tmp_path / "s").exists()


def test_stores_that_cannot_be_used_are_refused_with_the_reason(
    cpp_service: Service, tmp_path: Path
) -> None:
    expect_refusal(cpp_service.run(), "no store is named", "EAGERCACHE_DIR")
    expect_refusal(cpp_service.run("--store", tmp_path / "none"), "there is no store")
    others = tmp_path / "others"
    shutil.copytree(cpp_service.folder / "kernels", others, copy_function=shutil.copy2)
    others.chmod(0o777)
    expect_refusal(cpp_service.run("--store", others), "others")


def test_the_library_and_python_agree_on_what_kernels_meet_when_they_run(
    cpp_service: Service,
) -> None:
    for capability in ("(unset)", "avx2", "a\\b\tc"):
        variable = {} if capability == "(unset)" else {"ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run(
            [cpp_service.folder / "build/cpp_service", "--environment"],
            env=clean_environment(**variable), capture_output=True, text=True, check=True,
        )  # fmt: skip
        told = environment.parse(done.stdout)
        here = environment.parse(environment.environment_text())
        here["variable.ATEN_CPU_CAPABILITY"] = environment._escaped(capability)
        assert told == {field: here[field] for field in environment.RUNNING_FIELDS}
