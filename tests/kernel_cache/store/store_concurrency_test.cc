// Many threads and processes in one store, one of which deletes it.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <thread>

#include "kernel_cache/format/file_names.h"
#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/child_process.h"
#include "tests/support/fault_file_layer.h"

namespace eagercache {
namespace {

using Clock = std::chrono::steady_clock;

class ConcurrencyTest : public StoreTest {
 protected:
  ConcurrencyTest() {
    files_.set_sync_enabled(false);
    fast_ = options();
    fast_.files = &files_;
    for (std::uint64_t n = 0; n < kKeys; ++n) sources_.push_back(source_of(n));
  }

  Status publish(DiskStore& store, std::uint64_t n) const {
    return store
        .publish(entry_of(n, EntryKind::kKernel), {{ObjectKind::kSharedObject, sources_[n]}})
        .status();
  }

  // A thread's work: look up keys at random, publish what is missing. Whatever is verified must be
  // the right bytes.
  void look_up_and_publish(DiskStore& store, unsigned int seed) {
    std::mt19937 random(seed);
    while (!done_) {
      const std::uint64_t n = random() % kKeys;
      const auto found = store.find(key_of(n));
      if (!found) {
        ++misses_;
        (void)publish(store, n).is_ok();
        continue;
      }
      const auto bytes = store.read_object(found.value(), 0);
      if (!bytes) continue;
      if (bytes.value() != answer_object(n)) {
        ++wrong_;
        continue;
      }
      ++hits_;
      // Loading is slow and never undone; a sample of it will do.
      if (random() % 16 == 0) {
        const auto path = store.verified_shared_object(found.value(), 0);
        const auto library =
            path ? SharedLibrary::open(path.value()) : Result<SharedLibrary>(path.status());
        if (library && ask(library.value()) != n) ++wrong_;
        if (library) ++loads_;
      }
    }
  }

