#include "dispatcher/counters.h"

#include "dispatcher/thread_blocks.h"

namespace eagercache {
namespace {

struct HookSlots {
  std::array<std::atomic<std::uint64_t>, kCallOutcomeCount> outcomes{};
  std::array<std::atomic<std::uint64_t>, kAsideReasonCount> aside{};
  // The owner's own.
  std::uint32_t run_epoch = 0;
  std::uint64_t run = 0;
};

// One thread's counters. Only the owner adds; readers sum with relaxed loads.
struct ThreadBlock {
  std::array<std::atomic<HookSlots*>, kMaxHooks> hooks{};
};

// A plain pointer at a fixed offset from the thread pointer: a hit reads it.
[[gnu::tls_model("initial-exec")]] thread_local ThreadBlock* thread_block = nullptr;

ThreadBlock* first_block() {
  thread_block = &ThreadBlocks<ThreadBlock>::own();
  return thread_block;
}

HookSlots* slots_of(std::size_t hook) {
  ThreadBlock* block = thread_block;
  if (block == nullptr) [[unlikely]] {
    block = first_block();
  }
  std::atomic<HookSlots*>& slot = block->hooks[hook];
  HookSlots* slots = slot.load(std::memory_order_relaxed);
  if (slots == nullptr) [[unlikely]] {
    slots = new HookSlots();  // leaked with its block
    slot.store(slots, std::memory_order_release);
  }
  return slots;
}

// The owner is the only writer, so load and store need no read-modify-write.
void increment(std::atomic<std::uint64_t>& counter) noexcept {
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

}  // namespace

void count_call(std::size_t hook, CallOutcome outcome) noexcept {
  increment(slots_of(hook)->outcomes[static_cast<std::size_t>(outcome)]);
}

void count_aside(std::size_t hook, AsideReason reason) noexcept {
  HookSlots* slots = slots_of(hook);
  increment(slots->outcomes[static_cast<std::size_t>(CallOutcome::kAside)]);
  increment(slots->aside[static_cast<std::size_t>(reason)]);
}

void count_native(std::size_t hook, std::uint32_t epoch) noexcept {
  HookSlots* slots = slots_of(hook);
  increment(slots->outcomes[static_cast<std::size_t>(CallOutcome::kNative)]);
  slots->run = slots->run_epoch != epoch ? 1 : slots->run + 1;
  slots->run_epoch = epoch;
}

bool passes_unseen(std::size_t hook, std::uint32_t epoch) noexcept {
  HookSlots* slots = slots_of(hook);
  if (slots->run < kLongRun || slots->run_epoch != epoch || epoch == 0) [[likely]] {
    return false;
  }
  if (slots->run % kSeenShare == 0) {
    return false;  // count_native goes on
  }
  ++slots->run;
  increment(slots->outcomes[static_cast<std::size_t>(CallOutcome::kNative)]);
  return true;
}

void end_native_run(std::size_t hook) noexcept { slots_of(hook)->run = 0; }

CallCounts read_counts(std::size_t hook) {
  CallCounts sum;
  ThreadBlocks<ThreadBlock>::for_each([&](const ThreadBlock& block) {
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
  });
  return sum;
}

}  // namespace eagercache
