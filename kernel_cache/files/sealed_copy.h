#pragma once

#include <filesystem>
#include <string_view>

#include "kernel_cache/base/digest.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// A path at which the dynamic loader finds exactly these bytes, of which `digest` is the SHA-256: a
// sealed file in memory, kept for the process's life, one for each content. kFull once such files
// hold a quarter of the descriptors that this process may open. Thread-safe.
Result<std::filesystem::path> sealed_copy(const Digest& digest, std::string_view bytes);

}  // namespace eagercache
