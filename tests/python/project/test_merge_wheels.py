"""One wheel of several that differ in torch, and the import that takes what fits from it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PACKAGE_ROOT, clean_environment
from eagercache.base import load, torch_versions
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.once

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "parts" / "merge_wheels.py"
NAME = "eagercache-0.1.0-cp311-cp311-linux_x86_64.whl"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("merge_wheels", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


merge_wheels = _script()


def make_wheel(folder: Path, torch_version: str, **other: str) -> Path:
    """A wheel as small as can be; `other` replaces or adds files of the package."""
    files = {
        "eagercache/__init__.py": "core = 1\n",
        "eagercache/_C.pyi": "",
        "eagercache/_C.cpython-311-x86_64-linux-gnu.so": f"code for {torch_version}",
        "eagercache/_build_info.py": f'TORCH_VERSION = "{torch_version}"\n',
        "eagercache/lib/libeagercache.so": f"library for {torch_version}",
        "eagercache/include/eagercache/eagercache.h": "// the same in all\n",
        "eagercache-0.1.0.dist-info/METADATA": (
            # Each admits the torch that it was built against, and no other.
            f"Name: eagercache\nRequires-Dist: torch<9,>={torch_versions.minor(torch_version)}\n"
            "Requires-Dist: click\n\ntorch>=2.11\n"
        ),
        "eagercache-0.1.0.dist-info/RECORD": "of this wheel alone\n",
        **{f"eagercache/{name}": text for name, text in other.items()},
    }
    folder = folder / torch_version
    folder.mkdir()
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return folder / NAME


def merge(folder: Path, *wheels: Path | str) -> subprocess.CompletedProcess[str]:
    (folder / "dist").mkdir(exist_ok=True)
    command = [sys.executable, SCRIPT, "--output", folder / "dist", *wheels]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60, check=False
    )


def test_what_depends_on_torch_is_there_for_each_and_the_rest_once(tmp_path: Path) -> None:
    wheels = [make_wheel(tmp_path, version) for version in ("2.12.1+cu130", "2.11.0+cu130")]
    done = merge(tmp_path, *wheels)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "dist" / NAME) as archive:
        names = archive.namelist()
        below = "eagercache/_torch/2.11/"
        assert archive.read(f"{below}lib/libeagercache.so") == b"library for 2.11.0+cu130"
        assert archive.read(f"{below}_build_info.py") == b'TORCH_VERSION = "2.11.0+cu130"\n'
        metadata = archive.read("eagercache-0.1.0.dist-info/METADATA").decode()
        record = archive.read("eagercache-0.1.0.dist-info/RECORD").decode()
    assert names.count("eagercache/__init__.py") == names.count("eagercache/_C.pyi") == 1
    assert sum(name.endswith("linux-gnu.so") for name in names) == 2
    assert not any(name.startswith("eagercache/_C.cpython") for name in names)
    assert "Requires-Dist: torch>=2.11,<2.13\n" in metadata and metadata.endswith("torch>=2.11\n")
    assert {line.split(",")[0] for line in record.splitlines()} == set(names)


def test_a_platform_and_what_is_in_it_are_said_in_the_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "2.11.0")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("eagercache-0.1.0.dist-info/WHEEL", "Tag: cp311-cp311-linux_x86_64\n")
    (tmp_path / "own.cdx.json").write_text("{}")
    options = ["--platform", "manylinux_2_28_x86_64", "--sbom", tmp_path / "own.cdx.json"]
    done = merge(tmp_path, *options, wheel)
    assert done.returncode == 0, done.stderr
    name = NAME.replace("linux_x86_64", "manylinux_2_28_x86_64")
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [name]
    with zipfile.ZipFile(tmp_path / "dist" / name) as archive:
        of_it = archive.read("eagercache-0.1.0.dist-info/WHEEL")
        assert archive.read("eagercache-0.1.0.dist-info/sboms/own.cdx.json") == b"{}"
    assert of_it == b"Tag: cp311-cp311-manylinux_2_28_x86_64\n"


def test_an_sbom_says_what_is_compiled_in_against_and_needed(tmp_path: Path) -> None:
    info = {"_build_info.py": 'TORCH_VERSION = "2.12.1+cu130"\n'}
    wheel = make_wheel(tmp_path, "2.12.1+cu130", **info)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(
            "eagercache-0.1.1.dist-info/METADATA",
            "Name: eagercache\nVersion: 0.1.1\nRequires-Dist: torch>=2.11\nRequires-Dist: click\n"
            'Requires-Dist: redis>=5; extra == "redis"\n\ntext\n',
        )
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(tmp_path / "one.whl", "w") as one:
        for name in archive.namelist():
            if not name.startswith("eagercache-0.1.0.dist-info/"):
                one.writestr(name, archive.read(name))
    command = [sys.executable, SCRIPT.with_name("sbom.py"), "--output", tmp_path / "s.json"]
    subprocess.run([*map(str, command), str(tmp_path / "one.whl")], check=True, timeout=60)
    found = json.loads((tmp_path / "s.json").read_text())
    assert (found["bomFormat"], found["metadata"]["component"]["version"]) == ("CycloneDX", "0.1.1")
    roles = {each["name"]: each["properties"][0]["value"] for each in found["components"]}
    assert roles == {
        "nlohmann-json": "compiled in",
        "libstdc++": "compiled in",
        "pybind11": "compiled in",
        "torch": "compiled against, not contained",
        "click": "needed, not contained",
    }
    assert {each["bom-ref"] for each in found["components"]} == set(
        found["dependencies"][0]["dependsOn"]
    )


def test_the_same_wheels_give_the_same_bytes(tmp_path: Path) -> None:
    wheels = [make_wheel(tmp_path, version) for version in ("2.11.0", "2.12.1")]
    merge(tmp_path, *wheels)
    first = (tmp_path / "dist" / NAME).read_bytes()
    merge(tmp_path, *reversed(wheels))
    assert (tmp_path / "dist" / NAME).read_bytes() == first


def test_what_lies_between_two_of_its_torches_is_not_admitted() -> None:
    required = SpecifierSet(merge_wheels.admitted(["2.11", "2.13", "2.15"]).removeprefix("torch"))
    versions = ["2.10.3", "2.11.0", "2.11.2", "2.12.0", "2.12.1", "2.13.1", "2.14.0", "2.15.0"]
    taken = [version for version in [*versions, "2.15.9", "2.16.0"] if version in required]
    assert taken == ["2.11.0", "2.11.2", "2.13.1", "2.15.0", "2.15.9"]


def test_wheels_that_cannot_be_one_are_refused_with_the_reason(tmp_path: Path) -> None:
    old, new = make_wheel(tmp_path, "2.11.0"), make_wheel(tmp_path, "3.0.0")
    assert "torch 2.11, 3.0 are of several major versions" in merge(tmp_path, old, new).stderr
    other = make_wheel(tmp_path, "2.12.1", **{"__init__.py": "core = 2\n"})
    assert "eagercache/__init__.py is not the same" in merge(tmp_path, old, other).stderr
    again = make_wheel(tmp_path, "2.11.1")
    assert "two wheels are for torch 2.11" in merge(tmp_path, old, again).stderr
    config = {"lib/cmake/eagercache/eagercacheConfig.cmake": "${PACKAGE_PREFIX_DIR}/eagercache/lib"}
    named = make_wheel(tmp_path, "2.12.0", **config)
    assert "eagercacheConfig.cmake names its folder" in merge(tmp_path, old, named).stderr
    renamed = other.with_name(NAME.replace("cp311", "cp312"))
    shutil.copy(other, renamed)
    assert "they are for different Pythons" in merge(tmp_path, old, renamed).stderr


def test_the_table_can_be_one_wheel() -> None:
    minors = [torch_versions.minor(row.torch) for row in torch_versions.TRIED]
    first, last = minors[0], minors[-1].split(".")
    assert merge_wheels.admitted(minors) == f"torch>={first},<{last[0]}.{int(last[1]) + 1}"
    assert torch_versions.in_order(["2.9", "__pycache__", "2.10"]) == ["2.9", "2.10"]


@pytest.fixture
def of_several(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH: the package as the wheel has it, for this torch and for 1.0."""
    package = tmp_path / "eagercache"
    shutil.copytree(
        Path(PACKAGE_ROOT, "eagercache"), package, ignore=shutil.ignore_patterns("__pycache__")
    )
    own = package / load.BUILDS / torch_versions.minor(str(torch.__version__))
    for folder in (own, package / load.BUILDS / "1.0"):
        folder.mkdir(parents=True)
        shutil.copy(package / "_build_info.py", folder)
    (package / load.BUILDS / "1.0" / "_C.py").write_text("raise SystemExit('the wrong module')")
    shutil.move(next(package.glob("_C.*.so")), own)
    shutil.move(package / "lib", own)
    (package / "_build_info.py").unlink()
    return tmp_path


