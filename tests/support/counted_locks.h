#pragma once

#include <cstddef>
#include <functional>

namespace eagercache {

// Mutexes and read-write locks of pthreads that this thread asked for so far, in libraries too; the
// standard library's are made of them. A program that links this counts.
std::size_t thread_locks() noexcept;

// Runs `work` on a thread of its own that the kernel ends at its first system call. Whether it came
// to the end. `prepare` runs there before, free to make any.
bool makes_no_system_call(const std::function<void()>& prepare, const std::function<void()>& work);

}  // namespace eagercache
