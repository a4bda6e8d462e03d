// Bit rot, truncation, and foreign content: rejected before anything is loaded, put aside, and made
// anew by the next publish.
#include <random>

#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/fault_file_layer.h"
#include "tests/support/sweep.h"

namespace eagercache {
namespace {

class DamageTest : public StoreTest {
 protected:
  DamageTest() {
    files_.set_sync_enabled(false);  // thousands of publishes; no power fails here
    StoreOptions fast = options();
    fast.files = &files_;
    store_ = open(fast);
    good_ = answer_object(1);
    source_ = source_of(1);
    restore();
  }

  void restore() {
    const auto published =
        store_->publish(entry_of(1, EntryKind::kKernel), {{ObjectKind::kSharedObject, source_}});
    ASSERT_TRUE(published) << published.status().to_string();
  }

  // Plants `content` in place of the object and goes through the whole life of the damage.
  void expect_rejected_and_recreated(const std::string& content, const std::string& what) {
    write_bytes(object_path(1), content);
    const auto found = store_->find(key_of(1));
    ASSERT_TRUE(found) << what;
    const std::uint64_t before = store_->quarantined();
    const auto path = store_->verified_shared_object(found.value(), 0);
    ASSERT_EQ(path.code(), StatusCode::kCorrupt) << what;
    ASSERT_EQ(store_->quarantined(), before + 1) << what;
    ASSERT_EQ(store_->find(key_of(1)).code(), StatusCode::kNotFound) << what;
    ASSERT_FALSE(std::filesystem::exists(object_path(1))) << what;
    restore();
    ASSERT_TRUE(check(*store_, 1)) << what;
  }

  FaultFileLayer files_;
  std::unique_ptr<DiskStore> store_;
  std::string good_;
  std::filesystem::path source_;
};

TEST_F(DamageTest, AFlipInAnyByteOfAnObjectIsRejectedAndTheObjectMadeAnew) {
  ASSERT_LE(good_.size(), 64U * 1024);
  const std::size_t step = sweep_step(23);
  for (std::size_t byte = 0; byte < good_.size(); byte += step) {
    std::string damaged = good_;
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << (byte % 8)));
    expect_rejected_and_recreated(damaged, "byte " + std::to_string(byte));
    if (HasFatalFailure()) return;
  }
  EXPECT_LE(count_files(inside("q")), 64U);
}

TEST_F(DamageTest, TruncatedAndExtendedObjectsAreRejected) {
  constexpr unsigned int kSeed = 11;
  std::mt19937_64 random(kSeed);
  std::vector<std::size_t> lengths{0, 1, good_.size() - 1};
  for (std::size_t page = 4096; page < good_.size(); page += 4096) {
    lengths.insert(lengths.end(), {page - 1, page, page + 1});
  }
  const std::size_t step = sweep_step(5);
  for (std::size_t i = 0; i < 500; i += step) lengths.push_back(random() % good_.size());
  for (const std::size_t length : lengths) {
    expect_rejected_and_recreated(good_.substr(0, length), "length " + std::to_string(length));
    if (HasFatalFailure()) return;
  }
  expect_rejected_and_recreated(good_ + '\0', "one byte more");
  expect_rejected_and_recreated(answer_object(2), "another intact object");
}

TEST_F(DamageTest, AFlipOfAnyBitOfAManifestIsAMissAndIsMadeAnew) {
  const std::string good = read_bytes(manifest_path(1));
  const std::size_t step = sweep_step(7);
  std::size_t flips = 0;
  for (std::size_t bit = 0; bit < 8 * good.size(); bit += step, ++flips) {
    std::string damaged = good;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    write_bytes(manifest_path(1), damaged);
    ASSERT_EQ(store_->find(key_of(1)).code(), StatusCode::kNotFound) << bit;
    ASSERT_FALSE(std::filesystem::exists(manifest_path(1))) << bit;
    restore();
    ASSERT_EQ(read_bytes(manifest_path(1)), good);
  }
  EXPECT_EQ(store_->quarantined(), flips);
}

TEST_F(DamageTest, EveryLengthOfAManifestIsAMiss) {
  const std::string good = read_bytes(manifest_path(1));
  for (std::size_t length = 0; length < good.size(); ++length) {
    write_bytes(manifest_path(1), good.substr(0, length));
    ASSERT_EQ(store_->find(key_of(1)).code(), StatusCode::kNotFound) << length;
  }
  write_bytes(manifest_path(1), good + std::string(kMaxManifestBytes, ' '));
  EXPECT_EQ(store_->find(key_of(1)).code(), StatusCode::kNotFound);
}

