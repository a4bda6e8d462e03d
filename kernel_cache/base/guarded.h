#pragma once

#include <exception>
#include <new>

#include "kernel_cache/base/status.h"

namespace eagercache {

// Runs `body`, which returns a Status or a Result, and turns what it throws into a Status: no
// exception crosses the border of kernel_cache/.
template <typename Body>
auto guarded(Body body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    // Short enough to need no memory.
    return Status(StatusCode::kFull, "no memory");
  } catch (const std::exception& error) {
    return Status(StatusCode::kIoError, error.what());
  }
}

}  // namespace eagercache
