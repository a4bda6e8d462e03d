// A publish that stops after any of its calls, and a publish or a use in which any one call fails.
#include <array>
#include <cerrno>

#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/crash_file_layer.h"
#include "tests/support/fault_file_layer.h"
#include "tests/support/sweep.h"

namespace eagercache {
namespace {

class CrashTest : public StoreTest {
 protected:
  CrashTest() { healthy_.set_sync_enabled(false); }

  StoreOptions fast_options() {
    StoreOptions result = options();
    result.files = &healthy_;
    return result;
  }

  // What a survivor finds: nothing or everything. Then the key must be usable again, and one
  // clean-up must leave no temporary file.
  void expect_miss_or_complete_hit(const std::string& what) {
    const auto store = open(fast_options());
    ASSERT_NE(store, nullptr) << what;
    const auto found = store->find(key_of(1));
    if (found) {
      const auto answer = check(*store, 1);
      // A manifest whose object was lost or cut is found out here, and is a miss from then on.
      if (!answer) {
        ASSERT_TRUE(answer.code() == StatusCode::kCorrupt || answer.code() == StatusCode::kNotFound)
            << what << ": " << answer.to_string();
        ASSERT_FALSE(honest_) << what << ": a flushed entry was incomplete";
        ASSERT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound) << what;
      }
    } else {
      ASSERT_EQ(found.code(), StatusCode::kNotFound) << what << ": " << found.status().to_string();
    }
    const auto published = publish_kernel(*store, 1);
    ASSERT_TRUE(published) << what << ": " << published.status().to_string();
    ASSERT_TRUE(check(*store, 1)) << what;
    // An hour later, when files of unknown makers may go.
    FaultFileLayer later;
    later.set_sync_enabled(false);
    later.set_clock_offset(2 * 3600);
    StoreOptions cleaning = options();
    cleaning.files = &later;
    ASSERT_TRUE(open(cleaning)->evict(false)) << what;
    ASSERT_EQ(count_files(inside("t")), 0U) << what;
    ASSERT_TRUE(check(*store, 1)) << what;
  }

  // Calls that one publish makes into a store that is open already.
  void crash_everywhere(bool honest) {
    honest_ = honest;
    std::uint64_t hits = 0;
    for (const CrashLoss loss : {CrashLoss::kNothing, CrashLoss::kDataZeroed, CrashLoss::kDataCut,
                                 CrashLoss::kNamesLost, CrashLoss::kEverything}) {
      for (std::uint64_t stop = 1;; ++stop) {
        std::filesystem::remove_all(root());
        CrashFileLayer files(honest);
        StoreOptions crashing = options();
        crashing.files = &files;
        bool complete = false;
        {
          const auto store = open(crashing);
          ASSERT_NE(store, nullptr);
          files.stop_before_call(stop);
          const bool published = publish_kernel(*store, 1).is_ok();
          complete = !files.fault_happened();
          ASSERT_TRUE(published || !complete);
          // The process is dead: what its destructors would do is not done either.
        }
        files.lose(loss);
        const std::string what = "stopped before call " + std::to_string(stop) + ", loss " +
                                 std::to_string(static_cast<int>(loss)) +
                                 (honest ? "" : ", lying disk");
        expect_miss_or_complete_hit(what);
        if (HasFatalFailure()) return;
        if (complete) {
          ++hits;
          ASSERT_GT(stop, 15U) << "a publish is more than this";
          break;
        }
        ASSERT_LT(stop, 200U);
      }
    }
    EXPECT_EQ(hits, 5U);
  }

