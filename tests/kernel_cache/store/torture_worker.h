#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>

namespace eagercache {

inline constexpr int kMaxWorkers = 64;

struct TorturePlan {
  std::filesystem::path root;
  std::uint64_t seed = 1;
  std::uint64_t keys = 120;
  // Chance that one file call fails, with a random errno.
  double fault_rate = 0;
  // Flushing to the device; matters to power failures only.
  bool sync = false;
  // Workers of a lower index do nothing but evict.
  int evictors = 0;
  // The store's cap; 0 is its default.
  std::uint64_t max_bytes = 0;
  // Workers go on with new passes until this moment of the steady clock, in milliseconds.
  std::int64_t until = 0;
};

// Memory that all workers share with their supervisor, and that a killed worker leaves intact.
struct TortureBoard {
  std::atomic<std::uint64_t> compiles_begun{0};
  std::atomic<std::uint64_t> compiles_completed{0};
  std::atomic<std::uint64_t> published{0};
  std::atomic<std::uint64_t> loads{0};
  std::atomic<std::uint64_t> wrong_results{0};
  // Entries that failed verification. Never, unless calls are made to fail.
  std::atomic<std::uint64_t> corrupt{0};
  std::atomic<std::uint64_t> errors{0};
  std::atomic<std::uint64_t> busy{0};
  std::atomic<std::uint64_t> faults{0};
  std::atomic<std::uint64_t> passes{0};
  std::atomic<std::uint64_t> evicted{0};
  // Milliseconds of a clock that hardly moves while the machine or its disk stalls, so that a
  // worker's silence is a hang of ours and not of theirs.
  std::atomic<std::int64_t> clock{0};
  // That clock at each worker's last sign of life, and when it last settled a key or evicted.
  std::array<std::atomic<std::int64_t>, kMaxWorkers> alive{};
  std::array<std::atomic<std::int64_t>, kMaxWorkers> settled{};
};

std::int64_t steady_milliseconds();

// Runs the board's clock in a process of its own, which makes and removes a directory below
// `folder` at every tick. Returns that process, to be killed at the end.
pid_t start_torture_clock(TortureBoard& board, const std::filesystem::path& folder);

// One process's life: every key, in random order, until each was loaded and answered rightly. What
// is missing is compiled under the key's lock by a fake compiler. Returns the exit status.
int run_torture_worker(const TorturePlan& plan, TortureBoard& board, int index,
                       std::uint64_t random_seed);

}  // namespace eagercache
