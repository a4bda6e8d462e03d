"""A build leaves those links of its tree's package to the Python sources alone that are right.

Programs run from that package while something builds it: the attacks, beside the documentation.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CMAKE = shutil.which("cmake")

pytestmark = [pytest.mark.once, pytest.mark.skipif(CMAKE is None, reason="needs cmake")]


def test_a_link_that_is_right_stays_and_others_are_made(tmp_path: Path) -> None:
    source, package, names = tmp_path / "source", tmp_path / "package", tmp_path / "names.txt"
    for name in ("right.py", "inner/wrong.py", "inner/new.py", "file.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (package / "inner").mkdir(parents=True)
    (package / "right.py").symlink_to(source / "right.py")
    (package / "inner" / "wrong.py").symlink_to(source / "right.py")
    (package / "file.py").write_text("from an older build")
    names.write_text("right.py\ninner/wrong.py\ninner/new.py\nfile.py\n")
    before = (package / "right.py").lstat()

    script = str(ROOT / "cmake" / "LinkPackage.cmake")
    places = [f"-DSOURCE={source}", f"-DTARGET={package}", f"-DLIST={names}"]
    subprocess.run([str(CMAKE), *places, "-P", script], check=True)

    for name in names.read_text().split():
        assert (package / name).is_symlink()
        assert (package / name).read_text() == name
    after = (package / "right.py").lstat()
    assert (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns)
