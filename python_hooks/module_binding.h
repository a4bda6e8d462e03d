#pragma once

#include <pybind11/pybind11.h>

namespace eagercache {

// Adds what accelerates whole modules to the Python module.
void bind_modules(pybind11::module_& module);

}  // namespace eagercache
