#pragma once

#include <algorithm>
#include <cstdint>

namespace eagercache {

// So many requests are made whatever calls cost.
inline constexpr std::uint64_t kRequestsAtOnce = 40;
// What native must have spent on a key on the CPU after these: a few thousandths of what a compile
// takes, so that even a kernel that takes no time at all has something to save.
inline constexpr std::uint64_t kSpentNs = 1'000'000;
// The same on a GPU, in calls: how long a call keeps it busy is not known here. A step of a program
// whose sizes change with each step (decoding) calls a key once a layer or twice, and never again.
inline constexpr std::uint64_t kCallsOnGpu = 64;

// The calls after which a kernel is asked for, of a key that `native_ns` was measured for. `calls`
// is what each key needs, `requests` how many were made. Keys are looked at whenever their calls
// have doubled (Runtime::ask_for), so the next power of two is when they are.
constexpr std::uint64_t enough_calls_of(bool on_gpu, std::uint64_t calls, std::uint64_t requests,
                                        std::uint64_t native_ns) noexcept {
  if (requests < kRequestsAtOnce) {
    return calls;
  }
  return std::max(calls, on_gpu ? kCallsOnGpu : kSpentNs / std::max<std::uint64_t>(native_ns, 1));
}

}  // namespace eagercache
