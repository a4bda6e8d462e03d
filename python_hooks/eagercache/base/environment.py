"""The environment key: everything that generated code depends on besides the call itself.

One line ``field: value`` per field of FIELDS, in that order. Two processes share kernels exactly
when their texts are equal; the text is stored beside the entries, so that `diff` can say what
differs. Paths, users, hosts and times are not part of it.

Computed without importing Inductor: torch's own sources are covered by the hashes in its
installation record. What takes long to read from files is remembered (facts.py).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from eagercache.base.facts import Facts
from eagercache.base.load import core
from eagercache.base.toolchain import (
    Compiler,
    Isa,
    ToolchainError,
    binutils_digests,
    find_compiler,
    flag_facts,
    pick_isa,
)
from eagercache.version import __version__

FORMAT = 1

# Variables that change what Inductor and Triton generate, or what native computes, which kernels
# are compared with. Workers have these and drop every other one that does (worker_variables.py), so
# that nothing outside this list can reach a kernel.
VARIABLES = (
    "AOT_INDUCTOR_ENABLE_LTO",
    "AOTI_RUNTIME_CHECK_INPUTS",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DISABLE_FAST_MM",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_THREADING_LAYER",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "TORCHINDUCTOR_CPP_ENABLE_TILING_HEURISTIC",
    "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG",
    "TORCHINDUCTOR_CPP_FALLBACK_SCATTER_REDUCE_SUM",
    "TORCHINDUCTOR_CPP_FORCE_INLINE_KERNEL",
    "TORCHINDUCTOR_CPP_MAX_HORIZONTAL_FUSION_SIZE",
    "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE",
    "TORCHINDUCTOR_CPP_NO_REDUNDANT_LOOPS",
    "TORCHINDUCTOR_CPP_USE_CONSTEXPR_FOR_INT_ARRAY",
    "TORCHINDUCTOR_CPP_USE_DECOMPOSE_TANH",
    "TORCHINDUCTOR_DETERMINISTIC",
    "TORCHINDUCTOR_EMULATE_DIVISION_ROUNDING",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_LOOP_ORDERING_AFTER_FUSION",
    "TORCHINDUCTOR_MULTI_KERNEL",
    "TORCHINDUCTOR_ONLINE_SOFTMAX",
    "TORCHINDUCTOR_PERMUTE_FUSION",
    "TORCHINDUCTOR_PERSISTENT_REDUCTIONS",
    "TORCHINDUCTOR_SPLIT_REDUCTIONS",
    "TORCHINDUCTOR_USE_FAST_MATH",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_SDPA_AVOID_RECOMPILE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "TORCH_CUDNN_USE_HEURISTIC_MODE_B",
    "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_LINALG_PREFER_CUSOLVER",
    "TORCH_LINEAR_FLATTEN_3D",
    "TORCH_MKLDNN_MATMUL_MIN_DIM",
    "TORCH_MKLDNN_MATMUL_MIN_SIZE",
    "TRITON_DEFAULT_FP_FUSION",
)
VARIABLE_PREFIXES = ("AOT_INDUCTOR_", "AOTINDUCTOR_", "AOTI_", "TORCHINDUCTOR_", "TRITON_")


# Folders of this package that decide what a kernel is, and whether it is right: what workers use.
SOURCE_FOLDERS = ("base", "callables", "calls", "deploy", "worker")


@dataclass(frozen=True)
class Context:
    """What the fields are read from."""

    compiler: Compiler | None  # None on a machine without one: a store of its own, read only
    binutils: Mapping[str, str]
    isa: Isa
    environ: Mapping[str, str]
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class Field:
    """One line of the key, and why two processes that differ in it may not share kernels."""

    name: str
    why: str
    read: Callable[[Context], str]


def _compiler_field(read: Callable[[Compiler], str]) -> Callable[[Context], str]:
    return lambda context: read(context.compiler) if context.compiler else "none"


def _variable_field(name: str) -> Callable[[Context], str]:
    return lambda context: context.environ.get(name, "(unset)")


def _record_field(name: str) -> Callable[[Context], str]:
    return lambda context: _record(name, context.facts)


FIELDS: tuple[Field, ...] = (
    Field("format", "meaning of the other fields", lambda c: str(FORMAT)),
    Field("eagercache.version", "what is compiled and how it is proved", lambda c: __version__),
    Field("eagercache.sources", "the same, between releases", lambda c: _own_sources(c.facts)),
    Field("eagercache.core", "the same, of the C++ half", lambda c: _core_sources()),
    Field("torch.version", "lowerings, native kernels, C ABI", lambda c: str(torch.__version__)),
    Field("torch.git", "the same, between releases", lambda c: str(torch.version.git_version)),
    Field(
        "torch.debug", "layout and checks of the C++ library", lambda c: str(torch.version.debug)
    ),
    Field("torch.cuda", "CUDA runtime", lambda c: str(torch.version.cuda)),
    Field("torch.hip", "HIP runtime", lambda c: str(torch.version.hip)),
    Field("torch.cxx11_abi", "C++ ABI", lambda c: str(torch.compiled_with_cxx11_abi())),
    Field("torch.record", "every installed file of torch", _record_field("torch")),
    Field("triton.version", "code generation for GPUs", lambda c: _version("triton")),
    Field("triton.record", "the same, between releases", _record_field("triton")),
    Field("sympy.version", "simplified index expressions", lambda c: _version("sympy")),
    Field("python.version", "code generation runs in it", lambda c: platform.python_version()),
    Field("python.abi", "the extension module's ABI", lambda c: EXTENSION_SUFFIXES[0]),
    Field("compiler.version", "machine code", _compiler_field(lambda c: c.version)),
    Field("compiler.target", "machine code", _compiler_field(lambda c: c.target)),
    Field("compiler.configuration", "default options", _compiler_field(lambda c: c.configuration)),
    Field("compiler.flags", "machine code", lambda c: flag_facts(c.isa)),
    Field("assembler", "machine code", lambda c: c.binutils.get("as", "missing")),
    Field("linker", "the shared object", lambda c: c.binutils.get("ld", "missing")),
    Field("platform.system", "calling convention", lambda c: sys.platform),
    Field("platform.machine", "calling convention", lambda c: platform.machine()),
    Field("platform.libc", "symbol versions", lambda c: _libc()),
    Field(
        "platform.page_size",
        "layout of the shared object",
        lambda c: str(os.sysconf("SC_PAGE_SIZE")),
    ),
    Field("cpu.isa", "vector width of the kernels", lambda c: c.isa.name),
    Field("cpu.features", "instructions that the kernels use", lambda c: " ".join(c.isa.features)),
    *(
        Field(
            f"variable.{name}",
            "changes what is generated or what native runs",
            _variable_field(name),
        )
        for name in VARIABLES
    ),
)


def environment_text(
    *,
    cxx: str | None = None,
    cpu_features: Collection[str] | None = None,
    facts: Facts | None = None,
) -> str:
    """The environment key of this process.

    ``cxx`` is the user's choice of compiler (EAGERCACHE_CXX); ``cpu_features`` defaults to the
    host's. A machine without a usable compiler has a key too, under which nothing is compiled.
    """
    return text_of(read_context(cxx=cxx, cpu_features=cpu_features, facts=facts))


def read_context(
    *,
    cxx: str | None = None,
    cpu_features: Collection[str] | None = None,
    facts: Facts | None = None,
) -> Context:
    """What `environment_text` reads on this host. Without ``facts`` it runs the compiler."""
    facts = facts or Facts()
    if cpu_features is None:
        cpu_features = core.host_cpu_features() if core is not None else ()
    try:
        compiler = find_compiler(cxx, facts=facts)
    except ToolchainError:
        compiler = None
    return Context(
        compiler=compiler,
        binutils=binutils_digests(facts=facts),
        isa=pick_isa(cpu_features),
        environ=os.environ,
        facts=facts,
    )


def text_of(context: Context) -> str:
    """One line per field. Values are escaped to one printable line each."""
    return _lines(FIELDS, context)


# What a kernel meets when it runs. What its code needs of the processor each entry says by itself.
RUNNING_FIELDS = (
    "eagercache.version",
    "eagercache.core",
    "torch.version",
    "torch.git",
    "torch.debug",
    "torch.cuda",
    "torch.hip",
    "torch.cxx11_abi",
    "torch.record",
    "platform.system",
    "platform.machine",
    "platform.libc",
    "platform.page_size",
    "variable.ATEN_CPU_CAPABILITY",
)

# What machines must have in common to share kernels without anybody looking at each: that, the
# instructions that their kernels are made for, and what changes native's answers.
SHARED_FIELDS = (
    *RUNNING_FIELDS,
    "cpu.isa",
    "cpu.features",
    *(f"variable.{name}" for name in VARIABLES if f"variable.{name}" not in RUNNING_FIELDS),
)


def shared_text(text: str) -> str:
    """The lines of a key's text whose fields are in `SHARED_FIELDS`."""
    known = parse(text)
    return "".join(f"{name}: {known[name]}\n" for name in SHARED_FIELDS if name in known)


