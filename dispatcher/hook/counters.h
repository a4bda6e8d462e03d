#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "guards/builder/aside_reason.h"

namespace eagercache {

// What became of a call of a hooked operator. Each call of an active hook counts in exactly one of
// these.
enum class CallOutcome : std::uint8_t {
  kHit,      // a kernel answered
  kMiss,     // first meeting of a key; native answered
  kPending,  // the key was met before, its verdict is not there yet; native answered
  kNative,   // decided for native
  kAside,    // no key by rule; native answered
};
inline constexpr std::size_t kCallOutcomeCount = 5;

// What became of calls, and by which rule those stepped aside that no kernel may answer.
struct CallCounts {
  std::array<std::uint64_t, kCallOutcomeCount> outcomes{};
  std::array<std::uint64_t, kAsideReasonCount> aside{};
};

// Most operators that can be hooked in one process.
inline constexpr std::size_t kMaxHooks = 2048;

// Per-thread counters, so that a hit writes no cache line that another thread writes. A block
// outlives its thread and is taken over by a later one; nothing is ever lost or freed.
//
// add: any thread, lock-free but for a thread's first call and its first call of an operator.
// read: any thread; a sum that may miss additions made meanwhile.
void count_call(std::size_t hook, CallOutcome outcome) noexcept;
void count_aside(std::size_t hook, AsideReason reason) noexcept;

// Runs (long_run.h) of all calls of one operator on one thread.
//
// Counts a call as kNative, one more of a run.
void count_native(std::size_t hook, std::uint32_t epoch) noexcept;
// True when the call need not be looked at; it is counted as kNative then.
bool passes_unseen(std::size_t hook, std::uint32_t epoch) noexcept;
// A call that was looked at is not decided.
void end_native_run(std::size_t hook) noexcept;

CallCounts read_counts(std::size_t hook);

}  // namespace eagercache
