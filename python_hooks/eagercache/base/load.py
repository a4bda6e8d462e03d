"""Loads the extension module, after checking that it fits the torch of this process."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import warnings
from pathlib import Path
from types import ModuleType

from eagercache.base import torch_versions
from eagercache.base.command_line import IS_COMMAND_LINE
from eagercache.base.untried.standing import standing

# Why the command line has no `core`: there nothing is raised, and each command says it in one line.
refusal = ""

# The package; in it, of a wheel that is for several torches, a folder for each minor version.
_PACKAGE = Path(__file__).absolute().parent.parent
BUILDS = "_torch"
# Below it find_package(eagercache) finds the package for C++ programs.
cmake_prefix_path = str(_PACKAGE)

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps eagercache"


def mismatch(build_torch: str, build_abi: bool, run_torch: str, run_abi: bool) -> str | None:
    """Why a module built against `build_torch` may not be loaded beside `run_torch`, or None.

    The C++ interface of torch holds within one minor version and one C++ ABI; nothing is promised
    beyond that.
    """
    if torch_versions.minor(build_torch) != torch_versions.minor(run_torch):
        return (
            f"eagercache was built against torch {build_torch}, but torch {run_torch} is "
            f"installed. Rebuild eagercache in this environment ({REBUILD}), or install torch "
            f"{torch_versions.minor(build_torch)}."
        )
    if build_abi != run_abi:
        return (
            f"eagercache was built with C++11 ABI {build_abi}, but this torch has {run_abi}. "
            f"Rebuild eagercache in this environment ({REBUILD})."
        )
    return None


def choose_build(run_torch: str) -> None:
    """Has `_C` and `_build_info` be those for this torch, where the wheel has several.

    Raises:
        ImportError: it has none for this torch.
    """
    global cmake_prefix_path
    builds = _PACKAGE / BUILDS
    if not builds.is_dir():
        return
    minor = torch_versions.minor(run_torch)
    chosen = builds / minor
    if not (chosen / "_build_info.py").is_file():
        there = ", ".join(torch_versions.in_order(path.name for path in builds.iterdir()))
        raise ImportError(
            f"This wheel of eagercache is for torch {there}; torch {run_torch} is installed. "
            "Install one of these, or build eagercache from its sources beside this one "
            "(pip install --no-build-isolation --no-binary eagercache eagercache)."
        )
    path = sys.modules["eagercache"].__path__
    if str(chosen) not in path:
        path.append(str(chosen))
    cmake_prefix_path = str(chosen)


def load() -> ModuleType | None:
    """The module `_C`; None on a platform, or beside a torch, where it cannot work (said once).

    Raises:
        ImportError: torch is of another version than the one that `_C` was built against, or the
            module has not been built. Not so in the command `eagercache`, for which it is
            `refusal`, as is whatever else the import of torch raises.
    """
    global refusal
    if not IS_COMMAND_LINE:
        return _load()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = _load()
        refusal = str(caught[0].message) if module is None else ""
    except ImportError as error:
        refusal = " ".join(str(error).split())
        return None
    except Exception as error:  # a torch that is broken, or something else of that name
        refusal = f"torch cannot be used: {type(error).__name__}: {' '.join(str(error).split())}"
        return None
    return module


def _load() -> ModuleType | None:
    problem = torch_versions.platform_problem(platform.system(), platform.machine())
    if problem is not None:
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
        return None
    import torch  # maps torch's libraries, which _C needs

    choose_build(str(torch.__version__))
    try:
        from eagercache import _build_info
    except ImportError as error:
        raise ImportError(
            "eagercache's extension module has not been built here. In a source tree run "
            f"`make build`; otherwise {REBUILD}."
        ) from error
    problem = mismatch(
        _build_info.TORCH_VERSION,
        _build_info.CXX11_ABI,
        str(torch.__version__),
        bool(torch.compiled_with_cxx11_abi()),
    )
    if problem is not None:
        raise ImportError(problem)
    if not _fits_untried(str(torch.__version__), str(torch.version.git_version)):
        return None
    return importlib.import_module("eagercache._C")


def _fits_untried(version: str, git: str) -> bool:
    """Whether the self-check passes beside a torch that nobody has tried; says which were, once.

    The command `eagercache` leaves it to the programs that it starts.
    """
    if torch_versions.is_tried(version) or IS_COMMAND_LINE:
        return True
    from eagercache import _build_info
    from eagercache.base import untried_torch

    if untried_torch.is_spared(os.environ):
        return True
    subject = untried_torch.subject_of(
        version, git, f"{_build_info.VERSION} {_build_info.REVISION}"
    )
    folder = untried_torch.folder_of(os.environ)
    problem = untried_torch.find(folder, subject)
    begins = problem is None
    if problem is None:
        from eagercache.base.untried import quick_check

        problem, lasting = quick_check.problem()
        if problem and lasting:
            untried_torch.keep(folder, subject, problem)
    if problem or not begins:
        _warn(f"{untried_torch.remark(version)}. {_outcome(problem)}")
        return not problem
    _warn(
        f"{untried_torch.remark(version)}. Its self-check there runs beside the program; "
        "everything stays native until it has passed."
    )
    standing.begin(untried_torch.watching(subject), lambda found: _warn(_outcome(found)))
    return True


def _outcome(problem: str) -> str:
    if problem:
        return f"Its self-check there failed: {problem}. Everything stays native."
    return "Its self-check there passed."


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


if sys.version_info < (3, 10):  # noqa: UP036 - the message is worth more than a syntax error
    raise ImportError("eagercache needs Python 3.10 or later")

core: ModuleType | None = load()


def why_unavailable() -> str:
    """Of a process where there is no `core`, or one that may not be used: why, in one line."""
    if standing.problem():
        return f"its self-check beside this torch failed: {standing.problem()}"
    return refusal or "eagercache works on Linux x86-64 only"


def available() -> bool:
    """Whether eagercache can work on this platform. Elsewhere all of its functions do nothing."""
    return core is not None and not standing.problem()


def usable() -> bool:
    """As `available`, for what is to begin now: it waits for a self-check that is under way."""
    return core is not None and standing.wait() and not standing.problem()
