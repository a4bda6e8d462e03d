#pragma once

#include <cstddef>

namespace eagercache {

// Calls of operator new on this thread so far, in libraries too. A program that links this counts.
std::size_t thread_allocations() noexcept;

}  // namespace eagercache
