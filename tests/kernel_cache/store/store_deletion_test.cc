// Somebody deletes the store, or a part of it, at every single moment of an operation. The
// operation may miss; whoever comes next finds a store that works.
#include <functional>
#include <random>

#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/fault_file_layer.h"
#include "tests/support/sweep.h"

namespace eagercache {
namespace {

class DeletionTest : public StoreTest {
 protected:
  DeletionTest() {
    files_.set_sync_enabled(false);
    for (std::uint64_t n = 1; n <= 4; ++n) sources_.push_back(source_of(n));
  }

  StoreOptions fast_options() {
    StoreOptions result = options();
    result.files = &files_;
    return result;
  }

  Status publish(DiskStore& store, std::uint64_t n) {
    return store
        .publish(entry_of(n, EntryKind::kKernel), {{ObjectKind::kSharedObject, sources_[n - 1]}})
        .status();
  }

  // What a deletion that is under way, or was interrupted, may have removed so far.
  std::vector<std::filesystem::path> parts() const {
    return {root(),
            inside(""),
            inside("o"),
            inside("t"),
            inside("l"),
            inside("q"),
            inside(environment()),
            inside(environment() + "/m"),
            inside(environment() + "/n"),
            inside(environment() + "/a"),
            inside(environment_file(environment())),
            root() / kFormatFile,
            manifest_path(1).parent_path(),
            manifest_path(1),
            object_path(1).parent_path(),
            object_path(1)};
  }

  // Nothing that was deleted stands in the way of anybody, in this process or the next.
  void expect_usable(DiskStore& store, const std::string& what) {
    files_.clear_faults();
    for (const std::uint64_t n : {1, 2, 3}) {
      const Status published = publish(store, n);
      ASSERT_TRUE(published) << what << ": " << published.to_string();
      const Status checked = check(store, n);
      ASSERT_TRUE(checked) << what << ": " << checked.to_string();
    }
    const auto other = open(fast_options());
    ASSERT_NE(other, nullptr) << what;
    ASSERT_FALSE(other->read_only()) << what;
    for (const std::uint64_t n : {1, 2, 3}) ASSERT_TRUE(check(*other, n)) << what;
    ASSERT_TRUE(store.try_lock(key_of(1))) << what;
    ASSERT_TRUE(store.evict(false)) << what;
    ASSERT_EQ(count_files(inside("t")), 0U) << what;
  }

  // `interfere(part)` before every call of `operation` in turn, on a store with key 1 in it.
  void interfere_everywhere(
      const std::function<void(DiskStore&, const std::filesystem::path&)>& interfere,
      const std::function<Status(DiskStore&)>& operation) {
    std::size_t first = 0;
    for (const std::filesystem::path& part : parts()) {
      for (std::uint64_t call = 1 + first++ % kStep;; call += kStep) {
        const std::string what = "before call " + std::to_string(call) + ": " + part.native();
        files_.clear_faults();
        std::filesystem::remove_all(root());
        const auto store = open(fast_options());
        ASSERT_NE(store, nullptr);
        ASSERT_TRUE(publish(*store, 1));
        files_.before_call(call, [&] { interfere(*store, part); });
        const Status status = operation(*store);
        const bool interfered = files_.fault_happened();
        ASSERT_TRUE(status.is_ok() || status.code() == StatusCode::kNotFound)
            << what << ": " << status.to_string();
        expect_usable(*store, what);
        if (HasFatalFailure()) return;
        if (!interfered) {
          ASSERT_GT(call, 3U) << "the operation makes more calls than this";
          break;
        }
      }
    }
  }

