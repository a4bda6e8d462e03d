// Failures: how long they stand, and what replaces them.
#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/fault_file_layer.h"

namespace eagercache {
namespace {

class NegativeTest : public StoreTest {
 protected:
  std::unique_ptr<DiskStore> open_with_clock() {
    StoreOptions clocked = options();
    clocked.files = &files_;
    return open(clocked);
  }

  Manifest transient(std::uint64_t n, std::int64_t seconds) {
    Manifest manifest = entry_of(n, EntryKind::kFailed);
    manifest.failure = FailureClass::kTransient;
    manifest.retry_after = files_.now() + seconds;
    manifest.facts["reason"] = "time limit";
    return manifest;
  }

  FaultFileLayer files_;
};

TEST_F(NegativeTest, ADeterministicFailureStands) {
  const auto store = open_with_clock();
  Manifest failure = entry_of(1, EntryKind::kFailed);
  failure.facts["reason"] = "error: no such intrinsic";
  const auto published = store->publish(failure, {});
  ASSERT_TRUE(published);
  files_.set_clock_offset(100LL * 24 * 3600);
  const auto found = store->find(key_of(1));
  ASSERT_TRUE(found);
  EXPECT_EQ(found.value(), published.value());
  EXPECT_EQ(found->facts, failure.facts);
}

TEST_F(NegativeTest, ATransientFailureEndsAtItsTime) {
  const auto store = open_with_clock();
  ASSERT_TRUE(store->publish(transient(1, 600), {}));
  EXPECT_EQ(store->find(key_of(1))->kind, EntryKind::kFailed);
  files_.set_clock_offset(500);
  EXPECT_TRUE(store->find(key_of(1)));
  files_.set_clock_offset(601);
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
}

TEST_F(NegativeTest, AStandingFailureIsNotReplacedAndAnEndedOneIs) {
  const auto store = open_with_clock();
  const auto first = store->publish(transient(1, 600), {});
  ASSERT_TRUE(first);
  EXPECT_EQ(store->publish(transient(1, 1200), {}).value(), first.value());
  files_.set_clock_offset(700);
  const Manifest later = transient(1, 600);
  EXPECT_EQ(store->publish(later, {})->retry_after, later.retry_after);
  EXPECT_EQ(store->find(key_of(1))->retry_after, later.retry_after);
}

TEST_F(NegativeTest, ALaterKernelOrDecisionReplacesAFailureForGood) {
  const auto store = open_with_clock();
  for (const std::uint64_t n : {1, 2}) {
    ASSERT_TRUE(store->publish(entry_of(n, EntryKind::kFailed), {}));
  }
  ASSERT_TRUE(publish_kernel(*store, 1));
  ASSERT_TRUE(store->publish(entry_of(2, EntryKind::kNative), {}));
  EXPECT_EQ(use(*store, 1).value(), 1U);
  EXPECT_EQ(store->find(key_of(2))->kind, EntryKind::kNative);
  EXPECT_EQ(count_files(inside(environment() + "/n")), 0U);
  // And a failure never replaces a kernel.
  EXPECT_EQ(store->publish(entry_of(1, EntryKind::kFailed), {})->kind, EntryKind::kKernel);
  EXPECT_EQ(use(*store, 1).value(), 1U);
}

TEST_F(NegativeTest, AClockThatWasWrongDoesNotBlockAKeyForever) {
  const auto store = open_with_clock();
  files_.set_clock_offset(10LL * 365 * 24 * 3600);
  ASSERT_TRUE(store->publish(transient(1, 3600), {}));
  EXPECT_TRUE(store->find(key_of(1)));
  files_.set_clock_offset(0);
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
}

TEST_F(NegativeTest, RemovingAnEntryRemovesItsFailureToo) {
  const auto store = open_with_clock();
  ASSERT_TRUE(store->publish(entry_of(1, EntryKind::kFailed), {}));
  ASSERT_TRUE(store->remove(key_of(1)));
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
}

TEST_F(NegativeTest, ADamagedFailureIsAMissAndIsReplaced) {
  const auto store = open_with_clock();
  ASSERT_TRUE(store->publish(entry_of(1, EntryKind::kFailed), {}));
  write_bytes(inside(failure_file(environment(), key_of(1))), "damage");
  EXPECT_EQ(store->find(key_of(1)).code(), StatusCode::kNotFound);
  EXPECT_EQ(store->quarantined(), 1U);
  ASSERT_TRUE(store->publish(entry_of(1, EntryKind::kFailed), {}));
  EXPECT_TRUE(store->find(key_of(1)));
}

}  // namespace
}  // namespace eagercache
