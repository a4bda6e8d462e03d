#pragma once

#include <pybind11/pybind11.h>

#include "kernel_cache/base/status.h"
#include "kernel_cache/format/manifest.h"

namespace eagercache {

// Raises StoreError with the status's message, and its code as the attribute `code`.
[[noreturn]] void throw_store_error(const Status& status);

// A manifest as Python sees it.
pybind11::dict manifest_dict(const Manifest& manifest);

// Adds Store, StoreError and StoreLock to the module.
void bind_store(pybind11::module_& module);

}  // namespace eagercache
