#include "dispatcher/hook/counters.h"

#include <memory>

#include "dispatcher/base/thread_blocks.h"
#include "dispatcher/hook/hook_slots.h"

namespace eagercache {

namespace hook_slots_detail {

constinit thread_local ThreadHooks* this_threads __attribute__((tls_model("initial-exec"))) =
    nullptr;

namespace {

// Set once the thread's own objects are being destroyed.
[[gnu::tls_model("initial-exec")]] constinit thread_local bool has_ended = false;

// Goes before the thread's block is given to another thread.
struct Ending {
  ~Ending() {
    has_ended = true;
    this_threads = nullptr;
  }
};

// For calls that a thread's own objects make while they are destroyed. All such threads share it.
ThreadHooks& of_the_ended() {
  static auto* const hooks = new ThreadHooks();
  return *hooks;
}

HookSlots& slots_in(ThreadHooks& hooks, std::size_t hook, bool remembers) {
  std::atomic<HookSlots*>& slot = hooks.hooks[hook];
  HookSlots* slots = slot.load(std::memory_order_acquire);
  if (slots != nullptr) {
    return *slots;
  }
  auto fresh = std::make_unique<HookSlots>();
  fresh->remembers = remembers;
  if (slot.compare_exchange_strong(slots, fresh.get(), std::memory_order_acq_rel)) {
    return *fresh.release();  // leaked with its block
  }
  return *slots;
}

}  // namespace

HookSlots& make_slots(std::size_t hook) {
  if (has_ended) {
    return slots_in(of_the_ended(), hook, false);
  }
  if (this_threads == nullptr) {
    ThreadHooks& own = ThreadBlocks<ThreadHooks>::own();
    thread_local const Ending ending;  // destroyed before what own() has made
    static_cast<void>(&ending);
    this_threads = &own;
  }
  return slots_in(*this_threads, hook, true);
}

}  // namespace hook_slots_detail

namespace {

// The owner is the only writer, so load and store need no read-modify-write.
void increment(std::atomic<std::uint64_t>& counter) noexcept {
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

}  // namespace

void count_call(std::size_t hook, CallOutcome outcome) noexcept { hook_slots(hook).count(outcome); }

void count_aside(std::size_t hook, AsideReason reason) noexcept {
  HookSlots& slots = hook_slots(hook);
  slots.count(CallOutcome::kAside);
  increment(slots.aside[static_cast<std::size_t>(reason)]);
}

void count_native(std::size_t hook, std::uint32_t epoch) noexcept {
  HookSlots& slots = hook_slots(hook);
  slots.count(CallOutcome::kNative);
  slots.run.count(epoch);
}

bool passes_unseen(std::size_t hook, std::uint32_t epoch) noexcept {
  HookSlots& slots = hook_slots(hook);
  if (!slots.run.passes(epoch)) [[likely]] {
    return false;
  }
  slots.count(CallOutcome::kNative);
  return true;
}

void end_native_run(std::size_t hook) noexcept { hook_slots(hook).run.end(); }

CallCounts read_counts(std::size_t hook) {
  CallCounts sum;
  using hook_slots_detail::ThreadHooks;
  const auto add = [&](const ThreadHooks& block) {
    const HookSlots* slots = block.hooks[hook].load(std::memory_order_acquire);
    if (slots == nullptr) {
      return;
    }
    for (std::size_t i = 0; i < kCallOutcomeCount; ++i) {
      sum.outcomes[i] += slots->outcomes[i].load(std::memory_order_relaxed);
    }
    for (std::size_t i = 0; i < kAsideReasonCount; ++i) {
      sum.aside[i] += slots->aside[i].load(std::memory_order_relaxed);
    }
  };
  ThreadBlocks<ThreadHooks>::for_each(add);
  add(hook_slots_detail::of_the_ended());
  return sum;
}

}  // namespace eagercache
