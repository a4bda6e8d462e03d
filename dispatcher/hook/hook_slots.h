#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "dispatcher/hook/call_trials.h"
#include "dispatcher/hook/counters.h"
#include "dispatcher/hook/long_run.h"
#include "guards/table/guard_table.h"

namespace eagercache {

// What one thread keeps of one hook, so that a hit writes no cache line that another thread writes.
// Outlives its thread and is taken over by a later one; never freed.
struct alignas(64) HookSlots {
  // The owner adds, without read-modify-write; others read.
  std::array<std::atomic<std::uint64_t>, kCallOutcomeCount> outcomes{};
  std::array<std::atomic<std::uint64_t>, kAsideReasonCount> aside{};

  // The owner's own, down to here:
  LongRun run;                                   // of all calls
  std::uint32_t sketched_epoch = 0;              // of the last call that sketched_runs.h counted
  std::uint64_t trial_at = call_trials::kApart;  // the number of hits after which one is timed
  std::uint64_t warmed = 0;      // the hash of the key that native answered last, untimed
  std::uint32_t warm_calls = 0;  // for so many calls that one is to be timed when it comes again

  // Keys of its last calls, by a mark of the call (call_sketch.h).
  struct Recent {
    std::uint64_t mark = 0;  // 0: none
    LongRun run;  // of calls of the mark, whatever their keys; barred once a kernel answered one
    bool answered = false;  // a kernel answered the key's last call
    RememberedKey key;
  };
  static constexpr std::size_t kRecentBits = 3;
  std::array<Recent, 1U << kRecentBits> recent{};
  bool remembers = true;  // false of those that ending threads share

  // Whether one of this hook's next hits is to be timed (call_trials.h).
  bool trial_due() const noexcept {
    return outcomes[static_cast<std::size_t>(CallOutcome::kHit)].load(std::memory_order_relaxed) >=
           trial_at;
  }
  void next_trial() noexcept {
    const std::uint64_t hits =
        outcomes[static_cast<std::size_t>(CallOutcome::kHit)].load(std::memory_order_relaxed);
    trial_at = hits + call_trials::distance(hits);
  }

  // Null when the mark is not remembered.
  Recent* find_recent(std::uint64_t mark) noexcept {
    Recent& place = recent[mark >> (64 - kRecentBits)];
    return place.mark == mark ? &place : nullptr;
  }
  void remember(std::uint64_t mark, const RememberedKey& key) noexcept {
    if (remembers) {
      Recent& place = recent[mark >> (64 - kRecentBits)];
      place = {mark, place.mark == mark ? place.run : LongRun(), false, key};
    }
  }
  void count(CallOutcome outcome) noexcept {
    std::atomic<std::uint64_t>& counter = outcomes[static_cast<std::size_t>(outcome)];
    counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
};

namespace hook_slots_detail {

// A thread's slots by the hooks' numbers; null until its first call of a hook.
struct ThreadHooks {
  std::array<std::atomic<HookSlots*>, kMaxHooks> hooks{};
};

// A plain pointer at a fixed offset from the thread pointer: every call reads it.
extern constinit thread_local ThreadHooks* this_threads __attribute__((tls_model("initial-exec")));

HookSlots& make_slots(std::size_t hook);

}  // namespace hook_slots_detail

// The calling thread's; allocates at a thread's first call and its first call of a hook.
inline HookSlots& hook_slots(std::size_t hook) {
  if (hook_slots_detail::this_threads != nullptr) [[likely]] {
    HookSlots* const slots =
        hook_slots_detail::this_threads->hooks[hook].load(std::memory_order_relaxed);
    if (slots != nullptr) [[likely]] {
      return *slots;
    }
  }
  return hook_slots_detail::make_slots(hook);
}

}  // namespace eagercache
