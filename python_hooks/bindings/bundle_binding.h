#pragma once

// Called once, at import, with the GIL.

#include <pybind11/pybind11.h>

namespace eagercache {

// Signing keys, and bundles of kernels in one signed file.
void bind_bundle(pybind11::module_& module);

}  // namespace eagercache