  // With another first call for each part, all are met.
  const std::size_t kStep = sweep_step(5);
  FaultFileLayer files_;
  std::vector<std::filesystem::path> sources_;
};

void remove(DiskStore&, const std::filesystem::path& part) { std::filesystem::remove_all(part); }

TEST_F(DeletionTest, AtAnyMomentOfAPublishTheStoreStaysUsable) {
  interfere_everywhere(remove, [&](DiskStore& store) { return publish(store, 2); });
}

TEST_F(DeletionTest, AtAnyMomentOfAUseIsAMissOrARightAnswer) {
  interfere_everywhere(remove, [&](DiskStore& store) { return check(store, 1); });
}

TEST_F(DeletionTest, AtAnyMomentOfAnEvictionTheStoreStaysUsable) {
  interfere_everywhere(remove, [&](DiskStore& store) { return store.evict(true).status(); });
}

// Another thread of this process publishes into a store that was deleted; ours goes on with what it
// knew of the old one.
TEST_F(DeletionTest, WithAnotherPublisherInBetweenTheStoreStaysUsable) {
  const auto remove_and_publish = [&](DiskStore& store, const std::filesystem::path& part) {
    std::filesystem::remove_all(part);
    ASSERT_TRUE(publish(store, 3));
  };
  interfere_everywhere(remove_and_publish, [&](DiskStore& store) { return publish(store, 2); });
}

TEST_F(DeletionTest, AtAnyMomentOfOpeningTheStoreIsNeitherLostNorReadOnly) {
  std::size_t first = 0;
  for (const bool filled : {false, true}) {
    for (const std::filesystem::path& part : parts()) {
      for (std::uint64_t call = 1 + first++ % kStep;; call += kStep) {
        const std::string what = "before call " + std::to_string(call) + ": " + part.native();
        files_.clear_faults();
        std::filesystem::remove_all(root());
        if (filled) {
          ASSERT_TRUE(publish(*open(fast_options()), 1));
        }
        files_.before_call(call, [&] { std::filesystem::remove_all(part); });
        const auto store = DiskStore::open(fast_options());
        const bool interfered = files_.fault_happened();
        ASSERT_TRUE(store) << what << ": " << store.status().to_string();
        ASSERT_FALSE(store.value()->read_only()) << what;
        expect_usable(*store.value(), what);
        if (HasFatalFailure()) return;
        if (!interfered) break;
      }
    }
  }
}

// Several deletions within one operation, each of any part, some with a publish by another thread.
TEST_F(DeletionTest, AtSeveralMomentsOfOneOperationTheStoreStaysUsable) {
  constexpr unsigned int kSeed = 3;
  std::mt19937 random(kSeed);
  const std::vector<std::filesystem::path> all = parts();
  for (std::size_t round = 0; round < 1500; round += kStep) {
    files_.clear_faults();
    std::filesystem::remove_all(root());
    const auto store = open(fast_options());
    ASSERT_TRUE(publish(*store, 1));
    int left = 4;
    std::function<void()> interfere = [&] {
      std::filesystem::remove_all(all[random() % all.size()]);
      if (random() % 3 == 0) (void)publish(*store, 3).is_ok();
      if (--left > 0) files_.before_call(1 + random() % 20, interfere);
    };
    files_.before_call(1 + random() % 30, interfere);
    const Status status = publish(*store, 2);
    const std::string what = "seed " + std::to_string(kSeed) + ", round " + std::to_string(round);
    ASSERT_TRUE(status.is_ok() || status.code() == StatusCode::kNotFound)
        << what << ": " << status.to_string();
    expect_usable(*store, what);
    if (HasFatalFailure()) return;
  }
}

// A deletion that met somebody who was making the folders anew leaves any of them missing, and the
// others there. What asks for a compile publishes nothing before it has a lock and a place to work.
TEST_F(DeletionTest, WhateverFolderIsMissingKernelsCanBeCompiled) {
  for (const std::filesystem::path& part : parts()) {
    std::filesystem::remove_all(root());
    const auto store = open(fast_options());
    ASSERT_TRUE(publish(*store, 1));
    std::filesystem::remove_all(part);
    EXPECT_TRUE(store->evict(true)) << part;
    std::filesystem::remove_all(part);
    EXPECT_TRUE(store->check_attempts(key_of(2))) << part;
    EXPECT_NE(count_files(inside(environment() + "/a")), 0U) << part;
    std::filesystem::remove_all(part);
    EXPECT_TRUE(store->try_lock(key_of(2))) << part;
    std::filesystem::remove_all(part);
    EXPECT_TRUE(store->make_work_directory()) << part;
  }
}

// Damage is put aside, and where there is nowhere to put it, removed: it must not stay.
TEST_F(DeletionTest, DamageIsMendedThoughTheQuarantineFolderIsGone) {
  const auto store = open(fast_options());
  ASSERT_TRUE(publish(*store, 1));
  std::filesystem::remove_all(inside("q"));
  write_bytes(object_path(1), std::string(answer_object(1).size(), 'x'));
  EXPECT_EQ(check(*store, 1).code(), StatusCode::kCorrupt);
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
  ASSERT_TRUE(publish(*store, 1));
  EXPECT_TRUE(check(*store, 1));
}

}  // namespace
}  // namespace eagercache
