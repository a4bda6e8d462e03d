#pragma once

// The program's own calls decide last. A worker timed a kernel beside whatever ran then; in the
// program it has other threads and caches around it. So a few of the calls that a kernel answers
// are timed where they happen, and native answers every second one of these, until one of the two
// is significantly faster. It answers another one just before, which is not timed: the kernel that
// answers all others has its code and data in the caches. Calls on the CPU alone: what a call takes
// on a GPU, its host can't see.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "guards/key/call_key.h"

namespace eagercache {

class OperatorHook;

// A call's part in its key's trial.
enum class TrialTurn : std::uint8_t {
  kNone,    // not timed
  kKernel,  // the kernel answers, as it would, and is timed
  kWarm,    // native answers in its place, so that its code and data are in the caches
  kNative,  // the same once more, and it is timed
};

constexpr bool is_natives(TrialTurn turn) noexcept {
  return turn == TrialTurn::kWarm || turn == TrialTurn::kNative;
}

// Nanoseconds of the clock that trials read.
inline std::uint64_t trial_clock() noexcept {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// What both took, in nanoseconds a call, by median.
struct TrialTimes {
  std::uint64_t native_ns = 0;
  std::uint64_t kernel_ns = 0;
};

// What is known of one key. One thread at a time.
class CallTrial {
 public:
  enum class Verdict : std::uint8_t { kOpen, kKernel, kNative };

  // The turn of the next call: none once there is a verdict.
  TrialTurn next() const noexcept;
  // What a call of that turn took.
  void add(TrialTurn turn, std::uint64_t nanoseconds);
  // By the Mann-Whitney test of both samples (normal approximation) whenever they have doubled,
  // from 8 to 64: native wins only where chance gives as much in one of 2,000 looks at equal ones,
  // and its median is 2 % less. A sample that the scheduler touched is one rank, however long it
  // was.
  Verdict verdict() const noexcept { return verdict_; }
  TrialTimes times() const;

 private:
  void decide();

  std::vector<std::uint64_t> native_;
  std::vector<std::uint64_t> kernel_;
  Verdict verdict_ = Verdict::kOpen;
};

// The trials of the process, by hook and key. Any thread; nobody waits: where another thread holds
// the lock, a call is not timed, or its time is dropped.
namespace call_trials {

// In the place of a hook's number: trials of kernels of whole modules, by their entries.
inline constexpr std::size_t kModuleTrials = std::size_t{1} << 32;

// Of the calls that kernels answer one in so many is timed, on average.
inline constexpr std::uint64_t kApart = 256;
// Among so many calls of the operator the key of the first of two calls has to come again.
inline constexpr std::uint32_t kWarmCalls = 64;
// How far the next one is after `calls`: half of that to half as much more, so that no period of
// the program has always the same call timed.
constexpr std::uint64_t distance(std::uint64_t calls) noexcept {
  return kApart / 2 + (((calls + 1) * 0x9e3779b97f4a7c15) >> 56) % kApart;
}

// Whether calls are timed at all. The runtime sets it (Runtime::set_policy).
void set_on(bool on) noexcept;
// Forgets all trials.
void clear() noexcept;
// None where kernels are frozen, calls are recorded or verified, or bits have to be the same in
// every run (deterministic algorithms).
TrialTurn next(std::size_t hook, std::uint64_t hash) noexcept;
// The times where this one made native win.
std::optional<TrialTimes> add(std::size_t hook, std::uint64_t hash, TrialTurn turn,
                              std::uint64_t nanoseconds) noexcept;

}  // namespace call_trials

// Times the call of native that the thread makes next, in the kernel's place; `timed` is whether
// one was begun (OperatorHook::begin_trial). What throws has no time.
class NativeTrial {
 public:
  explicit NativeTrial(bool timed) noexcept : timed_(timed) {
    if (timed) [[unlikely]] {
      start();
    }
  }
  ~NativeTrial() {
    if (timed_) [[unlikely]] {
      end();
    }
  }
  NativeTrial(const NativeTrial&) = delete;
  NativeTrial& operator=(const NativeTrial&) = delete;

  // The call whose turn is native's, until its NativeTrial ends.
  static void begin(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash);

 private:
  static void start() noexcept;
  static void end() noexcept;

  const bool timed_;
};

}  // namespace eagercache
