#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <random>
#include <thread>
#include <vector>

#include "guards/key/call_key.h"
#include "guards/table/guard_table.h"

namespace eagercache {
namespace {

constexpr int kThreads = 32;
constexpr std::uint64_t kSeed = 99;
constexpr Word kKeys = 2000;
constexpr std::size_t kEntries = 256;  // an eighth of the keys, so that eviction never rests

// Steps of one thread. EAGERCACHE_STRESS_STEPS sets another number.
int steps() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr int kSteps = 2000;
#else
  constexpr int kSteps = 100000;
#endif
  const char* const text = std::getenv("EAGERCACHE_STRESS_STEPS");
  return text != nullptr ? std::atoi(text) : kSteps;
}

struct Kernel {
  Word number;
};

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> kAll = [] {
    std::vector<Kernel> all;
    for (Word i = 0; i < kKeys; ++i) all.push_back({i});
    return all;
  }();
  return kAll;
}

// What every answer for `number` must satisfy, whatever other threads do.
bool is_true_answer(Word number, EntryState state, const void* kernel) {
  if (state != EntryState::kKernel) return kernel == nullptr;
  return kernel != nullptr && static_cast<const Kernel*>(kernel)->number == number;
}

struct Tally {
  std::atomic<long> hits{0};
  std::atomic<long> misses{0};
  std::atomic<long> wrong{0};
  std::atomic<long> too_large{0};
  std::atomic<long> again{0};
};

// What one thread remembers: where it found some keys.
struct Memory {
  std::array<RememberedKey, 64> keys;
  std::array<Word, 64> numbers{};

  // Looks a key up where it was last found, and elsewhere otherwise.
  Found find(const GuardTable& table, std::span<const Word> key, std::uint64_t hash, Word number,
             long& again) {
    RememberedKey& remembered = keys[number % keys.size()];
    if (numbers[number % keys.size()] == number) {
      const Found found = table.find_again(remembered, [&](std::span<const Word> words) {
        return std::equal(words.begin(), words.end(), key.begin(), key.end());
      });
      if (found.state != EntryState::kAbsent) {
        ++again;
        return found;
      }
    }
    numbers[number % keys.size()] = number;
    return table.find(key, hash, &remembered);
  }
};

void work(GuardTable& table, std::uint64_t seed, int count, Tally& tally) {
  std::mt19937_64 random(seed);
  long hits = 0;
  long misses = 0;
  long again = 0;
  Memory memory;
  std::array<Word, 12> words;
  for (int step = 0; step < count; ++step) {
    // Half of the calls are of few keys, as in a program.
    const Word number = random() % (random() % 2 == 0 ? 32 : kKeys);
    words.fill(number * 0x9e3779b97f4a7c15);
    const std::span<const Word> key(words.data(), 4 + number % 9);
    const std::uint64_t hash = hash_words(key);
    switch (const std::uint64_t action = random() % 1000; action) {
      case 0:
        if (random() % 16 == 0) table.clear();
        break;
      case 1:
        table.erase(key, hash);
        break;
      case 2:
        if (random() % 16 != 0) break;
        table.for_each([&](std::span<const Word> words_seen, Found found, std::uint64_t) {
          if (found.state == EntryState::kAbsent || words_seen.size() < 4) ++tally.wrong;
        });
        break;
      default: {
        if (action < 20) {
          table.set_kernel(key, hash, &kernels()[number]);
        } else if (action < 30) {
          table.set_native(key, hash);
        }
        const Found found = memory.find(table, key, hash, number, again);
        if (!is_true_answer(number, found.state, found.kernel)) ++tally.wrong;
        hits += found.state != EntryState::kAbsent;
        if (found.state == EntryState::kAbsent || found.state == EntryState::kPending) {
          const MissNote miss = table.note_miss(key, hash);
          if (!is_true_answer(number, miss.state, miss.kernel)) ++tally.wrong;
          ++misses;
        }
      }
    }
    if (table.size() > kEntries) ++tally.too_large;
  }
  tally.hits += hits;
  tally.misses += misses;
  tally.again += again;
}

TEST(GuardTableStress, ThirtyTwoThreadsNeverGetAWrongAnswer) {
  GuardTable table(kEntries);
  Tally tally;
  const int count = steps();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back(
        [&, i] { work(table, kSeed + static_cast<std::uint64_t>(i), count, tally); });
  }
  for (std::thread& thread : threads) thread.join();
  std::cout << "seed " << kSeed << ", " << kThreads << " x " << count << ": " << tally.hits
            << " hits, " << tally.misses << " misses\n";
  EXPECT_EQ(tally.wrong, 0);
  EXPECT_EQ(tally.too_large, 0);
  EXPECT_GT(tally.hits, 0);
  EXPECT_GT(tally.misses, 0);
  EXPECT_GT(tally.again, 0);
}

TEST(GuardTableStress, ThreadsThatComeAndGoReadAcrossTables) {
  GuardTable first(16);
  GuardTable second(16);
  Tally tally;
  const int rounds = 20;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      const std::uint64_t seed = kSeed + static_cast<std::uint64_t>(round * 8 + i);
      threads.emplace_back([&, i, seed] { work(i % 2 == 0 ? first : second, seed, 100, tally); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(tally.wrong, 0);
  EXPECT_EQ(first.max_entries(), 16U);
  EXPECT_LE(first.size(), 16U);
  EXPECT_LE(second.size(), 16U);
}

}  // namespace
}  // namespace eagercache
