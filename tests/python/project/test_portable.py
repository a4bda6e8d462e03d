"""What is released needs nothing of a system that manylinux_2_28 does not have (cmake/older)."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[3]
CXX = ["g++", "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", f"-I{ROOT}"]


def _script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


libraries = _script("cmake/older/libraries.py")
audit_wheel = _script("scripts/parts/audit_wheel.py")
check_changelog = _script("scripts/parts/check_changelog.py")


def _g(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*CXX, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _archive(name: str) -> str:
    return _g(f"-print-file-name={name}").stdout.strip()


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    for name, soname in libraries.LIBRARIES.items():
        assert libraries.make("g++", name, soname, folder) > 0
    done = _g("-c", ROOT / "cmake/older/system.cc", "-o", folder / "system.o")
    assert done.returncode == 0, done.stderr
    return folder


def link(older: Path, target: Path, *inputs: object, system: bool = True) -> str:
    """As cmake/Portable.cmake has it; what the linker said."""
    names = [older / f"lib{name}.so" for name in libraries.LIBRARIES]
    own = [older / "system.o"] if system else []
    hidden = "-Wl,--exclude-libs,libstdc++.a:libc_nonshared.a"
    flags = ["-shared", "-nodefaultlibs", "-Wl,--no-undefined", hidden, "-o", target]
    after = [*names[1:], _archive("libc_nonshared.a"), "-lgcc"]
    done = _g(*flags, *inputs, names[0], _archive("libstdc++.a"), *own, *after)
    return done.stderr if done.returncode else ""


# Of each library something that is newer than manylinux_2_28: all that is known of that kind.
USES = """
#include <sys/stat.h>
#include <unistd.h>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

