"""The digest of the C++ sources, a part of the environment key: no source is left out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CMAKE = shutil.which("cmake")
LAYERS = ["dispatcher", "guards", "kernel_cache", "python_hooks"]

pytestmark = [pytest.mark.once, pytest.mark.skipif(CMAKE is None, reason="needs cmake")]


def digest_of(tree: Path) -> str:
    output = tree.parent / "source_digest.cc"
    command = [str(CMAKE), "-D", f"ROOT={tree}", "-D", f"OUTPUT={output}"]
    subprocess.run([*command, "-P", str(ROOT / "cmake" / "SourceDigest.cmake")], check=True)
    found = re.search(r'return "([0-9a-f]{64})";', output.read_text())
    assert found is not None
    return found[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for layer in LAYERS:
        folder = tmp_path / "tree" / layer
        folder.mkdir(parents=True)
        (folder / "flat.cc").write_text("int flat;\n")
    return tmp_path / "tree"


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", ["new.cc", "new.h", "folder/new.cc", "folder/deeper/new.h"])
def test_a_new_file_changes_the_digest(tree: Path, layer: str, name: str) -> None:
    before = digest_of(tree)
    path = tree / layer / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("int fresh;\n")
    with_file = digest_of(tree)
    path.write_text("int edited;\n")
    assert len({before, with_file, digest_of(tree)}) == 3


def test_the_place_of_a_file_is_in_the_digest(tree: Path) -> None:
    before = digest_of(tree)
    (tree / "guards" / "folder").mkdir()
    (tree / "guards" / "flat.cc").rename(tree / "guards" / "folder" / "flat.cc")
    assert digest_of(tree) != before


def test_a_build_knows_when_to_make_the_digest_again() -> None:
    """What the build compares with the digest's date is the list that the digest is made of."""
    text = (ROOT / "dispatcher" / "CMakeLists.txt").read_text()
    found = re.search(r"file\(GLOB_RECURSE core_sources CONFIGURE_DEPENDS(.*?)\)", text, re.DOTALL)
    assert found is not None
    patterns = {
        f"${{PROJECT_SOURCE_DIR}}/{layer}/*.{end}" for layer in LAYERS for end in ("cc", "h")
    }
    assert set(re.findall(r'"([^"]+)"', found[1])) == patterns
