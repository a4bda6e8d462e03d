"""What is the same in every container: compiled once for a worker, and linked into each.

Two thirds of the compile of a wrapper are the functions by which a container is called, with all
that they are made of, and `std::regex`, with which it parses its device string.
"""

from __future__ import annotations

import functools

from eagercache.worker.compat import aot_inductor

# The names are libstdc++'s.
_REGEX_CLASSES = (
    "class std::basic_regex<char>",
    "class std::__detail::_Compiler<std::regex_traits<char>>",
    "class std::__detail::_Scanner<char>",
    "struct std::__detail::_NFA<std::regex_traits<char>>",
)
_MODEL = "torch::aot_inductor::AOTInductorModel"
_MODEL_BASE = f"template class torch::aot_inductor::AOTInductorModelBase<{_MODEL}>;"


def regex_templates(prefix: str) -> str:
    """Where the templates of regular expressions are compiled, or "extern " to leave them out."""
    lines = [f"{prefix}template {name};" for name in _REGEX_CLASSES]
    return "\n".join(["#include <regex>", "#include <string>", *lines, ""])


def interface_text() -> str:
    """The functions by which a container is called. They call members that the wrapper defines."""
    return f"{_interface()}\n{_MODEL_BASE}\n"


def without_interface(wrapper: str) -> str | None:
    """A wrapper's text without what `interface_text` compiles; None where that is not in it."""
    interface = _interface()
    if wrapper.count(interface) != 1:
        return None
    includes = [line for line in interface.splitlines() if line.startswith("#include ")]
    return wrapper.replace(interface, "\n".join([*includes, f"extern {_MODEL_BASE}"]))


@functools.cache
def _interface() -> str:
    return aot_inductor.container_interface().read_text().rstrip()
