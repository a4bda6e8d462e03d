#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <latch>
#include <thread>
#include <vector>

#include "guards/key/call_key.h"
#include "guards/table/epoch.h"
#include "guards/table/guard_table.h"

namespace eagercache {
namespace {

constexpr unsigned kSecondsUntilStuck = 20;

// Runs `body` in a forked child; its exit status, or -1 when it hung or crashed.
template <typename Body>
int in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kSecondsUntilStuck);
    _exit(body());
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct Object : Retired {};
int freed = 0;
void free_object(Retired* object) noexcept {
  ++freed;
  delete static_cast<Object*>(object);
}

TEST(GuardTableFork, AReaderThatTheChildDoesNotHaveBlocksNoReclamationThere) {
  std::latch inside(1);
  std::latch leave(1);
  std::thread reader([&] {
    const ReadSection section;
    inside.count_down();
    leave.wait();
  });
  inside.wait();
  Limbo limbo(free_object);
  limbo.retire(new Object, sizeof(Object));
  limbo.collect();
  EXPECT_EQ(freed, 0);
  EXPECT_EQ(in_child([&] {
              limbo.collect();
              return freed;
            }),
            1);
  limbo.collect();
  EXPECT_EQ(freed, 0) << "the parent's reader is still inside";
  leave.count_down();
  reader.join();
}

TEST(GuardTableFork, AReaderThatForkedKeepsItsOwnSectionInTheChild) {
  const ReadSection section;
  EXPECT_EQ(in_child([] {
              freed = 0;
              Limbo limbo(free_object);
              limbo.retire(new Object, sizeof(Object));
              limbo.collect();
              return freed;
            }),
            0);
}

// ThreadSanitizer's runtime (of g++ 12) does not take its own locks around a fork, and threads that
// work on atomics hold them: a child forked amid that hangs in the runtime. So this test does not
// exist there.
#if !defined(__SANITIZE_THREAD__)

// Uses everything of a table; 0 when all of it worked.
int use_table(GuardTable& table, const std::vector<int>& kernels) {
  for (Word i = 0; i < 200; ++i) {
    const std::vector<Word> key(10, i);
    const std::uint64_t hash = hash_words(key);
    table.erase(key, hash);
    if (!table.note_miss(key, hash).inserted) return 1;
    table.set_kernel(key, hash, &kernels[i]);
    if (table.find(key, hash).kernel != &kernels[i]) return 2;
  }
  std::size_t entries = 0;
  table.for_each([&entries](std::span<const Word>, Found, std::uint64_t) { ++entries; });
  if (entries != table.size() || entries > table.max_entries()) return 3;
  table.clear();
  return table.size() == 0 ? 0 : 4;
}

// The C library makes its allocator whole for a forked child; AddressSanitizer's (of g++ 12) is not
// made so. There, other threads may not allocate while one forks: the writers only change verdicts.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kWritersMayAllocate = false;
#else
constexpr bool kWritersMayAllocate = true;
#endif
constexpr Word kForkedKeys = 400;

void change_until(const std::atomic<bool>& stop, GuardTable& table, const std::vector<int>& kernels,
                  std::atomic<long>& changes) {
  std::array<Word, 10> key;
  for (Word i = 0; !stop.load(); ++i) {
    key.fill(i % kForkedKeys);
    table.set_kernel(key, hash_words(key), &kernels[i % kForkedKeys]);
    if (kWritersMayAllocate && i % 5 == 0) table.erase(key, hash_words(key));
    ++changes;
  }
}

TEST(GuardTableFork, AChildForkedAmidChangesHasWholeTablesAndFreeLocks) {
  const std::vector<int> kernels(kForkedKeys);
  const std::size_t bound = kWritersMayAllocate ? kForkedKeys * 3 / 4 : kForkedKeys;
  GuardTable table(bound);
  GuardTable other(bound);
  std::array<Word, 10> key;
  for (Word i = 0; i < kForkedKeys; ++i) {
    key.fill(i);
    table.set_kernel(key, hash_words(key), &kernels[i]);
    other.set_kernel(key, hash_words(key), &kernels[i]);
  }
  std::atomic<bool> stop{false};
  std::atomic<long> changes{0};
  std::vector<std::thread> writers;
  for (GuardTable* one : {&table, &other, &table}) {
    writers.emplace_back([&, one] { change_until(stop, *one, kernels, changes); });
  }
  while (changes.load() < 1000) std::this_thread::yield();
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(in_child([&] {
                const int status = use_table(table, kernels);
                return status != 0 ? status : use_table(other, kernels);
              }),
              0);
  }
  stop = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(use_table(table, kernels), 0);
}

#endif  // !defined(__SANITIZE_THREAD__)

}  // namespace
}  // namespace eagercache