  // Runs for `time`, and longer while `enough` does not hold: a disk that stalls for seconds must
  // not decide what was tested.
  void run_threads(std::vector<std::function<void()>> bodies, std::chrono::milliseconds time,
                   const std::function<bool()>& enough) {
    const Clock::time_point start = Clock::now();
    std::vector<std::thread> threads;
    for (auto& body : bodies) threads.emplace_back(std::move(body));
    std::this_thread::sleep_for(time);
    while (!enough() && Clock::now() - start < std::chrono::seconds(60)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    done_ = true;
    for (std::thread& thread : threads) thread.join();
  }

  static constexpr std::uint64_t kKeys = 60;
  // Forking a process under a sanitizer copies its shadow memory's tables every time.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr int kForks = 20;
#else
  static constexpr int kForks = 200;
#endif
  FaultFileLayer files_;
  StoreOptions fast_;
  std::vector<std::filesystem::path> sources_;
  std::atomic<bool> done_{false};
  std::atomic<std::uint64_t> hits_{0};
  std::atomic<std::uint64_t> misses_{0};
  std::atomic<std::uint64_t> loads_{0};
  std::atomic<std::uint64_t> wrong_{0};
};

TEST_F(ConcurrencyTest, FourEvictorsDisturbNoneOfEightLoaders) {
  // Five in a hundred of the working set.
  fast_.max_bytes = kKeys * answer_object(0).size() / 20;
  const auto store = open(fast_);
  std::atomic<std::uint64_t> evicted{0};
  std::vector<std::function<void()>> bodies;
  for (unsigned int i = 0; i < 8; ++i) {
    bodies.emplace_back([&, i] { look_up_and_publish(*store, i); });
  }
  for (int i = 0; i < 4; ++i) {
    bodies.emplace_back([&] {
      while (!done_) {
        const auto result = store->evict(false);
        if (result) evicted += result->entries_removed;
      }
    });
  }
  run_threads(std::move(bodies), std::chrono::milliseconds(2500),
              [&] { return hits_ > 100 && evicted > 100; });
  EXPECT_EQ(wrong_, 0U);
  EXPECT_GT(hits_, 0U);
  EXPECT_GT(evicted, 0U);
  // With nobody publishing, one eviction reaches the cap.
  ASSERT_TRUE(store->evict(false));
  std::uint64_t bytes = 0;
  EXPECT_TRUE(store->for_each(true, [&](const EntryInfo& entry) {
    bytes += entry.bytes;
    // An entry published in the very second in which its object lost the one before may be
    // without it: a miss, and no bytes.
    for (const ObjectRef& object : entry.manifest.objects) {
      if (!std::filesystem::exists(inside(object_file(object.kind, object.digest)))) {
        bytes -= object.size;
      }
    }
  }));
  EXPECT_LE(bytes, fast_.max_bytes + answer_object(0).size() + 1024);
  // And every key can be had again.
  for (std::uint64_t n = 0; n < kKeys; ++n) {
    ASSERT_TRUE(publish(*store, n));
    EXPECT_TRUE(check(*store, n));
  }
}

TEST_F(ConcurrencyTest, DeletingTheStoreUnderLoadCausesMissesOnly) {
  const auto store = open(fast_);
  std::atomic<int> deletions{0};
  std::vector<std::function<void()>> bodies;
  for (unsigned int i = 0; i < 4; ++i) {
    bodies.emplace_back([&, i] { look_up_and_publish(*store, i); });
  }
  bodies.emplace_back([&] {
    while (!done_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::error_code ignored;
      std::filesystem::remove_all(root(), ignored);
      ++deletions;
    }
  });
  run_threads(std::move(bodies), std::chrono::milliseconds(2000),
              [&] { return hits_ > 0 && misses_ > 0 && deletions > 1; });
  EXPECT_EQ(wrong_, 0U);
  EXPECT_GT(hits_, 0U);
  EXPECT_GT(misses_, 0U);
  EXPECT_GT(deletions, 1);
  // A deletion half way leaves objects lost and manifests found, never bytes changed.
  const Status published = publish(*store, 1);
  ASSERT_TRUE(published) << published.message();
  EXPECT_TRUE(check(*store, 1));
}

TEST_F(ConcurrencyTest, EveryThreadPublishingOneKeyGetsTheSameEntry) {
  const auto store = open(fast_);
  for (std::uint64_t round = 0; round < 30; ++round) {
    std::vector<std::thread> threads;
    std::atomic<int> failed{0};
    for (std::uint64_t i = 0; i < 6; ++i) {
      threads.emplace_back([&, i] {
        Manifest manifest = entry_of(round, EntryKind::kKernel);
        manifest.facts["thread"] = std::to_string(i);
        const auto result = store->publish(manifest, {{ObjectKind::kSharedObject, sources_[i]}});
        const auto found = store->find(manifest.key);
        if (!result || !found || result->objects != found->objects) ++failed;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(failed, 0);
    EXPECT_TRUE(check(*store, round));
  }
  EXPECT_EQ(store->quarantined(), 0U);
}

TEST_F(ConcurrencyTest, AForkedChildReadsButNeverWritesAndTheParentsLockStays) {
  const auto store = open(fast_);
  ASSERT_TRUE(publish(*store, 1));
  std::optional<FileLock> lock(store->try_lock(key_of(1)).value());
  // Other threads are anywhere in the store at every fork. Not under AddressSanitizer: the
  // allocator of g++ 12's hangs in a child that was forked while another thread allocated, whoever
  // that is.
#if defined(__SANITIZE_ADDRESS__)
  constexpr unsigned int kThreads = 0;
#else
  constexpr unsigned int kThreads = 2;
#endif
  std::vector<std::thread> threads;
  for (unsigned int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { look_up_and_publish(*store, i); });
  }
  std::uint64_t failures = 0;
  for (int round = 0; round < kForks; ++round) {
    const int result = run_in_child(
        [&] {
          const std::uint64_t before = files_.changes();
          for (int call = 0; call < 100; ++call) {
            const auto found = store->find(key_of(1));
            if (!found || store->read_object(found.value(), 0).code() != StatusCode::kOk) return 1;
          }
          if (publish(*store, 2).code() != StatusCode::kRefused) return 2;
          if (store->try_lock(key_of(3)).code() != StatusCode::kRefused) return 3;
          if (store->evict(true).code() != StatusCode::kRefused) return 4;
          if (store->make_work_directory().code() != StatusCode::kRefused) return 5;
          if (store->remove(key_of(1)).code() != StatusCode::kRefused) return 6;
          lock.reset();
          return files_.changes() == before ? 0 : 7;
        },
        10);
    if (result != 0) {
      ++failures;
      ADD_FAILURE() << "round " << round << ": child ended with " << result;
    }
    if (failures > 3) break;
  }
  done_ = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(lock->held());
  EXPECT_EQ(store->try_lock(key_of(1)).code(), StatusCode::kBusy);
  lock.reset();
  EXPECT_TRUE(store->try_lock(key_of(1)));
}

TEST_F(ConcurrencyTest, AChildMayOpenAStoreOfItsOwn) {
  const auto store = open(fast_);
  EXPECT_EQ(run_in_child([&] {
              auto mine = DiskStore::open(options());
              return mine && publish(*mine.value(), 4).is_ok() ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(check(*store, 4));
}

TEST_F(ConcurrencyTest, TheLockOfAKilledCompilerIsFreeAtOnce) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    ::alarm(20);
    auto mine = DiskStore::open(options());
    const auto lock = mine ? mine.value()->try_lock(key_of(1)) : Result<FileLock>(mine.status());
    const char told = lock ? 'y' : 'n';
    if (::write(ready[1], &told, 1) == 1) ::pause();
    ::_exit(1);
  }
  char told = 0;
  ASSERT_EQ(::read(ready[0], &told, 1), 1);
  ASSERT_EQ(told, 'y');
  const auto store = open();
  EXPECT_EQ(store->try_lock(key_of(1)).code(), StatusCode::kBusy);
  ::kill(holder, SIGKILL);
  // Dead, and nothing else was done: bench/store has the time it takes.
  ::waitpid(holder, nullptr, 0);
  EXPECT_TRUE(store->try_lock(key_of(1)));
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace eagercache
