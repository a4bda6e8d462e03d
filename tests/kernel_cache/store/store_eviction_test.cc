#include <sys/stat.h>

#include <fstream>
#include <semaphore>
#include <thread>

#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/child_process.h"
#include "tests/support/fault_file_layer.h"
#include "tests/support/sweep.h"

namespace eagercache {
namespace {

class EvictionTest : public StoreTest {
 protected:
  EvictionTest() { files_.set_sync_enabled(false); }

  StoreOptions capped(std::uint64_t bytes, std::uint64_t entries = 1'000'000) {
    StoreOptions result = options();
    result.max_bytes = bytes;
    result.max_entries = entries;
    result.files = &files_;
    return result;
  }

  void set_last_used(std::uint64_t n, std::int64_t seconds_ago) {
    FileLayer::posix().set_time(-1, manifest_path(n).c_str(), files_.now() - seconds_ago);
  }

  std::uint64_t stored_bytes() const {
    std::uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root())) {
      const auto name = entry.path().native();
      const bool counted =
          name.find("/o/") != std::string::npos || name.find("/m/") != std::string::npos;
      if (counted && entry.is_regular_file()) bytes += entry.file_size();
    }
    return bytes;
  }

  FaultFileLayer files_;
};

TEST_F(EvictionTest, NothingGoesBelowTheCaps) {
  const auto store = open(capped(1 << 30));
  for (std::uint64_t n = 1; n <= 5; ++n) ASSERT_TRUE(publish_kernel(*store, n));
  const auto result = store->evict(false);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->entries_removed, 0U);
  EXPECT_EQ(result->objects_removed, 0U);
  EXPECT_EQ(result->temporaries_removed, 0U);
}

TEST_F(EvictionTest, TheLongestUnusedGoFirstDownToTheLowWaterMark) {
  const std::uint64_t one = answer_object(1).size();
  const auto store = open(capped(10 * one));
  for (std::uint64_t n = 1; n <= 20; ++n) {
    ASSERT_TRUE(publish_kernel(*store, n));
    set_last_used(n, static_cast<std::int64_t>(n) * 60);
  }
  const std::uint64_t before = stored_bytes();
  const auto result = store->evict(false);
  ASSERT_TRUE(result);
  EXPECT_LE(stored_bytes(), 8 * one);
  EXPECT_GT(stored_bytes(), 6 * one);
  EXPECT_EQ(result->bytes_removed, before - stored_bytes());
  EXPECT_EQ(result->objects_removed, result->entries_removed);
  EXPECT_TRUE(check(*store, 1));
  EXPECT_EQ(store->find(key_of(20)).code(), StatusCode::kNotFound);
}

TEST_F(EvictionTest, TheNumberOfEntriesIsCappedToo) {
  const auto store = open(capped(1 << 30, 10));
  for (std::uint64_t n = 0; n < 11; ++n) {
    ASSERT_TRUE(store->publish(entry_of(n, EntryKind::kNative), {}));
  }
  EXPECT_EQ(store->evict(false)->entries_removed, 3U);
}

TEST_F(EvictionTest, ForceGoesToTheLowWaterMarkAtOnce) {
  const auto store = open(capped(1 << 30, 10));
  for (std::uint64_t n = 0; n < 10; ++n) {
    ASSERT_TRUE(store->publish(entry_of(n, EntryKind::kNative), {}));
  }
  EXPECT_EQ(store->evict(false)->entries_removed, 0U);
  EXPECT_EQ(store->evict(true)->entries_removed, 2U);
}

TEST_F(EvictionTest, ACapacityOfNothingKeepsNothing) {
  const auto store = open(capped(0));
  ASSERT_TRUE(publish_kernel(*store, 1));
  ASSERT_TRUE(store->evict(false));
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
  EXPECT_EQ(stored_bytes(), 0U);
}

TEST_F(EvictionTest, AnObjectStaysWhileAnyEntryNeedsIt) {
  const auto store = open(capped(1 << 30, 1));
  for (const std::uint64_t n : {1, 2}) {
    ASSERT_TRUE(store->publish(entry_of(n, EntryKind::kKernel),
                               {{ObjectKind::kSharedObject, source_of(9)}}));
  }
  set_last_used(1, 100);
  StoreOptions other = options();
  other.environment = "another";
  ASSERT_TRUE(open(other)->publish(entry_of(3, EntryKind::kKernel),
                                   {{ObjectKind::kSharedObject, source_of(9)}}));
  const auto result = store->evict(false);
  EXPECT_EQ(result->entries_removed, 2U);
  EXPECT_EQ(result->objects_removed, 0U);
  EXPECT_TRUE(std::filesystem::exists(object_path(9)));
}

