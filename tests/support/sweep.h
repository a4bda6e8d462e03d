#pragma once

#include <cstddef>
#include <cstdlib>

namespace eagercache {

// How a test steps through every call, byte, error or random case that it has. By 1, but under a
// sanitizer, which makes each many times as long, by `under_sanitizer`; with
// EAGERCACHE_WHOLE_SWEEPS=1 by 1 there too.
inline std::size_t sweep_step([[maybe_unused]] std::size_t under_sanitizer) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return std::getenv("EAGERCACHE_WHOLE_SWEEPS") == nullptr ? under_sanitizer : 1;
#else
  return 1;
#endif
}

}  // namespace eagercache