  FaultFileLayer healthy_;  // and in no hurry to flush
  bool honest_ = true;
};

TEST_F(CrashTest, EveryPrefixOfAPublishLeavesAMissOrACompleteHit) { crash_everywhere(true); }

TEST_F(CrashTest, ADiskThatLiesAboutFlushingIsFoundOut) { crash_everywhere(false); }

// The simulation must be able to break a store, or the tests above show nothing.
TEST_F(CrashTest, TheSimulatedPowerFailureDoesDamageUnflushedFiles) {
  for (const CrashLoss loss : {CrashLoss::kDataZeroed, CrashLoss::kDataCut}) {
    std::filesystem::remove_all(root());
    CrashFileLayer files(/*honest_sync=*/false);
    StoreOptions crashing = options();
    crashing.files = &files;
    ASSERT_TRUE(publish_kernel(*open(crashing), 1));
    files.lose(loss);
    EXPECT_NE(read_bytes(object_path(1)), answer_object(1));
    EXPECT_FALSE(check(*open(), 1));
  }
}

TEST_F(CrashTest, EveryPrefixOfOpeningANewStoreLeavesAStoreThatOpens) {
  for (std::uint64_t stop = 1; stop < 500; ++stop) {
    std::filesystem::remove_all(root());
    FaultFileLayer files;
    files.set_sync_enabled(false);
    files.stop_before_call(stop);
    StoreOptions crashing = options();
    crashing.files = &files;
    const bool opened = DiskStore::open(crashing).is_ok();
    const bool complete = !files.fault_happened();
    const auto survivor = open(fast_options());
    ASSERT_NE(survivor, nullptr) << stop;
    ASSERT_TRUE(publish_kernel(*survivor, 1)) << stop;
    ASSERT_TRUE(check(*survivor, 1)) << stop;
    if (complete) {
      EXPECT_TRUE(opened);
      EXPECT_GT(stop, 20U);
      return;
    }
  }
  FAIL() << "opening never ended";
}

constexpr std::array kErrors{ENOSPC, EDQUOT, EIO,   EMFILE, ENFILE, ENOMEM, EROFS,
                             EACCES, ESTALE, EINTR, EBUSY,  ENOENT, EPERM};

// A story of the store's calls, each of whose answers must be right or an error.
class FaultTest : public CrashTest {
 protected:
  void run_story(FaultFileLayer& files) {
    StoreOptions faulty = options();
    faulty.files = &files;
    auto opened = DiskStore::open(faulty);
    if (!opened) return;
    DiskStore& store = *opened.value();
    {
      const auto lock = store.try_lock(key_of(1));
      const auto published = publish_kernel(store, 1);
      if (published) {
        EXPECT_EQ(published->key, key_of(1));
      }
    }
    const auto found = store.find(key_of(1));
    if (found) {
      EXPECT_EQ(found->facts.at("number"), "1");
      const auto bytes = store.read_object(found.value(), 0);
      if (bytes) {
        EXPECT_EQ(bytes.value(), answer_object(1));
      }
      (void)store.verified_shared_object(found.value(), 0).is_ok();
    }
    (void)store.find(key_of(2)).is_ok();
    (void)store.publish(entry_of(3, EntryKind::kFailed), {}).is_ok();
    (void)store.find(key_of(3)).is_ok();
    (void)store.publish(entry_of(3, EntryKind::kNative), {}).is_ok();
    (void)store.make_work_directory().is_ok();
    (void)store.for_each(true, [](const EntryInfo&) {}).is_ok();
    (void)store.quarantine(key_of(3), "test").is_ok();
    (void)store.evict(true).is_ok();
    (void)store.remove(key_of(1)).is_ok();
  }

  static std::size_t open_descriptors() {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      ++count;
    }
    return count;
  }

  void fail_every_call_with(int error) {
    const std::size_t descriptors = open_descriptors();
    // Under a sanitizer other calls for each error.
    const std::size_t step = sweep_step(5);
    for (std::uint64_t n = 1 + static_cast<std::size_t>(error) % step;; n += step) {
      std::filesystem::remove_all(root());
      FaultFileLayer files;
      files.set_sync_enabled(false);
      files.fail_call(n, error);
      run_story(files);
      ASSERT_EQ(open_descriptors(), descriptors) << "errno " << error << " at call " << n;
      if (!files.fault_happened()) {
        EXPECT_GT(n, 100U) << "the story is longer than this";
        return;
      }
      // Nothing that happened may stand in the way of a healthy process.
      const auto store = open(fast_options());
      ASSERT_NE(store, nullptr) << "errno " << error << " at call " << n;
      const auto published = publish_kernel(*store, 1);
      ASSERT_TRUE(published) << published.status().to_string() << " after errno " << error
                             << " at call " << n;
      ASSERT_TRUE(check(*store, 1)) << "errno " << error << " at call " << n;
      ASSERT_EQ(store->quarantined(), 0U) << "errno " << error << " at call " << n;
    }
  }
};

class EveryErrorTest : public FaultTest, public testing::WithParamInterface<int> {};

TEST_P(EveryErrorTest, AtAnyCallIsAnErrorOrARightAnswer) { fail_every_call_with(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Errno, EveryErrorTest, testing::ValuesIn(kErrors));

TEST_F(FaultTest, AFullDiskLeavesNoTemporaryFileAndSaysFull) {
  FaultFileLayer files;
  StoreOptions faulty = options();
  faulty.files = &files;
  const auto store = open(faulty);
  files.fail_call_of(FileCall::kWrite, 1, ENOSPC);
  EXPECT_EQ(publish_kernel(*store, 1).code(), StatusCode::kFull);
  EXPECT_EQ(count_files(inside("t")), 0U);
  EXPECT_TRUE(publish_kernel(*store, 1));
}

TEST_F(FaultTest, AFullDeviceEvictsOldEntriesOnceAndPublishes) {
  FaultFileLayer files;
  StoreOptions faulty = options();
  faulty.files = &files;
  const auto store = open(faulty);
  for (std::uint64_t n = 1; n <= 5; ++n) ASSERT_TRUE(publish_kernel(*store, n));
  files.fail_call_of(FileCall::kWrite, 1, ENOSPC);
  EXPECT_TRUE(publish_kernel(*store, 6));
  EXPECT_TRUE(check(*store, 6));
  EXPECT_LT(count_files(inside("o")), 6U);
}

TEST_F(FaultTest, FileSystemsWithoutHardLinksAreServedByRename) {
  for (const int error : {EPERM, EOPNOTSUPP, EMLINK}) {
    std::filesystem::remove_all(root());
    FaultFileLayer files;
    StoreOptions faulty = options();
    faulty.files = &files;
    const auto store = open(faulty);
    for (std::uint64_t link = 1; link <= 2; ++link) {
      files.fail_call_of(FileCall::kLink, link, error);
      ASSERT_TRUE(publish_kernel(*store, link));
      EXPECT_TRUE(files.fault_happened());
      EXPECT_TRUE(check(*store, link));
    }
  }
}

}  // namespace
}  // namespace eagercache
