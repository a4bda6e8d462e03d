#pragma once

namespace eagercache {

// SHA-256 of all C++ sources of the layers, in hex digits; made by the build
// (cmake/SourceDigest.cmake).
const char* source_digest() noexcept;

}  // namespace eagercache
