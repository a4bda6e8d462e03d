// Runtime: which new keys are worth a kernel. The first ones get theirs after a call or two, so
// that a program of few keys has all of its kernels soon. A program that keeps meeting new keys
// would compile without end: from then on native must have spent on a key what a kernel can save
// (request_budget.h).

#include "dispatcher/runtime/request_budget.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {

std::uint64_t Runtime::calls_before_compile(const OperatorHook& hook) const noexcept {
  const Policy now = policy();
  // Who waits has asked for a kernel.
  return now.on_miss == OnMiss::kWait ? 1 : now.compile_after * hook.compile_cost();
}

std::uint64_t Runtime::enough_calls(const OperatorHook& hook, std::uint64_t native_ns) const {
  const std::uint64_t calls = calls_before_compile(hook);
  if (policy().on_miss == OnMiss::kWait) {
    return calls;
  }
  return enough_calls_of(hook.device_type() != c10::DeviceType::CPU, calls,
                         requests_.load(std::memory_order_relaxed), native_ns);
}

}  // namespace eagercache
