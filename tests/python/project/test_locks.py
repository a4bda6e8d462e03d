"""What dispatcher/base/locks.h says that a mutex guards is touched with it held: clang looks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCKS = "dispatcher/base/locks.h"
# A lock that is taken. Files of one folder make one unit, as in the build.
_TAKEN = re.compile(r"\bLock \w+\(")

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++"),
]


def folders() -> dict[str, list[str]]:
    """The files that lock something, by folder."""
    found: dict[str, list[str]] = {}
    for layer in ("dispatcher", "python_hooks"):
        for path in sorted((ROOT / layer).rglob("*.cc")):
            if _TAKEN.search(path.read_text()):
                name = path.relative_to(ROOT)
                found.setdefault(str(name.parent), []).append(str(name))
    return found


def complaints(tmp_path: Path, text: str) -> str:
    """What clang says of a unit; nothing of code that is right."""
    import torch
    from torch.utils import cpp_extension

    major, minor = torch.__version__.split(".")[:2]
    unit = tmp_path / "unit.cc"
    unit.write_text(text)
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    done = subprocess.run(
        [
            "clang++",
            "-std=gnu++20",
            "-fsyntax-only",
            "-Wthread-safety",
            f"-DEAGERCACHE_TORCH_MAJOR={major}",
            f"-DEAGERCACHE_TORCH_MINOR={minor}",
            f"-I{ROOT}",
            *(word for folder in includes for word in ("-isystem", folder)),
            str(unit),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stderr


def test_the_runtime_is_among_the_files() -> None:
    assert "dispatcher/runtime/runtime_queue.cc" in folders()["dispatcher/runtime"]


@pytest.mark.parametrize("folder", sorted(folders()))
def test_what_a_mutex_guards_is_touched_with_it_held(folder: str, tmp_path: Path) -> None:
    unit = "".join(f'#include "{name}"\n' for name in folders()[folder])
    assert not complaints(tmp_path, unit)


def test_clang_finds_what_is_touched_without_its_mutex(tmp_path: Path) -> None:
    unit = f"""#include "{LOCKS}"
    struct Counter {{
      eagercache::Mutex mutex;
      int count EAGERCACHE_GUARDED_BY(mutex) = 0;
      int locked() {{ const eagercache::Lock lock(mutex); return count; }}
      int not_locked() {{ return count; }}
    }};
    """
    said = complaints(tmp_path, unit)
    assert said.count("requires holding mutex 'mutex'") == 1, said
