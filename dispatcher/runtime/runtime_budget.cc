// Runtime: which new keys are worth a kernel. The first ones get theirs after a call or two, so
// that a program of few keys has all of its kernels soon. A program that keeps meeting new keys
// would compile without end: from then on native must have spent on a key what a kernel can save.

#include <algorithm>

#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

// So many requests are made whatever calls cost.
constexpr std::uint64_t kRequestsAtOnce = 40;
// What native must have spent on a key after these: a few thousandths of what a compile takes, so
// that even a kernel that takes no time at all has something to save.
constexpr std::uint64_t kSpentNs = 1'000'000;

}  // namespace

std::uint64_t Runtime::calls_before_compile(const OperatorHook& hook) const noexcept {
  const Policy now = policy();
  // Who waits has asked for a kernel.
  return now.on_miss == OnMiss::kWait ? 1 : now.compile_after * hook.compile_cost();
}

// How long a call keeps a GPU busy is not known here.
std::uint64_t Runtime::enough_calls(const OperatorHook& hook, std::uint64_t native_ns) const {
  const std::uint64_t calls = calls_before_compile(hook);
  if (policy().on_miss == OnMiss::kWait ||
      requests_.load(std::memory_order_relaxed) < kRequestsAtOnce ||
      hook.device_type() != c10::DeviceType::CPU) {
    return calls;
  }
  return std::max(calls, kSpentNs / std::max<std::uint64_t>(native_ns, 1));
}

}  // namespace eagercache
