#include "dispatcher/hook/call_trials.h"

#include <ATen/Context.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>
#include <unordered_map>

#include "dispatcher/hook/call_observer.h"
#include "dispatcher/hook/operator_hook.h"
#include "dispatcher/hook/switches.h"

namespace eagercache {
namespace {

constexpr std::size_t kFirstLook = 8;
constexpr std::size_t kLastLook = 64;
// Of a normal distribution: one of 2,000 lies above it. Eight against eight that are all smaller
// give 3.36.
constexpr double kSignificant = 3.29;
constexpr double kLoss = 1.02;
constexpr std::size_t kMostTrials = 4096;

std::uint64_t median(std::vector<std::uint64_t> values) {
  if (values.empty()) {
    return 0;
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

std::atomic<bool> trials_on{false};

struct Trials {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, CallTrial> by_key;  // guarded by mutex
};

// Leaked: threads may be inside hooks while static objects are destroyed.
Trials& trials() {
  static Trials& all = *new Trials;
  return all;
}

std::uint64_t name_of(std::size_t hook, std::uint64_t hash) {
  return hash ^ (hook * 0x9e3779b97f4a7c15);
}

// The thread's call that native answers in a kernel's place.
struct Begun {
  OperatorHook* hook = nullptr;
  std::vector<Word> words;
  std::uint64_t hash = 0;
  std::uint64_t since = 0;
  int exceptions = 0;
};

Begun& begun() {
  thread_local Begun call;
  return call;
}

}  // namespace

TrialTurn CallTrial::next() const noexcept {
  if (verdict_ != Verdict::kOpen) {
    return TrialTurn::kNone;
  }
  return native_.size() < kernel_.size() ? TrialTurn::kNative : TrialTurn::kKernel;
}

void CallTrial::add(TrialTurn turn, std::uint64_t nanoseconds) {
  if (turn == TrialTurn::kNone || verdict_ != Verdict::kOpen) {
    return;
  }
  std::vector<std::uint64_t>& mine = turn == TrialTurn::kNative ? native_ : kernel_;
  if (mine.size() < kLastLook) {
    mine.push_back(nanoseconds);
  }
  const std::size_t both = std::min(native_.size(), kernel_.size());
  if (native_.size() == kernel_.size() && both >= kFirstLook && (both & (both - 1)) == 0) {
    decide();
  }
}

TrialTimes CallTrial::times() const { return {median(native_), median(kernel_)}; }

// H. B. Mann, D. R. Whitney, "On a test of whether one of two random variables is stochastically
// larger than the other", 1947: U counts the pairs in which the kernel took longer.
void CallTrial::decide() {
  double longer = 0;
  for (const std::uint64_t kernel : kernel_) {
    for (const std::uint64_t native : native_) {
      longer += kernel > native ? 1.0 : kernel == native ? 0.5 : 0.0;
    }
  }
  const auto count = static_cast<double>(native_.size());
  const double deviation = std::sqrt(count * count * (2 * count + 1) / 12);
  const double z = (longer - count * count / 2) / deviation;
  const TrialTimes now = times();
  if (z > kSignificant &&
      static_cast<double>(now.kernel_ns) > kLoss * static_cast<double>(now.native_ns)) {
    verdict_ = Verdict::kNative;
  } else if (z < -kSignificant || native_.size() >= kLastLook) {
    verdict_ = Verdict::kKernel;
  }
}

namespace call_trials {

void set_on(bool on) noexcept { trials_on.store(on, std::memory_order_relaxed); }

void clear() noexcept {
  Trials& all = trials();
  const std::lock_guard lock(all.mutex);
  all.by_key.clear();
}

TrialTurn next(std::size_t hook, std::uint64_t hash) noexcept {
  if (!trials_on.load(std::memory_order_relaxed) || kernels_frozen.load() ||
      call_recorder.load(std::memory_order_relaxed) != nullptr ||
      answer_verifier.load(std::memory_order_relaxed) != nullptr ||
      at::globalContext().deterministicAlgorithms()) {
    return TrialTurn::kNone;
  }
  try {
    Trials& all = trials();
    const std::unique_lock lock(all.mutex, std::try_to_lock);
    if (!lock.owns_lock()) {
      return TrialTurn::kNone;
    }
    const auto found = all.by_key.find(name_of(hook, hash));
    if (found == all.by_key.end()) {
      return all.by_key.size() < kMostTrials ? TrialTurn::kKernel : TrialTurn::kNone;
    }
    return found->second.next();
  } catch (const std::exception&) {
    return TrialTurn::kNone;
  }
}

std::optional<TrialTimes> add(std::size_t hook, std::uint64_t hash, TrialTurn turn,
                              std::uint64_t nanoseconds) noexcept {
  try {
    Trials& all = trials();
    const std::unique_lock lock(all.mutex, std::try_to_lock);
    if (!lock.owns_lock()) {
      return {};
    }
    CallTrial& trial = all.by_key[name_of(hook, hash)];
    const bool open = trial.verdict() == CallTrial::Verdict::kOpen;
    trial.add(turn, nanoseconds);
    if (!open || trial.verdict() != CallTrial::Verdict::kNative) {
      return {};
    }
    return trial.times();
  } catch (const std::exception&) {
    return {};  // out of memory: the time is lost
  }
}

}  // namespace call_trials

void NativeTrial::begin(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash) {
  Begun& call = begun();
  call.words.assign(words.begin(), words.end());
  call.hash = hash;
  call.hook = &hook;
}

void NativeTrial::start() noexcept {
  begun().exceptions = std::uncaught_exceptions();
  begun().since = trial_clock();
}

void NativeTrial::end() noexcept {
  const std::uint64_t now = trial_clock();
  Begun& call = begun();
  if (call.hook != nullptr && std::uncaught_exceptions() == call.exceptions) {
    call.hook->end_trial(call.words, call.hash, TrialTurn::kNative, now - call.since);
  }
  call.hook = nullptr;
}

TrialTurn OperatorHook::begin_trial(HookSlots& mine, std::span<const Word> words,
                                    std::uint64_t hash) noexcept {
  if (!mine.trial_due()) [[likely]] {
    return TrialTurn::kNone;
  }
  // A custom operator's own function may be many hooked operators, with trials of their own.
  if (device_type_ != c10::DeviceType::CPU || !guard_native_) {
    mine.next_trial();
    return TrialTurn::kNone;
  }
  const bool warmed = mine.warm_calls > 0;
  if (warmed && hash != mine.warmed) {
    if (--mine.warm_calls == 0) {
      mine.next_trial();
    }
    return TrialTurn::kNone;
  }
  const TrialTurn turn = call_trials::next(index_, hash);
  if (turn == TrialTurn::kNative && !warmed) {
    mine.warmed = hash;
    mine.warm_calls = call_trials::kWarmCalls;
    return TrialTurn::kWarm;
  }
  mine.warm_calls = 0;
  mine.next_trial();
  if (turn == TrialTurn::kNative) {
    try {
      NativeTrial::begin(*this, words, hash);
    } catch (const std::exception&) {
      return TrialTurn::kNone;
    }
  }
  return turn;
}

void OperatorHook::end_trial(std::span<const Word> words, std::uint64_t hash, TrialTurn turn,
                             std::uint64_t nanoseconds) noexcept {
  if (const auto lost = call_trials::add(index_, hash, turn, nanoseconds)) [[unlikely]] {
    misses_.note_lost_trial(*this, words, hash, *lost);
  }
}

}  // namespace eagercache
