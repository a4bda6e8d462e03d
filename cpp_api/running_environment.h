#pragma once

// Whether kernels that were made elsewhere can run in this process. Any thread, also while the
// process ends.

#include <filesystem>
#include <string>
#include <string_view>

#include "kernel_cache/base/environment_fields.h"

namespace eagercache {

// The fields of an environment key that kernels meet when they run, as environment.py's
// RUNNING_FIELDS names them, of this process: one line "field: value" each. A test compares them
// with Python's. Computed once; reads torch's installation record.
const std::string& running_environment_text();

// Why the libtorch of this process is not the one that this library was built against, in one line;
// empty when it is.
std::string foreign_torch();

// Why kernels that were made under `theirs` cannot run here, the fields joined by "; "; empty when
// they can.
std::string running_differences(const EnvironmentFields& theirs);

// What environment.py makes of an installation record: the digest of its lines, "none" without any.
// For tests.
std::string record_digest(std::string_view record);

}  // namespace eagercache
