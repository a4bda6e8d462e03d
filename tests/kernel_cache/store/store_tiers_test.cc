// Read-only stores, and tiers behind a local one.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/child_process.h"
#include "tests/support/fault_file_layer.h"

namespace eagercache {
namespace {

class TiersTest : public StoreTest {
 protected:
  std::filesystem::path tier_root() const { return directory_.path() / "tier"; }

  StoreOptions tier_options() const {
    StoreOptions result = options();
    result.root = tier_root();
    return result;
  }
  StoreOptions with_tier() const {
    StoreOptions result = options();
    result.tiers = {tier_root()};
    return result;
  }
  StoreOptions read_only_options() {
    StoreOptions result = options();
    result.read_only = true;
    result.files = &files_;
    return result;
  }

  static void take_write_permission(const std::filesystem::path& top) {
    using std::filesystem::perms;
    const perms writing = perms::owner_write | perms::group_write | perms::others_write;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(top)) {
      std::filesystem::permissions(entry.path(), writing, std::filesystem::perm_options::remove);
    }
    std::filesystem::permissions(top, writing, std::filesystem::perm_options::remove);
  }
  static void give_write_permission(const std::filesystem::path& top) {
    using std::filesystem::perms;
    std::filesystem::permissions(top, perms::owner_all, std::filesystem::perm_options::add);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(top)) {
      std::filesystem::permissions(entry.path(), perms::owner_write,
                                   std::filesystem::perm_options::add);
    }
  }

  FaultFileLayer files_;
};

TEST_F(TiersTest, AReadOnlyStoreServesHitsAndChangesNothing) {
  ASSERT_TRUE(publish_kernel(*open(), 1));
  ASSERT_TRUE(publish_kernel(*open(), 2));
  write_bytes(object_path(2), "damaged");
  const auto store = open(read_only_options());
  EXPECT_TRUE(store->read_only());
  EXPECT_EQ(use(*store, 1).value(), 1U);
  EXPECT_EQ(check(*store, 2).code(), StatusCode::kCorrupt);
  EXPECT_EQ(store->find(key_of(2)).code(), StatusCode::kNotFound) << "not blocked";
  EXPECT_EQ(store->find(key_of(3)).code(), StatusCode::kNotFound);
  EXPECT_EQ(publish_kernel(*store, 3).code(), StatusCode::kRefused);
  EXPECT_EQ(store->try_lock(key_of(3)).code(), StatusCode::kRefused);
  EXPECT_EQ(store->make_work_directory().code(), StatusCode::kRefused);
  EXPECT_EQ(store->remove(key_of(1)).code(), StatusCode::kRefused);
  EXPECT_EQ(store->evict(true).code(), StatusCode::kRefused);
  EXPECT_TRUE(store->quarantine(key_of(1), "test"));
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
  EXPECT_EQ(files_.changes(), 0U);
  EXPECT_TRUE(open()->find(key_of(1))) << "another process's view changed";
}

TEST_F(TiersTest, AMissingReadOnlyStoreIsEmptyAndIsNotMade) {
  const auto store = open(read_only_options());
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
  EXPECT_FALSE(std::filesystem::exists(root()));
  EXPECT_EQ(files_.changes(), 0U);
}

TEST_F(TiersTest, AStoreWithoutWritePermissionBecomesReadOnly) {
  ASSERT_TRUE(publish_kernel(*open(), 1));
  take_write_permission(root());
  // Permissions do not bind root; an ordinary user's child does.
  const bool is_root = ::geteuid() == 0;
  if (is_root) {
    for (const auto& path : {directory_.path(), root()}) {
      ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
    }
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root())) {
      ASSERT_EQ(::lchown(entry.path().c_str(), 12345, 12345), 0);
    }
  }
  const std::filesystem::path source = source_of(9);
  EXPECT_EQ(run_in_child([&] {
              if (is_root && (::setgid(12345) != 0 || ::setuid(12345) != 0)) return 1;
              StoreOptions counted = options();
              counted.files = &files_;
              auto opened = DiskStore::open(counted);
              if (!opened || !opened.value()->read_only()) return 2;
              DiskStore& store = *opened.value();
              const auto answer = use(store, 1);
              if (!answer || answer.value() != 1) return 3;
              if (store.find(key_of(9)).code() != StatusCode::kNotFound) return 4;
              const auto published = store.publish(entry_of(9, EntryKind::kKernel),
                                                   {{ObjectKind::kSharedObject, source}});
              if (published) return 5;
              if (files_.changes() != 0) return 7;
              // A new environment cannot even make its folder.
              StoreOptions other = options();
              other.environment = "new";
              auto second = DiskStore::open(other);
              return second && second.value()->read_only() ? 0 : 6;
            }),
            0);
  give_write_permission(root());
}

