#include "dispatcher/counters.h"

#include <memory>
#include <mutex>
#include <vector>

namespace eagercache {
namespace {

struct HookSlots {
  std::array<std::atomic<std::uint64_t>, kCallOutcomeCount> outcomes{};
  std::array<std::atomic<std::uint64_t>, kAsideReasonCount> aside{};
};

// One thread's counters. Only the owner adds; readers sum with relaxed loads.
struct ThreadBlock {
  std::array<std::atomic<HookSlots*>, kMaxHooks> hooks{};
  bool taken = true;  // guarded by Registry::mutex
};

struct Registry {
  std::mutex mutex;
  std::vector<std::unique_ptr<ThreadBlock>> blocks;  // guarded by mutex
};

// Leaked: threads may count while static objects are destroyed.
Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

ThreadBlock* take_block() {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  for (auto& block : all.blocks) {
    if (!block->taken) {
      block->taken = true;
      return block.get();
    }
  }
  all.blocks.push_back(std::make_unique<ThreadBlock>());
  return all.blocks.back().get();
}

// Returns the thread's block to the registry when the thread ends.
struct BlockOwner {
  ThreadBlock* block = take_block();
  ~BlockOwner() {
    std::lock_guard lock(registry().mutex);
    block->taken = false;
  }
};

// A plain pointer at a fixed offset from the thread pointer: a hit reads it.
[[gnu::tls_model("initial-exec")]] thread_local ThreadBlock* thread_block = nullptr;

ThreadBlock* first_block() {
  thread_local BlockOwner owner;
  thread_block = owner.block;
  return owner.block;
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

CallCounts read_counts(std::size_t hook) {
  CallCounts sum;
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  for (const auto& block : all.blocks) {
    const HookSlots* slots = block->hooks[hook].load(std::memory_order_acquire);
    if (slots == nullptr) {
      continue;
    }
    for (std::size_t i = 0; i < kCallOutcomeCount; ++i) {
      sum.outcomes[i] += slots->outcomes[i].load(std::memory_order_relaxed);
    }
    for (std::size_t i = 0; i < kAsideReasonCount; ++i) {
      sum.aside[i] += slots->aside[i].load(std::memory_order_relaxed);
    }
  }
  return sum;
}

}  // namespace eagercache