TEST_F(DamageTest, AnotherKeysManifestIsDamage) {
  ASSERT_TRUE(publish_kernel(*store_, 2));
  write_bytes(manifest_path(1), read_bytes(manifest_path(2)));
  EXPECT_EQ(store_->find(key_of(1)).code(), StatusCode::kNotFound);
  EXPECT_EQ(store_->quarantined(), 1U);
  EXPECT_TRUE(check(*store_, 2));
}

// Two builds of the plug-in, or two versions of torch, have different texts. What is copied from
// one folder to the other is not loaded.
TEST_F(DamageTest, AnotherEnvironmentsManifestIsDamage) {
  StoreOptions other = options();
  other.environment = "torch: 2.15.0\ncompiler: fake 1\n";
  const auto stranger = open(other);
  const auto theirs = inside(manifest_file(environment_id_of(other.environment), key_of(1)));
  EXPECT_EQ(stranger->find(key_of(1)).code(), StatusCode::kNotFound);
  std::filesystem::create_directories(theirs.parent_path());
  std::filesystem::copy_file(manifest_path(1), theirs);
  EXPECT_EQ(stranger->find(key_of(1)).code(), StatusCode::kNotFound);
  EXPECT_EQ(stranger->quarantined(), 1U);
  EXPECT_FALSE(std::filesystem::exists(theirs));
  EXPECT_TRUE(check(*store_, 1));
}

TEST_F(DamageTest, AManifestOfALaterFormatIsAMissAndIsReplacedOnlyByAPublish) {
  std::string body = read_bytes(manifest_path(1));
  body.resize(body.rfind("digest "));
  body.replace(0, 21, "eagercache-manifest 3");
  const std::string later = body + "digest " + sha256(body).hex() + "\n";
  write_bytes(manifest_path(1), later);
  EXPECT_EQ(store_->find(key_of(1)).code(), StatusCode::kNotFound);
  EXPECT_EQ(read_bytes(manifest_path(1)), later);
  EXPECT_EQ(store_->quarantined(), 0U);
  restore();
  EXPECT_TRUE(check(*store_, 1));
}

TEST_F(DamageTest, ALostObjectMakesItsEntryAMiss) {
  std::filesystem::remove(object_path(1));
  EXPECT_EQ(check(*store_, 1).code(), StatusCode::kNotFound);
  EXPECT_EQ(store_->find(key_of(1)).code(), StatusCode::kNotFound);
  restore();
  EXPECT_TRUE(check(*store_, 1));
}

TEST_F(DamageTest, APublishMendsAnEntryWhoseObjectIsLostOrCut) {
  std::filesystem::remove(object_path(1));
  restore();
  EXPECT_TRUE(check(*store_, 1));
  write_bytes(object_path(1), good_.substr(0, 100));
  restore();
  EXPECT_TRUE(check(*store_, 1));
}

TEST_F(DamageTest, APublishMendsAnObjectThatAnotherKeyLeftDamaged) {
  write_bytes(object_path(1), std::string(good_.size(), 'x'));
  const auto published =
      store_->publish(entry_of(2, EntryKind::kKernel), {{ObjectKind::kSharedObject, source_}});
  ASSERT_TRUE(published);
  EXPECT_TRUE(check(*store_, 2));
  EXPECT_TRUE(check(*store_, 1));
}

TEST_F(DamageTest, ADamagedEnvironmentTextIsWrittenAnew) {
  const auto path = inside(environment_file(environment()));
  write_bytes(path, "nonsense");
  open();
  EXPECT_EQ(read_bytes(path), options().environment);
}

TEST_F(DamageTest, AnEntryPutAsideByHandIsAMissWithItsReasonKept) {
  ASSERT_TRUE(store_->quarantine(key_of(1), "answers wrongly"));
  EXPECT_EQ(store_->find(key_of(1)).code(), StatusCode::kNotFound);
  EXPECT_EQ(store_->quarantine(key_of(1), "again").code(), StatusCode::kNotFound);
  std::string reason;
  for (const auto& entry : std::filesystem::directory_iterator(inside("q"))) {
    if (entry.path().extension() == ".reason") reason = read_bytes(entry.path());
  }
  EXPECT_EQ(reason, "answers wrongly");
  restore();
  EXPECT_TRUE(check(*store_, 1));
}

TEST_F(DamageTest, QuarantineIsBoundedInNumberAndAge) {
  for (int i = 0; i < 100; ++i) {
    write_bytes(manifest_path(1), "damage");
    EXPECT_FALSE(store_->find(key_of(1)));
  }
  EXPECT_EQ(count_files(inside("q")), 64U);
  files_.set_clock_offset(8LL * 24 * 3600);
  ASSERT_TRUE(store_->evict(false));
  EXPECT_EQ(count_files(inside("q")), 0U);
}

}  // namespace
}  // namespace eagercache