TEST_F(TiersTest, AHitInATierIsCopiedInAndThenNeedsTheTierNoMore) {
  ASSERT_TRUE(publish_kernel(*open(tier_options()), 1));
  ASSERT_TRUE(open(tier_options())->publish(entry_of(2, EntryKind::kNative), {}));
  ASSERT_TRUE(open(tier_options())->publish(entry_of(3, EntryKind::kFailed), {}));
  const auto store = open(with_tier());
  EXPECT_EQ(use(*store, 1).value(), 1U);
  EXPECT_TRUE(store->find(key_of(2)));
  EXPECT_TRUE(store->find(key_of(3)));
  EXPECT_EQ(store->find(key_of(4)).code(), StatusCode::kNotFound);
  EXPECT_TRUE(std::filesystem::exists(object_path(1)));
  std::filesystem::remove_all(tier_root());
  const auto alone = open();
  EXPECT_EQ(use(*alone, 1).value(), 1U);
  EXPECT_TRUE(alone->find(key_of(2)));
  EXPECT_TRUE(alone->find(key_of(3)));
}

TEST_F(TiersTest, AReadOnlyStoreUsesItsTiersInPlace) {
  ASSERT_TRUE(publish_kernel(*open(tier_options()), 1));
  StoreOptions both = with_tier();
  both.read_only = true;
  both.files = &files_;
  const auto store = open(both);
  EXPECT_EQ(use(*store, 1).value(), 1U);
  EXPECT_EQ(files_.changes(), 0U);
  EXPECT_FALSE(std::filesystem::exists(root()));
}

TEST_F(TiersTest, ATierIsNeverWritten) {
  ASSERT_TRUE(publish_kernel(*open(tier_options()), 1));
  ASSERT_TRUE(publish_kernel(*open(tier_options()), 2));
  const auto damaged = tier_root() / kVersionDirectory /
                       object_file(ObjectKind::kSharedObject, sha256(answer_object(2)));
  write_bytes(damaged, "damaged");
  take_write_permission(tier_root());
  const std::size_t before = count_files(tier_root());
  const auto store = open(with_tier());
  EXPECT_EQ(use(*store, 1).value(), 1U);
  EXPECT_EQ(store->find(key_of(2)).code(), StatusCode::kNotFound);
  EXPECT_EQ(store->find(key_of(2)).code(), StatusCode::kNotFound);
  EXPECT_EQ(count_files(tier_root()), before);
  // The miss is recreated locally, and that is what is used.
  ASSERT_TRUE(publish_kernel(*store, 2));
  EXPECT_EQ(use(*store, 2).value(), 2U);
  give_write_permission(tier_root());
}

TEST_F(TiersTest, AFullLocalDiskUsesTheTierInPlace) {
  ASSERT_TRUE(publish_kernel(*open(tier_options()), 1));
  StoreOptions both = with_tier();
  both.files = &files_;
  const auto store = open(both);
  files_.fail_call_of(FileCall::kWrite, 1, ENOSPC);
  const auto found = store->find(key_of(1));
  ASSERT_TRUE(found) << found.status().to_string();
  EXPECT_TRUE(files_.fault_happened());
  EXPECT_EQ(use(*store, 1).value(), 1U);
}

TEST_F(TiersTest, TiersThatOthersMayWriteAreLeftOutUnlessAllowed) {
  ASSERT_TRUE(publish_kernel(*open(tier_options()), 1));
  ASSERT_EQ(::chmod(tier_root().c_str(), 0777), 0);
  const auto careful = open(with_tier());
  ASSERT_EQ(careful->tier_problems().size(), 1U);
  EXPECT_EQ(careful->tier_problems()[0].code(), StatusCode::kRefused);
  EXPECT_NE(careful->tier_problems()[0].message().find(tier_root().native()), std::string::npos);
  EXPECT_EQ(careful->find(key_of(1)).code(), StatusCode::kNotFound);

  StoreOptions trusting = with_tier();
  trusting.allow_untrusted = true;
  const auto store = open(trusting);
  EXPECT_TRUE(store->tier_problems().empty());
  EXPECT_EQ(store->untrusted_roots(), std::vector{tier_root()});
  EXPECT_EQ(use(*store, 1).value(), 1U);
}

TEST_F(TiersTest, WhatOthersMayWriteIsLoadedFromASealedCopy) {
  ASSERT_TRUE(publish_kernel(*open(), 1));
  ASSERT_EQ(::chmod(root().c_str(), 0777), 0);
  StoreOptions trusting = options();
  trusting.allow_untrusted = true;
  const auto store = open(trusting);
  EXPECT_EQ(store->untrusted_roots(), std::vector{root()});
  const auto found = store->find(key_of(1));
  ASSERT_TRUE(found);
  const auto path = store->verified_shared_object(found.value(), 0);
  ASSERT_TRUE(path) << path.status().to_string();
  EXPECT_TRUE(path->native().starts_with("/proc/self/fd/")) << path.value();
  EXPECT_EQ(store->verified_shared_object(found.value(), 0).value(), path.value());
  // The other user strikes between the check and the load.
  write_bytes(object_path(1), answer_object(666));
  const auto library = SharedLibrary::open(path.value());
  ASSERT_TRUE(library) << library.status().to_string();
  EXPECT_EQ(ask(library.value()), 1U);
}

}  // namespace
}  // namespace eagercache
