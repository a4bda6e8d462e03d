#pragma once

// Called once, at import, with the GIL.

#include <pybind11/pybind11.h>

namespace eagercache {

// Kernels of modules with symbolic sizes, and the forms of call that they answer.
void bind_module_shapes(pybind11::module_& module);

}  // namespace eagercache