def running_text() -> str:
    """The lines of `RUNNING_FIELDS` alone, for which no compiler is asked."""
    context = Context(None, {}, pick_isa(()), os.environ)
    return _lines([field for field in FIELDS if field.name in RUNNING_FIELDS], context)


def _lines(fields: Iterable[Field], context: Context) -> str:
    return "".join(f"{field.name}: {_escaped(field.read(context))}\n" for field in fields)


def parse(text: str) -> dict[str, str]:
    """Field names and (escaped) values of a key's text."""
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def diff(left: str, right: str) -> list[str]:
    """Names of the fields in which two texts differ, sorted; a field that one lacks differs."""
    a, b = parse(left), parse(right)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def mismatches(
    theirs: str, ours: str, fields: Iterable[str] = RUNNING_FIELDS
) -> tuple[tuple[str, str, str], ...]:
    """The fields that keep kernels made under one environment text from running under another."""
    there, here = parse(theirs), parse(ours)
    return tuple(
        (field, there.get(field, "(missing)"), here.get(field, "(missing)"))
        for field in fields
        if there.get(field) != here.get(field)
    )


def _escaped(value: str) -> str:
    return value.strip().encode("unicode_escape").decode("ascii")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def source_files(package: Path) -> list[Path]:
    """The Python files below ``package`` that the key holds, in an order that is always the same.

    All that a worker may import, in every subfolder, so that no added or moved file is forgotten.
    """
    files = [path for folder in SOURCE_FOLDERS for path in (package / folder).rglob("*.py")]
    return sorted(files, key=lambda path: path.relative_to(package).as_posix())


