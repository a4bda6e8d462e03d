#pragma once

// The path of a module's call: whether a kernel answers, and what the Python side is told. Under
// the GIL, which is released while a kernel runs.

#include <pybind11/pybind11.h>

namespace eagercache {

// A callable that answers calls of modules, and lets `original`, which is torch.nn.Module.__call__,
// answer the others: called with the module as its first argument. A new reference.
pybind11::object make_module_call(pybind11::handle original);

}  // namespace eagercache
