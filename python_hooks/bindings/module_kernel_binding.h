#pragma once

#include <pybind11/pybind11.h>

namespace eagercache {

// `ModuleKernel` and `load_module`: from an entry of a store, or libraries, to the kernel of a
// module.
void bind_module_kernels(pybind11::module_& module);

}  // namespace eagercache
