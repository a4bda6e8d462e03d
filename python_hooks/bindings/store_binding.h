#pragma once

// The store for Python, and what other bindings need to speak of it. With the GIL.

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "kernel_cache/base/status.h"
#include "kernel_cache/format/manifest.h"
#include "kernel_cache/format/signing_rules.h"

namespace eagercache {

// Raises StoreError with the status's message, and its code as the attribute `code`.
[[noreturn]] void throw_store_error(const Status& status);

// A manifest as Python sees it.
pybind11::dict manifest_dict(const Manifest& manifest);

// Rules that trust the public keys in these files and heed the list of what is revoked; "": nothing
// is. Raises StoreError.
SigningRules signing_rules_of(const std::vector<std::string>& keys, const std::string& revoked);

// What is revoked by the list in a file; nothing for "". Raises StoreError.
Revocations revocations_of(const std::string& path);

// Adds Store, StoreError and StoreLock to the module.
void bind_store(pybind11::module_& module);

}  // namespace eagercache