def _run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(
            PYTHONPATH=str(folder), EAGERCACHE_DIR=str(folder / "store"), EAGERCACHE_SLOTS="16"
        ),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_the_import_takes_the_build_for_this_torch_and_workers_do_too(of_several: Path) -> None:
    done = _run(
        of_several,
        """
import json, torch, eagercache
from eagercache import _C, _build_info
eagercache.enable(["var.correction"], on_miss="wait", choose="always")
x = torch.randn(64, 96)
for _ in range(3): torch.var(x, -1)
print(json.dumps([_C.__file__, _build_info.__file__, eagercache.cmake_prefix_path,
                  eagercache.stats().hits]))
""",
    )
    assert done.returncode == 0, done.stderr
    *paths, hits = json.loads(done.stdout)
    own = of_several / "eagercache" / load.BUILDS / torch_versions.minor(str(torch.__version__))
    assert all(Path(path) == own or Path(path).parent == own for path in paths), paths
    assert hits == 2


def test_a_torch_that_is_not_in_the_wheel_is_named_with_those_that_are(of_several: Path) -> None:
    builds = of_several / "eagercache" / load.BUILDS
    (builds / torch_versions.minor(str(torch.__version__))).rename(builds / "2.9")
    done = _run(of_several, "import eagercache")
    assert "This wheel of eagercache is for torch 1.0, 2.9; torch 2." in done.stderr
    command = [sys.executable, "-m", "eagercache", "doctor"]
    environment = clean_environment(PYTHONPATH=str(of_several))
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=of_several
    )
    assert said.returncode == 1 and "Traceback" not in said.stderr
    assert "This wheel of eagercache is for torch" in " ".join(said.stdout.split())
