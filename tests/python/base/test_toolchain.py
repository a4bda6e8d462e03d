"""The compiler is found or refused with a clear text, and flags are exactly ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from eagercache.base import toolchain
from eagercache.base.toolchain import AVX2, AVX512, SCALAR, ToolchainError

pytestmark = pytest.mark.once


def fake_compiler(folder: Path, name: str, first_lines: str, status: int = 0) -> Path:
    """A program that answers ``-v`` on standard error."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat >&2 <<'TEXT'\n{first_lines}\nTEXT\nexit {status}\n")
    path.chmod(0o755)
    return path


GCC_13 = """Using built-in specs.
Target: x86_64-linux-gnu
Configured with: ../configure --enable-languages=c++
gcc version 13.2.1 20231205 (Example 13.2.1-6)"""


def test_the_widest_instruction_set_that_the_host_has_whole_is_picked() -> None:
    assert toolchain.pick_isa(AVX512.features) == AVX512
    assert toolchain.pick_isa([*AVX2.features, "avx512f"]) == AVX2
    assert toolchain.pick_isa(["sse", "sse2"]) == SCALAR


@pytest.mark.parametrize("isa", [AVX512, AVX2])
def test_each_feature_of_an_instruction_set_is_needed_for_it(isa: toolchain.Isa) -> None:
    for feature in isa.features:
        assert toolchain.pick_isa(set(isa.features) - {feature}) != isa


def test_the_explicit_compiler_comes_before_cxx_and_cxx_before_the_path(tmp_path: Path) -> None:
    mine = fake_compiler(tmp_path, "mine", GCC_13)
    other = fake_compiler(tmp_path, "other", GCC_13.replace("13.2.1", "14.1.0"))
    found = toolchain.find_compiler(str(mine), {"CXX": str(other), "PATH": "/usr/bin:/bin"})
    assert (found.path, found.major, found.target) == (str(mine), 13, "x86_64-linux-gnu")
    assert found.version == "gcc version 13.2.1 20231205 (Example 13.2.1-6)"
    assert toolchain.find_compiler(None, {"CXX": f"ccache {other}"}).major == 14


def test_links_are_followed_to_the_real_file(tmp_path: Path) -> None:
    real = fake_compiler(tmp_path, "real", GCC_13)
    (tmp_path / "g++").symlink_to(real)
    assert toolchain.find_compiler(None, {"PATH": f"{tmp_path}:/usr/bin:/bin"}).path == str(real)


@pytest.mark.parametrize("launcher", ["ccache", "distcc"])
def test_a_launcher_by_the_compilers_name_is_looked_behind(tmp_path: Path, launcher: str) -> None:
    """As with /usr/lib/ccache on PATH, where Debian and Fedora have links to ccache."""
    (tmp_path / "links").mkdir()
    (tmp_path / "bin").mkdir()
    link = tmp_path / "links" / "g++"
    link.symlink_to(fake_compiler(tmp_path / "bin", launcher, "no compiler", status=1))
    real = fake_compiler(tmp_path / "bin", "g++", GCC_13)
    path = f"{tmp_path}/links:{tmp_path}/bin"
    for environ in ({"PATH": path}, {"PATH": path, "CXX": str(link)}):
        assert toolchain.find_compiler(None, environ).path == str(real)
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler: 'g\+\+'"):
        toolchain.find_compiler(None, {"PATH": f"{tmp_path}/links"})


def test_an_empty_entry_of_path_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    for name in ("g++", "as", "ld"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    named = toolchain.find_compiler(None, {"PATH": "/usr/bin:/bin"})
    digests = toolchain.binutils_digests({"PATH": "/usr/bin:/bin"})
    for path in (":/usr/bin:/bin", "/usr/bin:/bin:", "::/usr/bin:/bin"):
        assert toolchain.find_compiler(None, {"PATH": path}) == named
        assert toolchain.binutils_digests({"PATH": path}) == digests
    with pytest.raises(ToolchainError, match="is not on PATH"):
        toolchain.find_compiler(None, {"PATH": ""})
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        (GCC_13.replace("13.2.1", "11.4.0"), 0, "is g\\+\\+ 11; eagercache needs 12"),
        ("clang version 14.0.6\nTarget: x86_64-pc-linux-gnu", 0, "is not g\\+\\+"),
        ("cannot run", 1, "does not run"),
    ],
)
def test_a_compiler_that_will_not_do_is_named_with_the_remedy(
    tmp_path: Path, text: str, status: int, expected: str
) -> None:
    path = fake_compiler(tmp_path, "cxx", text, status)
    with pytest.raises(ToolchainError, match=expected) as error:
        toolchain.find_compiler(str(path), {"PATH": "/usr/bin:/bin"})
    assert str(path) in str(error.value)


def test_a_missing_compiler_and_one_with_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="is not on PATH"):
        toolchain.find_compiler(None, {"PATH": str(tmp_path)})
    with pytest.raises(ToolchainError, match="not the name of one compiler"):
        toolchain.find_compiler("g++ -m32", {"PATH": "/usr/bin"})


def test_a_compile_command_gets_our_flags_in_place_of_inductors() -> None:
    command = [
        "g++",
        "a.cpp",
        "-march=native",
        "-mavx512f",
        "-mfma",
        "-fno-signed-zeros",
        "-g",
        "-c",
    ]
    rewritten = toolchain.rewrite_command(command, AVX2, "/build")
    assert rewritten == [
        "g++",
        "a.cpp",
        "-fsigned-zeros",
        "-c",
        "-march=x86-64-v3",
        "-ffile-prefix-map=/build=.",
        "-fwrapv",
    ]


def test_only_a_link_command_gets_link_flags() -> None:
    assert "-s" in toolchain.rewrite_command(["g++", "a.o", "-shared"], AVX512, "/b")
    assert "-s" not in toolchain.rewrite_command(["g++", "a.cpp", "-c"], AVX512, "/b")
