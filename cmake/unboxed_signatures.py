"""Writes the C++ files that instantiate unboxed hooks for ATen's own signatures.

Usage: unboxed_signatures.py INCLUDE OUTPUT FILES

INCLUDE is torch's include folder, whose ATen/ops/*_ops.h say each operator's C++ signature. OUTPUT
gets FILES files with one instantiation a signature, and unboxed_rows.cc with the table of names.
Taken are the operators that may be hooked by what torch's registry and their schemas say; the hook
itself decides at registration (dispatcher/operators/eligibility.h), so that one too many costs only
size.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

_OPERATOR = re.compile(
    r"using schema = (?P<returns>[^\n]*?) \((?P<arguments>[^\n]*)\);.*?"
    r'name = "aten::(?P<name>\w+)";.*?overload_name = "(?P<overload>\w*)";.*?'
    r'schema_str = "(?P<schema>.*?)";',
    re.DOTALL,
)
_RETURNS = re.compile(
    r"at::Tensor|at::Tensor &|void|::std::vector<at::Tensor>"
    r"|::std::tuple<at::Tensor(,at::Tensor)*>|::std::tuple<at::Tensor &(,at::Tensor &)*>"
)
# Types without a place in a key, and those that only operators have which are never hooked.
_NO_KEY = re.compile(
    r"Generator|c10::List|Dimname|Storage|Stream|QScheme|DeviceIndex|ArrayRef<c10::SymInt>>|at::Layout\b(?!>)"
    r"|at::Device\b(?!>)"
)
_VIEW = re.compile(r"\([a-z](\|[a-z])*( -> \*)?\)")
_NEVER = {
    "nondeterministic_seeded",
    "data_dependent_output",
    "dynamic_output_shape",
    "inplace_view",
}


def may_be_hooked(name: str, overload: str) -> bool:
    """Whether a kernel of a backend, or one for all backends, can be replaced."""
    shown = f"aten::{name}" + (f".{overload}" if overload else "")
    try:
        operator = getattr(getattr(torch.ops.aten, name), overload or "default")
    except AttributeError:
        return False
    tags = {str(tag).rpartition(".")[2] for tag in operator.tags}
    if tags & _NEVER:
        return False

    def has(key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(shown, key))

    if has("CPU") or has("CUDA"):
        return True
    explicit = has("CompositeExplicitAutograd") or has("CompositeExplicitAutogradNonFunctional")
    return explicit and "generated" not in tags


def signatures(include: Path) -> dict[str, list[str]]:
    """The operators of each signature, by their names."""
    found: dict[str, list[str]] = {}
    for header in sorted((include / "ATen" / "ops").glob("*_ops.h")):
        for match in _OPERATOR.finditer(header.read_text()):
            returns, arguments = match["returns"], match["arguments"]
            if not _RETURNS.fullmatch(returns) or _NO_KEY.search(arguments):
                continue
            if "Tensor" not in arguments or _VIEW.search(match["schema"]):
                continue
            if may_be_hooked(match["name"], match["overload"]):
                name = f"aten::{match['name']}" + (
                    f".{match['overload']}" if match["overload"] else ""
                )
                found.setdefault(f"{returns}({arguments})", []).append(name)
    return found


def write_if_changed(path: Path, text: str) -> None:
    """Leaves the file's date alone where nothing changed."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main() -> None:
    """The command line."""
    include, output, files = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    output.mkdir(parents=True, exist_ok=True)
    found = signatures(include)
    rows = []
    parts: list[list[str]] = [[] for _ in range(files)]
    for index, (signature, names) in enumerate(sorted(found.items())):
        parts[index % files].append(
            f"extern const UnboxedMaker kUnboxed{index};\n"
            f"const UnboxedMaker kUnboxed{index} = MakeUnboxed<{signature}>::kMaker;\n"
        )
        rows += [(name, index) for name in names]
    for index, part in enumerate(parts):
        text = (
            '#include <ATen/core/Tensor.h>\n\n#include "dispatcher/hook/unboxed_hook.h"\n\n'
            f"namespace eagercache {{\n\n{''.join(part)}\n}}  // namespace eagercache\n"
        )
        write_if_changed(output / f"unboxed_{index}.cc", text)
    declared = "".join(f"extern const UnboxedMaker kUnboxed{i};\n" for i in range(len(found)))
    table = "".join(f'    {{"{name}", &kUnboxed{index}}},\n' for name, index in sorted(rows))
    write_if_changed(
        output / "unboxed_rows.cc",
        f'#include "dispatcher/hook/unboxed_hooks.h"\n\nnamespace eagercache {{\n\n{declared}\n'
        f"namespace {{\nconst UnboxedRow kRows[] = {{\n{table}}};\n}}  // namespace\n\n"
        "std::span<const UnboxedRow> unboxed_rows() noexcept { return kRows; }\n\n"
        "}  // namespace eagercache\n",
    )
    print(f"{len(found)} signatures of {len(rows)} operators")


if __name__ == "__main__":
    main()
