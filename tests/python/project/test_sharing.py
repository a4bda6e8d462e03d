"""That tests which share compiled kernels share a process."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from conftest import clean_environment, run_python
from sharing import CHANGED, COSTLY, FOLDER, LONGEST, SHARE, SHARED, left_out, scope_of

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


def test_shares_have_what_is_costly_once_and_all_else_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("test_*.py"))
    tests = {f"tests/python/{file}::test_{name}" for file in files for name in "ab"}
    names = {file.name for file in files} | set(SHARED.values())
    assert set(COSTLY) <= names and len(set(COSTLY)) == len(COSTLY)
    monkeypatch.delenv(CHANGED, raising=False)
    monkeypatch.delenv(SHARE, raising=False)
    assert not left_out([*tests])
    shares = []
    for part in range(3):
        monkeypatch.setenv(SHARE, f"{part}/3")
        shares.append(tests - left_out([*tests]))
    assert set.union(*shares) == tests
    always = set.intersection(*shares)
    assert any("/test_sharing.py::" in test for test in always)
    costly = tests - always
    assert sum(len(share & costly) for share in shares) == len(costly)
    for share in shares:  # what shares a fixture is not made twice
        scopes = {scope_of(test) for test in costly & share if scope_of(test) != test}
        assert not scopes & {scope_of(test) for test in costly - share}
    changed = {test for test in costly if "/test_module_guards.py::" in test}
    monkeypatch.setenv(CHANGED, "README.md tests/python/modules/test_module_guards.py")
    for part in range(3):
        monkeypatch.setenv(SHARE, f"{part}/3")
        assert changed and changed.isdisjoint(left_out([*tests]))
    for wrong in ("3/3", "1", "x/3", "-1/3"):
        monkeypatch.setenv(SHARE, wrong)
        with pytest.raises(ValueError, match="are the thirds"):
            left_out([*tests])


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


COMPILES = '''
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
def made(folder, text, *flags, by=compiler, name="kernel"):
    folder = here / folder
    folder.mkdir()
    source, target = folder / f"{name}.cpp", folder / f"{name}.o"
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
MADE_FOR = """
int x;
extern "C" {{
__attribute__((visibility("default"), used)) char eagercache_made_for[] =
    "{}\\\\n"
    "";
}}
"""
first = made("first", text)
assert first[0] is False
assert made("again", text) == (True, first[1])
assert made("flags", text, "-O2") == (False, made("flags_again", text, "-O2")[1])
assert made("other", text.replace("1", "2"))[0] is False
assert made("by_another", text, by=str(another)) == first
of_one = MADE_FOR.format("1" * 64)
first = made("of_one", of_one)
assert first[0] is False and first[1].count(b"1" * 64) == 1
assert made("of_two", MADE_FOR.format("2" * 64)) == (True, first[1].replace(b"1" * 64, b"2" * 64))
assert made("of_three", of_one.replace("int x", "int y"))[0] is False
named = ("// Triton kernels are embedded as comments in {}\\nint twice(int x) {{ return 2 * x; }}")
assert made("named", named.format("c" * 52), name="c" + "a" * 51)[0] is False
assert made("named_again", named.format("d" * 52), name="c" + "b" * 51)[0] is True
assert made("named_otherwise", named.format("d" * 52).replace("2", "3"))[0] is False
assert made("broken", "int number(") == made("broken_again", "int number(") == "failed"
'''


def test_a_compile_is_not_repeated_where_text_flags_and_compiler_are_the_same(
    tmp_path: Path,
) -> None:
    done = run_python(COMPILES, clean_environment(), str(FOLDER), folder=tmp_path)
    assert done.returncode == 0, done.stderr
