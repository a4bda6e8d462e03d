#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "dispatcher/hook/counters.h"
#include "guards/key/call_key.h"

namespace eagercache {

class OperatorHook;

// One key that was met while calls were recorded.
struct RecordedCall {
  OperatorHook* hook = nullptr;
  std::vector<Word> words;
  std::uint64_t calls = 0;
  std::uint64_t hits = 0;       // of them, those that a kernel answered
  std::uint64_t native_ns = 0;  // mean of the timed calls that native answered; 0: none was
};

// Whether calls are recorded right now; hooks ask it after each counted call.
inline std::atomic<bool> recording_calls{false};

// Distinct keys that are remembered at most, over all threads. Calls of others are counted as lost.
inline constexpr std::size_t kMaxRecordedKeys = 262'144;

// Counts one call of a key while calls are recorded. Every thread counts in memory of its own,
// under a lock that only a reader contends for. `native_ns` is what native took, 0 when not timed;
// the first time of a key counts only while there is no other, since it holds what native does
// once. Any thread; without memory the call is lost.
void record_call(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                 CallOutcome outcome, std::uint64_t native_ns) noexcept;

// Whether the caller should time the native call that it is about to make: one in a few.
bool native_time_wanted() noexcept;

// All calls recorded since the process began or forget_recorded_calls(), those of threads that have
// ended included; keys in no order.
std::vector<RecordedCall> recorded_calls();
void forget_recorded_calls();
std::uint64_t lost_calls() noexcept;

}  // namespace eagercache
