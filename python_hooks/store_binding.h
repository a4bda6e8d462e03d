#pragma once

#include <pybind11/pybind11.h>

namespace eagercache {

// Adds Store, StoreError and StoreLock to the module.
void bind_store(pybind11::module_& module);

}  // namespace eagercache
