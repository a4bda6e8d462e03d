#pragma once

// How kernels on CPU say what became of a call. Any thread.

#include <cstdint>

#include "dispatcher/kernels/loaded_kernel.h"

namespace eagercache {

// What the C function of a compiled kernel returned: 2 before it did anything, for an index that is
// out of its range.
inline LoadedKernel::Outcome outcome_of_entry(std::int32_t returned) noexcept {
  switch (returned) {
    case 0:
      return LoadedKernel::Outcome::kAnswered;
    case 2:
      return LoadedKernel::Outcome::kNotStarted;
    default:
      return LoadedKernel::Outcome::kFailed;
  }
}

}  // namespace eagercache
