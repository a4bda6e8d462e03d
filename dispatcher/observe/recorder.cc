#include "dispatcher/observe/recorder.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <unordered_map>
#include <utility>

#include "dispatcher/base/locks.h"
#include "dispatcher/base/thread_blocks.h"
#include "dispatcher/hook/call_observer.h"
#include "dispatcher/hook/operator_hook.h"

namespace eagercache {
namespace {

// A quarter of native calls is timed: reading the clock twice costs a twentieth of a small one.
constexpr unsigned kTimedShareBits = 2;
// A call's number times this, in 64 bits, decides whether it is one of them. Multiples of the
// golden ratio fall into all quarters evenly, and unlike every fourth call they meet each call of a
// loop.
constexpr std::uint64_t kGoldenRatio = 0x9E3779B97F4A7C15U;

// Looked up by reference, so that a known key costs no copy.
struct KeyView {
  const OperatorHook* hook;
  std::uint64_t hash;
  std::span<const Word> words;
};

// The same with words of its own, which outlive the call.
struct Key {
  OperatorHook* hook;
  std::uint64_t hash;
  std::vector<Word> words;
  operator KeyView() const noexcept { return {hook, hash, words}; }  // NOLINT(google-explicit-*)
};

// Looked up by a view, so that a call that was met before copies no words.
struct KeyHash {
  using is_transparent = void;
  std::size_t operator()(const KeyView& key) const noexcept {
    return static_cast<std::size_t>(key.hash ^ key.hook->index() * kGoldenRatio);
  }
};

struct KeyEqual {
  using is_transparent = void;
  bool operator()(const KeyView& left, const KeyView& right) const noexcept {
    return left.hook == right.hook && left.hash == right.hash &&
           std::ranges::equal(left.words, right.words);
  }
};

struct Tally {
  std::uint64_t calls = 0;
  std::uint64_t hits = 0;
  std::uint64_t timed = 0;     // without the first
  std::uint64_t total_ns = 0;  // of those
  std::uint64_t first_ns = 0;

  void add_call(std::uint64_t native_ns) noexcept {
    const bool first = calls++ == 0;
    if (native_ns != 0 && first) {
      first_ns = native_ns;
    } else if (native_ns != 0) {
      ++timed;
      total_ns += native_ns;
    }
  }
  void add(const Tally& other) noexcept {
    calls += other.calls;
    hits += other.hits;
    timed += other.timed;
    total_ns += other.total_ns;
    first_ns = first_ns == 0 ? other.first_ns : first_ns;
  }
  std::uint64_t native_ns() const noexcept { return timed == 0 ? first_ns : total_ns / timed; }
};

using Tallies = std::unordered_map<Key, Tally, KeyHash, KeyEqual>;
// Calls without a key, by operator and rule: few.
using AsideTallies = std::map<std::pair<OperatorHook*, AsideReason>, Tally>;

// One thread's counts.
struct TallyBlock {
  Mutex mutex;
  Tallies tallies EAGERCACHE_GUARDED_BY(mutex);
  AsideTallies asides EAGERCACHE_GUARDED_BY(mutex);
};

std::atomic<std::size_t> num_keys{0};
std::atomic<std::uint64_t> num_lost{0};

Tally* tally_of(TallyBlock& block, OperatorHook& hook, std::span<const Word> words,
                std::uint64_t hash) EAGERCACHE_REQUIRES(block.mutex) {
  const auto known = block.tallies.find(KeyView{&hook, hash, words});
  if (known != block.tallies.end()) [[likely]] {
    return &known->second;
  }
  if (num_keys.fetch_add(1, std::memory_order_relaxed) >= kMaxRecordedKeys) {
    num_keys.fetch_sub(1, std::memory_order_relaxed);
    return nullptr;
  }
  Key key{&hook, hash, {words.begin(), words.end()}};
  return &block.tallies.emplace(std::move(key), Tally{}).first->second;
}

// What hooks tell of their calls while they are recorded; any thread, without waiting for another.
class Recorder final : public CallRecorder {
 public:
  void record(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
              CallOutcome outcome, std::uint64_t native_ns) noexcept override {
    try {
      TallyBlock& block = ThreadBlocks<TallyBlock>::own();
      const Lock lock(block.mutex);
      if (Tally* const tally = tally_of(block, hook, words, hash)) [[likely]] {
        tally->add_call(native_ns);
        tally->hits += outcome == CallOutcome::kHit ? 1 : 0;
        return;
      }
    } catch (const std::exception&) {
      // Without memory.
    }
    num_lost.fetch_add(1, std::memory_order_relaxed);
  }

  void record_aside(OperatorHook& hook, AsideReason reason,
                    std::uint64_t native_ns) noexcept override {
    try {
      TallyBlock& block = ThreadBlocks<TallyBlock>::own();
      const Lock lock(block.mutex);
      block.asides[{&hook, reason}].add_call(native_ns);
    } catch (const std::exception&) {
      // Without memory. The call is counted all the same (counters.h).
    }
  }

  bool wants_time() noexcept override {
    thread_local std::uint64_t calls = 0;
    return (++calls * kGoldenRatio) >> (64 - kTimedShareBits) == 0;
  }
};

// What all threads have counted there.
template <typename Counts>
Counts sum_of(Counts TallyBlock::*counts) {
  Counts sum;
  ThreadBlocks<TallyBlock>::for_each([&](TallyBlock& block) {
    const Lock lock(block.mutex);
    for (const auto& [key, tally] : block.*counts) {
      sum[key].add(tally);
    }
  });
  return sum;
}

constinit Recorder process_recorder;

}  // namespace

void set_recording(bool recording) noexcept {
  call_recorder.store(recording ? &process_recorder : nullptr);
}

std::vector<RecordedCall> recorded_calls() {
  const Tallies sum = sum_of(&TallyBlock::tallies);
  std::vector<RecordedCall> calls;
  calls.reserve(sum.size());
  for (const auto& [key, tally] : sum) {
    calls.push_back({key.hook, key.words, tally.calls, tally.hits, tally.native_ns()});
  }
  return calls;
}

std::vector<RecordedAside> recorded_asides() {
  const AsideTallies sum = sum_of(&TallyBlock::asides);
  std::vector<RecordedAside> rows;
  rows.reserve(sum.size());
  for (const auto& [key, tally] : sum) {
    const std::uint64_t timed = tally.timed == 0 && tally.first_ns != 0 ? 1 : tally.timed;
    rows.push_back({key.first, key.second, tally.calls, timed, tally.native_ns()});
  }
  return rows;
}

void forget_recorded_calls() {
  ThreadBlocks<TallyBlock>::for_each([](TallyBlock& block) {
    const Lock lock(block.mutex);
    block.tallies.clear();
    block.asides.clear();
  });
  num_keys.store(0, std::memory_order_relaxed);
  num_lost.store(0, std::memory_order_relaxed);
}

std::uint64_t lost_calls() noexcept { return num_lost.load(std::memory_order_relaxed); }

}  // namespace eagercache
