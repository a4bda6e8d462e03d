#pragma once

// The calls of this process, for traces and estimates: which keys, how often, and how long native
// took. Each thread counts in a block of its own (thread_blocks.h), and whoever asks adds them up.
// The words of a key are copied: they outlive its entry. Any thread.

#include <cstdint>
#include <vector>

#include "guards/builder/aside_reason.h"
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

// Calls of one operator that stepped aside by one rule while calls were recorded.
struct RecordedAside {
  OperatorHook* hook = nullptr;
  AsideReason reason = AsideReason::kNone;
  std::uint64_t calls = 0;
  std::uint64_t timed = 0;      // of them, those that native_ns is of
  std::uint64_t native_ns = 0;  // their mean; 0: none was timed
};

// Whether hooks tell of their calls (call_observer.h). Every thread counts in memory of its own,
// under a lock that only a reader contends for; without memory a call is lost. The first time of a
// key counts only while there is no other, since it holds what native does once.
void set_recording(bool recording) noexcept;

// Distinct keys that are remembered at most, over all threads. Calls of others are counted as lost.
inline constexpr std::size_t kMaxRecordedKeys = 262'144;

// All calls recorded since the process began or forget_recorded_calls(), those of threads that have
// ended included; keys in no order.
std::vector<RecordedCall> recorded_calls();
std::vector<RecordedAside> recorded_asides();
void forget_recorded_calls();
std::uint64_t lost_calls() noexcept;

}  // namespace eagercache