def _own_sources(facts: Facts) -> str:
    package = Path(__file__).absolute().parent.parent
    files = source_files(package)
    return str(facts.recall("sources", files, lambda: hash_sources(package, files)))


def hash_sources(package: Path, files: Iterable[Path]) -> str:
    """Hash of the names below ``package`` and the contents of ``files``."""
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _core_sources() -> str:
    return str(core.source_digest)[:32] if core is not None else "none"


@functools.cache
def _distribution(name: str) -> tuple[str, Path | None]:
    """(version, installation record) of an installed package; ("none", None) without one."""
    spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        # Beside the package that is imported, which need not be the first that has metadata.
        folder = Path(spec.origin).parent.parent
        found = list(folder.glob(f"{name}-*.dist-info"))
        if len(found) == 1:
            version = found[0].name.removeprefix(f"{name}-").removesuffix(".dist-info")
            return version, found[0] / "RECORD"
    from importlib import metadata

    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return "none", None
    record = distribution.locate_file(f"{name}-{distribution.version}.dist-info/RECORD")
    return distribution.version, Path(str(record))


def _version(name: str) -> str:
    return _distribution(name)[0]


def _record(name: str, facts: Facts) -> str:
    """Hash of the installed files' hashes; "none" where nothing is recorded (a source build)."""
    path = _distribution(name)[1]
    if path is None or not path.exists():
        return "none"
    return str(facts.recall("record", [path], functools.partial(_hash_record, path)))


@functools.cache
def _hash_record(path: Path) -> str:
    # Byte code and console scripts are made on the spot: their lines differ between equal installs.
    # As bytes: a deployed module is ready as soon as this is known.
    lines = [
        line
        for line in path.read_bytes().splitlines()
        if b".pyc," not in line and line[:2] != b".."
    ]
    return _digest(b"\n".join(sorted(lines))) if lines else "none"


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (OSError, ValueError):
        return "unknown"