extern "C" __attribute__((visibility("default"))) int works(const char* folder, double x) {
  namespace fs = std::filesystem;
  std::ostringstream text;
  text << fs::path(folder).lexically_normal().parent_path().string() << std::log2(x);
  struct stat one{}, other{};
  if (::stat(folder, &one) != 0 || ::lstat(folder, &other) != 0) return 1;
  if (one.st_ino != other.st_ino) return 1;
  if (::stat("/nowhere", &one) != -1) return 2;
  if (!fs::exists(folder) || fs::directory_iterator(folder) == fs::directory_iterator()) return 3;
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr thrown;
  std::jthread thread([&] {
    try {
      throw std::runtime_error("of the thread");
    } catch (...) {
      thrown = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    done = true;
    changed.notify_all();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return done; });
  lock.unlock();
  thread.join();
  try { std::rethrow_exception(thrown); } catch (const std::runtime_error& error) {
    if (std::string(error.what()) != "of the thread") return 4;
  }
  const auto began = std::chrono::steady_clock::now();
  lock.lock();
  if (changed.wait_for(lock, std::chrono::milliseconds(1200), [] { return false; })) return 5;
  const auto took = std::chrono::steady_clock::now() - began;
  if (took < std::chrono::milliseconds(1200) || took > std::chrono::seconds(30)) return 6;
  return ::gettid() > 0 ? 0 : 7;
}
"""


def _versions(library: Path) -> set[tuple[str, tuple[int, ...]]]:
    asked = [name for defined, name in audit_wheel.symbols(library) if not defined]
    found = (re.search(r"@([A-Z]+)_(\d[\d.]*)", name) for name in asked)
    return {(each[1], tuple(map(int, each[2].split(".")))) for each in found if each}


def test_what_is_linked_so_works_and_asks_for_nothing_newer(older: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "uses.cc", tmp_path / "libuses.so"
    source.write_text(USES)
    _g("-shared", source, "-o", target)
    newest = libraries.NEWEST
    assert any(version > newest[family] for family, version in _versions(target))  # so far
    assert link(older, target, source) == ""
    assert all(version <= newest[family] for family, version in _versions(target))
    assert audit_wheel.unversioned(target, audit_wheel.of_the_system()) == []
    (tmp_path / "entry").touch()
    assert ctypes.CDLL(str(target)).works(str(tmp_path).encode(), ctypes.c_double(8.0)) == 0


def test_what_an_older_system_lacks_ends_the_link(older: Path, tmp_path: Path) -> None:
    source = tmp_path / "uses.cc"
    source.write_text(USES)
    said = link(older, tmp_path / "libuses.so", source, system=False)
    assert "undefined reference to `gettid'" in said and "`pthread_cond_clockwait'" in said
    source.write_text('extern "C" int closefrom(int);\nint f() { return closefrom(3); }')
    assert "`closefrom'" in link(older, tmp_path / "libuses.so", source)


def test_a_symbol_without_a_version_is_seen(tmp_path: Path) -> None:
    source, target = tmp_path / "uses.cc", tmp_path / "libuses.so"
    source.write_text('#include <unistd.h>\nextern "C" int f() { return ::gettid(); }')
    assert _g("-shared", "-nostdlib", source, "-o", target).returncode == 0
    assert audit_wheel.unversioned(target, {"gettid", "getpid"}) == ["gettid"]


def test_tags_are_compared_by_the_libc_that_they_stand_for() -> None:
    age = audit_wheel._age
    assert age("manylinux_2_17_x86_64") < age("manylinux_2_28_x86_64")
    assert age("manylinux_2_28_x86_64") < age("manylinux_2_36_x86_64") < age("linux_x86_64")


# The store's hashes and signatures over the libcrypto that is found when the library is loaded.
SIGNS = """
#include <cstring>
#include "kernel_cache/base/digest.h"
#include "kernel_cache/format/signature.h"
using namespace eagercache;
extern "C" __attribute__((visibility("default"))) int there() { return libcrypto_is_there(); }
extern "C" __attribute__((visibility("default"))) int signs(const char* folder, char* hash) {
  const std::filesystem::path at(folder);
  if (!SigningKey::make(at / "own.pem", at / "own.pub")) return 1;
  const SigningKey key = std::move(SigningKey::read(at / "own.pem").value());
  const Signature signature = key.sign("message").value();
  const PublicKey own = read_public_key(at / "own.pub").value();
  if (!is_signed_by(own, signature, "message") || is_signed_by(own, signature, "another")) return 2;
  std::strcpy(hash, sha256("message").hex().c_str());
  return 0;
}
"""


def test_hashes_and_signatures_need_no_libcrypto_to_be_linked(tmp_path: Path) -> None:
    source, target = tmp_path / "signs.cc", tmp_path / "libsigns.so"
    source.write_text(SIGNS)
    names = "base/digest base/system_libcrypto base/byte_fields base/status format/signature"
    sources = [ROOT / "kernel_cache" / f"{name}.cc" for name in names.split()]
    flags = ["-DEAGERCACHE_PORTABLE", "-shared", "-Wl,--no-undefined"]
    done = _g(*flags, source, *sources, "-o", target)
    assert done.returncode == 0, done.stderr
    seen = list(audit_wheel.symbols(target))
    assert not any("OPENSSL" in name for _, name in seen)
    # Hidden: Python's own ssl module calls the functions of these names, too.
    assert not any(defined and name.startswith("EVP_") for defined, name in seen)
    library = ctypes.CDLL(str(target))
    digest = ctypes.create_string_buffer(65)
    assert library.there() == 1 and library.signs(str(tmp_path).encode(), digest) == 0
    assert digest.value.decode() == hashlib.sha256(b"message").hexdigest()


ENTRY = "# Changelog\n\n## [1.2.0] - 2026-11-26\n\n### Added\n\n- This.\n"


@pytest.mark.parametrize(
    ("changelog", "tagged", "wrong"),
    [
        (ENTRY, True, ""),
        (ENTRY.replace("2026-11-26", "unreleased"), False, ""),
        (ENTRY.replace("2026-11-26", "unreleased"), True, "no date"),
        (ENTRY.replace("2026-11-26", "soon"), False, "no date"),
        (ENTRY.replace("1.2.0", "1.1.0"), False, "0 entries for 1.2.0"),
        (ENTRY + "\n" + ENTRY.partition("\n")[2], False, "2 entries"),
        (ENTRY.replace("- This.\n", ""), False, "'Added' is empty"),
        (ENTRY.replace("### Added\n\n- This.\n", ""), False, "is empty"),
        (ENTRY.replace("Added", "Improved"), False, "no heading"),
        ("## [1.3.0] - unreleased\n\n### Added\n\n- That.\n" + ENTRY, False, "not the first"),
    ],
)
def test_the_changelog_has_an_entry_for_what_is_released(
    changelog: str, tagged: bool, wrong: str
) -> None:
    said = check_changelog.problem(changelog, "1.2.0", tagged)
    assert wrong in said and bool(said) == bool(wrong)


def test_the_changelog_here_has_one() -> None:
    command = [sys.executable, str(ROOT / "scripts/parts/check_changelog.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
