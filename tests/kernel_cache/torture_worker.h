#pragma once

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
  // Steady-clock milliseconds of each worker's last sign of life.
  std::array<std::atomic<std::int64_t>, kMaxWorkers> alive{};
};

std::int64_t steady_milliseconds();

// One process's life: every key, in random order, until each was loaded and answered rightly. What
// is missing is compiled under the key's lock by a fake compiler. Returns the exit status.
int run_torture_worker(const TorturePlan& plan, TortureBoard& board, int index,
                       std::uint64_t random_seed);

}  // namespace eagercache
