"""What a wrapper is compiled without: what is the same in all of them, and what is not run.

Two thirds of the compile of a wrapper are the functions by which a container is called, with all
that they are made of, and `std::regex`, with which it parses its device string. These are compiled
once for a worker, and linked into each container. A third to two thirds of what is left, more with
every tensor that a graph is given, are checks of the tensors, which run where a variable asks for
them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

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


# The runtime asks for this variable once, and checks where it is set to anything but 0. Programs
# that set it have an environment, and kernels, of their own.
CHECKS_VARIABLE = "AOTI_RUNTIME_CHECK_INPUTS"
# A function for each tensor, of which every line but the first three and the last is indented.
_CHECK = re.compile(
    r"^(AOTI_NOINLINE static void check_input_\d+\(\n"
    r" +AtenTensorHandle\* input_handles\n"
    r"\) \{\n)(?:(?: .*)?\n)+(?=\}$)",
    re.MULTILINE,
)


def without_checks(wrapper: str, environ: Mapping[str, str]) -> str:
    """A wrapper's text with no checks of its tensors, unless ``environ`` asks for them."""
    return wrapper if CHECKS_VARIABLE in environ else _CHECK.sub(r"\1", wrapper)


@functools.cache
def _interface() -> str:
    return aot_inductor.container_interface().read_text().rstrip()
