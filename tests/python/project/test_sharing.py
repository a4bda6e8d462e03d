"""That tests which share compiled kernels share a process."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from conftest import clean_environment, run_python
from sharing import FOLDER, LONGEST, SHARED, scope_of

pytestmark = pytest.mark.once


def test_tests_of_a_file_whose_fixture_compiles_are_of_one_scope() -> None:
    assert scope_of("tests/python/programs/test_writes.py::test_a[1]") == "test_writes.py"
    assert scope_of("tests/python/programs/test_neighbours.py::test_b") == "shared"
    assert scope_of("tests/python/ahead/test_bundle.py::test_c") == "shared"
    alone = "tests/python/worker/test_prove.py::test_d"
    assert scope_of(alone) == alone


def test_the_fixtures_that_files_share_exist() -> None:
    text = (FOLDER / "conftest.py").read_text()
    for fixture in SHARED:
        assert f"def {fixture}(" in text, fixture


def test_the_longest_scopes_exist() -> None:
    files = {scope_of(f"tests/{path.name}::test_it") for path in FOLDER.rglob("test_*.py")}
    assert set(LONGEST) <= files


def test_a_scope_is_one_process(tmp_path: Path) -> None:
    test = """
        import os, pytest
        @pytest.fixture(scope="session")
        def kernels():
            print("MADE", os.getpid())
        @pytest.mark.parametrize("number", range(8))
        def test_it(kernels, number):
            pass
    """
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(textwrap.dedent(test))
    (tmp_path / "sharing.py").write_text((FOLDER / "sharing.py").read_text())
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from sharing import make_scheduler\n"
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    return make_scheduler(config, log)\n"
    )
    done = run_python(
        "import pytest, sys\n"
        "sys.exit(pytest.main(['-n2', '-rP', '-p', 'no:cacheprovider', sys.argv[1]]))",
        clean_environment(PYTHONPATH=str(tmp_path)),
        str(tmp_path),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 passed" in done.stdout
    assert done.stdout.count("MADE") == 2, done.stdout


COMPILES = """
import os, pathlib, sys
sys.path.append(sys.argv[1])
import compiled_before
from eagercache.base.toolchain import find_compiler
from eagercache.worker.inductor import bare, commands
here, compiler = pathlib.Path.cwd(), find_compiler().path
pathlib.Path(compiled_before.COMPILED).mkdir()
compiled_before.use(here, compiler)
another = here / "another"
another.symlink_to(compiler)
def made(name, text, *flags, by=compiler):
    folder = here / name
    folder.mkdir()
    source, target = folder / "kernel.cpp", folder / "kernel.o"
    source.write_text(text)
    words = [by, *flags, "-c", str(source), "-o", str(target)]
    command = bare.Command("kernel", words, folder)
    try:
        command.wait()
    except commands.CompileFailed:
        return "failed"
    assert command.seconds > 0
    return command.was_there, target.read_bytes()
text = "int number() { return 1; }"
first = made("first", text)
assert first[0] is False
assert made("again", text) == (True, first[1])
assert made("flags", text, "-O2") == (False, made("flags_again", text, "-O2")[1])
assert made("other", text.replace("1", "2"))[0] is False
assert made("by_another", text, by=str(another)) == first
assert made("broken", "int number(") == made("broken_again", "int number(") == "failed"
"""


def test_a_compile_is_not_repeated_where_text_flags_and_compiler_are_the_same(
    tmp_path: Path,
) -> None:
    done = run_python(COMPILES, clean_environment(), str(FOLDER), folder=tmp_path)
    assert done.returncode == 0, done.stderr