TEST_F(EvictionTest, EntriesUnusedForTooLongGo) {
  const auto store = open(capped(1 << 30));
  for (std::uint64_t n = 1; n <= 3; ++n) ASSERT_TRUE(publish_kernel(*store, n));
  set_last_used(2, options().max_age_seconds + 3600);
  EXPECT_EQ(store->evict(false)->entries_removed, 1U);
  EXPECT_FALSE(store->find(key_of(2)));
  EXPECT_TRUE(check(*store, 3));
}

TEST_F(EvictionTest, AHitMakesAnEntryYoungAtMostOnceAnHour) {
  const auto store = open(capped(1 << 30));
  ASSERT_TRUE(publish_kernel(*store, 1));
  set_last_used(1, 1800);
  const auto before = std::filesystem::last_write_time(manifest_path(1));
  ASSERT_TRUE(store->find(key_of(1)));
  EXPECT_EQ(std::filesystem::last_write_time(manifest_path(1)), before);
  set_last_used(1, 7200);
  ASSERT_TRUE(store->find(key_of(1)));
  EXPECT_GT(std::filesystem::last_write_time(manifest_path(1)), before);
}

TEST_F(EvictionTest, WrongClocksEvictNothingThatIsInUse) {
  const auto store = open(capped(1 << 30));
  for (std::uint64_t n = 1; n <= 3; ++n) ASSERT_TRUE(publish_kernel(*store, n));
  set_last_used(1, -80LL * 365 * 24 * 3600);  // in eighty years
  set_last_used(2, -24 * 3600);
  EXPECT_EQ(store->evict(false)->entries_removed, 0U);
  for (const std::int64_t day : {-1, 1}) {
    files_.set_clock_offset(day * 24 * 3600);
    EXPECT_EQ(store->evict(false)->entries_removed, 0U);
    EXPECT_TRUE(check(*store, 1));
  }
  files_.set_clock_offset(0);
  // Time zero is very long ago; the first use makes it young again.
  set_last_used(3, files_.now());
  ASSERT_TRUE(store->find(key_of(3)));
  EXPECT_EQ(store->evict(false)->entries_removed, 0U);
  // A future time counts as now, so the oldest is the one with the oldest true time.
  set_last_used(3, 3600);
  const auto tight = open(capped(1 << 30, 2));
  EXPECT_EQ(tight->evict(false)->entries_removed, 1U);
  EXPECT_FALSE(tight->find(key_of(3)));
}

TEST_F(EvictionTest, YoungObjectsWithoutAnEntryAreLeftToTheirPublisher) {
  const auto store = open(capped(1 << 30));
  ASSERT_TRUE(publish_kernel(*store, 1));
  ASSERT_TRUE(store->remove(key_of(1)));
  EXPECT_EQ(store->evict(true)->objects_removed, 0U);
  files_.set_clock_offset(2 * 3600);
  EXPECT_EQ(store->evict(false)->objects_removed, 1U);
}

// A publisher that is stopped before each of its calls in turn while an eviction begins, which is
// stopped before each of its own while the publisher ends, and then ends itself.
class EvictionRace : public EvictionTest {
 protected:
  EvictionRace() { publisher_files_.set_sync_enabled(false); }

  // Key 1 goes for its age. `key`, 1 or another, is published with the same object.
  void run(std::uint64_t key, std::uint64_t publisher_call, std::uint64_t evictor_call) {
    std::filesystem::remove_all(root());
    const auto store = open(capped(1 << 30));
    ASSERT_TRUE(publish_with_object_9(*store, 1));
    set_last_used(1, options().max_age_seconds + 3600);
    StoreOptions publishing = options();
    publishing.files = &publisher_files_;
    const auto publisher = open(publishing);
    std::counting_semaphore<4> may_evict{0};
    std::counting_semaphore<4> may_publish{0};
    std::counting_semaphore<4> may_finish{0};
    publisher_files_.before_call(publisher_call, [&] {
      may_evict.release();
      may_publish.acquire();
    });
    files_.before_call(evictor_call, [&] {
      may_publish.release();
      may_finish.acquire();
    });
    std::thread evictor([&] {
      may_evict.acquire();
      EXPECT_TRUE(store->evict(false));
      may_publish.release();
    });
    EXPECT_TRUE(publish_with_object_9(*publisher, key));
    publisher_stopped_ = publisher_files_.fault_happened();
    may_evict.release();
    may_finish.release();
    evictor.join();
    evictor_stopped_ = files_.fault_happened();
    publisher_files_.clear_faults();
    files_.clear_faults();
  }

  bool publisher_stopped_ = true;
  bool evictor_stopped_ = true;

 private:
  Result<Manifest> publish_with_object_9(DiskStore& store, std::uint64_t key) const {
    return store.publish(entry_of(key, EntryKind::kKernel),
                         {{ObjectKind::kSharedObject, source_of(9)}});
  }

  FaultFileLayer publisher_files_;
};

