"""The text that AOTInductor generates, cut into statements, kernels and arguments."""

from __future__ import annotations

import re


class NotUnderstood(ValueError):
    """The generated text has a form that no plan is made of. ``str()`` names it."""


def _body(wrapper: str) -> str:
    start = wrapper.rfind("void AOTInductorModel::run_impl(")
    begin = wrapper.find(") {", start)
    end = wrapper.find("} // AOTInductorModel::run_impl", begin)
    if start < 0 or begin < 0 or end < 0:
        raise NotUnderstood("no run_impl")
    return wrapper[begin + len(") {") : end]


# torch 2.15 checks each input here when a variable of the environment asks for it.
_INPUT_CHECK = re.compile(
    r"if \(_check_aoti_runtime_check_inputs_env\(\)\) "
    r"\{ assert_size_stride\(\w+, \{[^{};]*\}, \{[^{};]*\}, \"input\"\); \}"
)


def statements(wrapper: str) -> list[str]:
    """The statements of run_impl, each on one line. Raises NotUnderstood."""
    lines = [
        re.sub(r"\s+// (reuse|alias)$", "", line.rstrip())
        for line in _body(wrapper).splitlines()
        if not _INPUT_CHECK.fullmatch(line.strip())
    ]
    parts = [" ".join(part.split()) for part in "\n".join(lines).split(";")]
    if parts and parts[-1]:
        raise NotUnderstood(f"text after the last statement: {parts[-1][:80]}")
    return parts[:-1]


_DEFINITION = re.compile(r'^extern "C"\s+void\s+(\w+)\(', re.MULTILINE)
_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"


def kernel_names(kernel: str) -> list[str]:
    """The functions that the text defines. Raises NotUnderstood."""
    names = _DEFINITION.findall(kernel)
    if not names or len(set(names)) != len(names) or kernel.count('extern "C"') != len(names):
        raise NotUnderstood("the kernels' definitions")
    return names


def namespace_body(kernel: str) -> str:
    """The definitions without their C linkage, so that any number of calls share one file."""
    lines = [line for line in kernel.splitlines() if line.strip() != _INCLUDE]
    for line in lines:
        if line.lstrip().startswith("#") and not line.lstrip().startswith("#pragma "):
            raise NotUnderstood(f"directive {line.strip()[:60]}")
    return _DEFINITION.sub(r"static void \1(", "\n".join(lines)).strip()


def split_arguments(text: str) -> list[str]:
    """The arguments of a call, or the elements of a list."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "(<{[":
            depth += 1
        elif character in ")>}]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]