TEST_F(EvictionRace, NoPublishedEntryLosesItsObject) {
  std::size_t cases = 0;
  for (const std::uint64_t key : {1, 2}) {
    publisher_stopped_ = true;
    for (std::uint64_t first = 1; publisher_stopped_; first += sweep_step(7)) {
      evictor_stopped_ = true;
      for (std::uint64_t second = 1; evictor_stopped_; second += sweep_step(5)) {
        ASSERT_NO_FATAL_FAILURE(run(key, first, second));
        ++cases;
        const auto reader = open();
        const Status found = check(*reader, key);
        // Only what was there already, and so was not written again, may go for its age.
        ASSERT_TRUE(found || (key == 1 && found.code() == StatusCode::kNotFound))
            << first << ", " << second << ": " << found.to_string();
        ASSERT_EQ(reader->quarantined(), 0U) << first << ", " << second;
      }
    }
  }
  EXPECT_GT(cases, 20U);
}

TEST_F(EvictionTest, TemporariesOfTheDeadGoAtOnceAndOthersAfterAnHour) {
  const auto store = open(capped(1 << 30));
  EXPECT_EQ(run_in_child([&] {
              auto mine = DiskStore::open(options());
              if (!mine) return 1;
              const auto work = mine.value()->make_work_directory();
              if (!work) return 2;
              std::filesystem::create_directories(work.value() / "a" / "b");
              std::ofstream(work.value() / "a" / "b" / "file") << "left behind";
              return 0;
            }),
            0);
  const auto ours = store->make_work_directory();
  ASSERT_TRUE(ours);
  EXPECT_EQ(store->evict(false)->temporaries_removed, 1U);
  EXPECT_TRUE(std::filesystem::exists(ours.value()));
  files_.set_clock_offset(2 * 3600);
  EXPECT_EQ(store->evict(false)->temporaries_removed, 1U);
  EXPECT_TRUE(std::filesystem::is_empty(inside("t")));
}

TEST_F(EvictionTest, OnlyOneEvictsAtATime) {
  const auto store = open(capped(1 << 30));
  const auto other = open(capped(1 << 30));
  ASSERT_TRUE(publish_kernel(*store, 1));
  const auto lock = FileLock::try_acquire(FileLayer::posix(), -1, inside(kEvictionLock).c_str());
  ASSERT_TRUE(lock) << lock.status().to_string();
  EXPECT_EQ(store->evict(true).code(), StatusCode::kBusy);
  EXPECT_EQ(other->evict(false).code(), StatusCode::kBusy);
}

TEST_F(EvictionTest, PublishersEvictAtMostEveryTenMinutesAllTogether) {
  const auto store = open(capped(0));
  const auto other = open(capped(0));
  ASSERT_TRUE(publish_kernel(*store, 1));
  EXPECT_EQ(store->evict_when_due()->entries_removed, 1U);
  ASSERT_TRUE(publish_kernel(*store, 1));
  EXPECT_EQ(store->evict_when_due().code(), StatusCode::kBusy);
  EXPECT_EQ(other->evict_when_due().code(), StatusCode::kBusy);
  EXPECT_TRUE(check(*store, 1));
  files_.set_clock_offset(599);
  EXPECT_EQ(other->evict_when_due().code(), StatusCode::kBusy);
  files_.set_clock_offset(-600);
  EXPECT_EQ(other->evict_when_due()->entries_removed, 1U) << "a clock that was put back";
  files_.set_clock_offset(601);
  EXPECT_TRUE(store->evict_when_due());
  ASSERT_TRUE(publish_kernel(*store, 1));
  EXPECT_EQ(store->evict_when_due().code(), StatusCode::kBusy);
  EXPECT_TRUE(store->evict(false)) << "an eviction that somebody asks for is not put off";
}

TEST_F(EvictionTest, RunningCodeOutlivesItsFile) {
  const auto store = open(capped(0));
  ASSERT_TRUE(publish_kernel(*store, 77));
  const auto found = store->find(key_of(77));
  const auto path = store->verified_shared_object(found.value(), 0);
  const auto library = SharedLibrary::open(path.value());
  ASSERT_TRUE(library);
  ASSERT_TRUE(store->evict(true));
  ASSERT_FALSE(std::filesystem::exists(path.value()));
  EXPECT_EQ(ask(library.value()), 77U);
}

TEST_F(EvictionTest, DamagedManifestsArePutAsideAndForeignFilesAreLeftAlone) {
  const auto store = open(capped(1 << 30));
  ASSERT_TRUE(publish_kernel(*store, 1));
  ASSERT_TRUE(publish_kernel(*store, 2));
  write_bytes(manifest_path(1), "damage");
  const auto foreign = manifest_path(2).parent_path() / "notes.txt";
  write_bytes(foreign, "not ours");
  ASSERT_TRUE(store->evict(true));
  EXPECT_FALSE(std::filesystem::exists(manifest_path(1)));
  EXPECT_TRUE(std::filesystem::exists(foreign));
  EXPECT_TRUE(check(*store, 2));
}

}  // namespace
}  // namespace eagercache
