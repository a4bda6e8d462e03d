// Bundles: what was written comes back whole; what is altered, cut off, of another signer or not
// consistent is refused before anything is in a store.

#include "kernel_cache/store/bundle.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>

#include "kernel_cache/store/withdrawal.h"
#include "tests/kernel_cache/store_fixture.h"

namespace eagercache {
namespace {

class BundleTest : public StoreTest {
 protected:
  BundleTest() {
    EXPECT_TRUE(SigningKey::make(at("own.pem"), at("own.pub")));
    EXPECT_TRUE(SigningKey::make(at("other.pem"), at("other.pub")));
  }

  std::filesystem::path at(const std::string& name) const { return directory_.path() / name; }
  SigningRules trusted() const {
    SigningRules rules;
    rules.trusted = {read_public_key(at("own.pub")).value()};
    return rules;
  }

  // Two kernels that share nothing, a decision, and a failure, which no bundle takes.
  std::unique_ptr<DiskStore> filled() const {
    std::unique_ptr<DiskStore> store = open();
    EXPECT_TRUE(publish_kernel(*store, 1));
    EXPECT_TRUE(publish_kernel(*store, 2));
    EXPECT_TRUE(store->publish(entry_of(3, EntryKind::kNative), {}));
    EXPECT_TRUE(store->publish(entry_of(4, EntryKind::kFailed), {}));
    return store;
  }

  Result<BundleCounts> write(DiskStore& store, const std::string& key = "own.pem",
                             const Validity& validity = {}) const {
    return write_bundle(at("bundle"), store, options().environment,
                        SigningKey::read(at(key)).value(), validity);
  }

  std::unique_ptr<DiskStore> open_elsewhere() const {
    StoreOptions other = options();
    other.root = directory_.path() / "elsewhere";
    other.environment = "torch: 2.11.0\ncompiler: none\n";
    return StoreTest::open(other);
  }

  std::string bytes() const {
    std::ostringstream text;
    text << std::ifstream(at("bundle"), std::ios::binary).rdbuf();
    return text.str();
  }
  void replace(const std::string& content) const { write_bytes(at("bundle"), content); }
};

TEST_F(BundleTest, WhatIsWrittenIsReadAndImportedUnderAnotherEnvironment) {
  std::unique_ptr<DiskStore> store = filled();
  const Result<BundleCounts> written = write(*store);
  ASSERT_TRUE(written) << written.status().to_string();
  EXPECT_EQ(written->kernels, 2U);
  EXPECT_EQ(written->decisions, 1U);
  EXPECT_EQ(written->bytes, std::filesystem::file_size(at("bundle")));

  Result<Bundle> bundle = read_bundle(at("bundle"), trusted());
  ASSERT_TRUE(bundle) << bundle.status().to_string();
  EXPECT_EQ(bundle->environment, options().environment);
  EXPECT_EQ(bundle->signer, trusted().trusted.front());
  EXPECT_EQ(bundle->digest, written->digest);
  EXPECT_EQ(bundle->validity.expires, 0);
  EXPECT_EQ(bundle->manifests.size(), 3U);

  std::unique_ptr<DiskStore> elsewhere = open_elsewhere();
  const Result<BundleCounts> imported = import_bundle(bundle.value(), *elsewhere);
  ASSERT_TRUE(imported) << imported.status().to_string();
  EXPECT_EQ(imported->present, 0U);
  EXPECT_EQ(use(*elsewhere, 1).value(), 1U);
  EXPECT_EQ(use(*elsewhere, 2).value(), 2U);
  EXPECT_EQ(elsewhere->find(key_of(3)).value().kind, EntryKind::kNative);
  EXPECT_EQ(elsewhere->find(key_of(3)).value().facts.at("number"), "3");
  EXPECT_EQ(elsewhere->find(key_of(4)).code(), StatusCode::kNotFound);
  EXPECT_EQ(import_bundle(bundle.value(), *elsewhere)->present, 3U);
}

TEST_F(BundleTest, TheSameStoreGivesTheSameBytes) {
  std::unique_ptr<DiskStore> store = filled();
  ASSERT_TRUE(write(*store, "own.pem", {1'700'000'000, 0}));
  const std::string first = bytes();
  ASSERT_TRUE(write(*store, "own.pem", {1'700'000'000, 0}));
  EXPECT_EQ(bytes(), first);
}

TEST_F(BundleTest, EveryAlteredByteIsRefused) {
  std::unique_ptr<DiskStore> store = filled();
  ASSERT_TRUE(write(*store));
  const std::string whole = bytes();
  for (std::size_t i = 0; i < whole.size(); i += i < 700 ? 1 : 997) {
    std::string altered = whole;
    altered[i] ^= 1;
    replace(altered);
    EXPECT_FALSE(read_bundle(at("bundle"), trusted())) << "byte " << i;
  }
}

TEST_F(BundleTest, EveryShorterOrLongerFileIsRefused) {
  std::unique_ptr<DiskStore> store = filled();
  ASSERT_TRUE(write(*store));
  const std::string whole = bytes();
  for (std::size_t size = 0; size < whole.size(); size += size < 300 ? 1 : 997) {
    replace(whole.substr(0, size));
    EXPECT_FALSE(read_bundle(at("bundle"), trusted())) << size << " bytes";
  }
  replace(whole + "x");
  EXPECT_EQ(read_bundle(at("bundle"), trusted()).code(), StatusCode::kRefused);
}

TEST_F(BundleTest, AnotherSignerIsNamedAndRefused) {
  std::unique_ptr<DiskStore> store = filled();
  ASSERT_TRUE(write(*store, "other.pem"));
  const Result<Bundle> foreign = read_bundle(at("bundle"), trusted());
  EXPECT_EQ(foreign.code(), StatusCode::kRefused);
  const std::string name = read_public_key(at("other.pub")).value().hex();
  EXPECT_NE(foreign.status().message().find(name), std::string::npos);
  EXPECT_FALSE(read_bundle(at("bundle"), {}));

  // The trusted key's name over a signature that it did not make.
  std::string forged = bytes();
  const std::array<std::uint8_t, 32> own = trusted().trusted.front().bytes;
  std::copy(own.begin(), own.end(), forged.begin() + 20);
  replace(forged);
  EXPECT_EQ(read_bundle(at("bundle"), trusted()).code(), StatusCode::kRefused);
}

// Kilobytes of memory that this process has had at most.
long peak_kilobytes() {
  struct rusage usage {};
  EXPECT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
  return usage.ru_maxrss;
}

TEST_F(BundleTest, OfALargeFileNothingIsReadBeyondTheHeadBeforeItsSignerIsTrusted) {
  std::unique_ptr<DiskStore> store = filled();
  ASSERT_TRUE(write(*store, "other.pem"));
  std::filesystem::resize_file(at("bundle"), kMaxBundleBytes);  // sparse
  const long before = peak_kilobytes();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(read_bundle(at("bundle"), trusted()).code(), StatusCode::kRefused);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_LT(peak_kilobytes() - before, 64 << 10);
}

TEST_F(BundleTest, WhatATrustedSignerDidNotSignTakesNoMemory) {
  std::unique_ptr<DiskStore> store = filled();
  ASSERT_TRUE(write(*store));
  std::filesystem::resize_file(at("bundle"), 256 << 20);
  const long before = peak_kilobytes();
  EXPECT_EQ(read_bundle(at("bundle"), trusted()).code(), StatusCode::kRefused);
  EXPECT_LT(peak_kilobytes() - before, 64 << 10);
}

TEST_F(BundleTest, APipeOrAFolderInPlaceOfABundleIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(at("pipe").c_str(), 0600), 0);
  EXPECT_EQ(read_bundle(at("pipe"), trusted()).code(), StatusCode::kCorrupt);
  EXPECT_EQ(read_bundle(directory_.path(), trusted()).code(), StatusCode::kCorrupt);
}

TEST_F(BundleTest, WhatAKilledProcessLeftBesideTheFileNeitherBlocksNorStays) {
  std::unique_ptr<DiskStore> store = filled();
  const std::string pid = std::to_string(::getpid());
  const std::filesystem::path mine = at("bundle.part" + pid);
  const std::filesystem::path ahead = at("bundle.part77");
  const std::filesystem::path fresh = at("bundle.part78");
  const std::filesystem::path other = at("bundle.parts");
  const auto now = std::filesystem::file_time_type::clock::now();
  for (const auto& path : {mine, ahead, fresh, other}) {
    write_bytes(path, "half");
  }
  std::filesystem::last_write_time(mine, now - std::chrono::hours(2));
  std::filesystem::last_write_time(ahead, now + std::chrono::hours(2000));
  std::filesystem::last_write_time(other, now - std::chrono::hours(2));
  const Result<BundleCounts> written = write(*store);
  ASSERT_TRUE(written) << written.status().to_string();
  EXPECT_TRUE(read_bundle(at("bundle"), trusted()));
  EXPECT_FALSE(std::filesystem::exists(mine));
  EXPECT_FALSE(std::filesystem::exists(ahead));
  EXPECT_TRUE(std::filesystem::exists(fresh));
  EXPECT_TRUE(std::filesystem::exists(other));
}

TEST_F(BundleTest, ADeviceOrAPipeIsNotReplacedByABundle) {
  std::unique_ptr<DiskStore> store = filled();
  ASSERT_EQ(::mkfifo(at("bundle").c_str(), 0600), 0);
  EXPECT_EQ(write(*store).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(std::filesystem::is_fifo(at("bundle")));
}

TEST_F(BundleTest, OtherFilesAndVersionsAreToldApart) {
  replace("eagercache-bundle 1\n");
  EXPECT_EQ(read_bundle(at("bundle"), trusted()).code(), StatusCode::kIncompatible);
  replace("eagercache-bundle 3\n");
  EXPECT_EQ(read_bundle(at("bundle"), trusted()).code(), StatusCode::kIncompatible);
  replace("PK\x03\x04");
  EXPECT_EQ(read_bundle(at("bundle"), trusted()).code(), StatusCode::kCorrupt);
  EXPECT_EQ(read_bundle(at("nothing"), trusted()).code(), StatusCode::kNotFound);
}

TEST_F(BundleTest, ADamagedKernelIsNotBundled) {
  std::unique_ptr<DiskStore> store = filled();
  const std::filesystem::path victim = object_path(1);
  std::filesystem::permissions(victim, std::filesystem::perms::owner_write,
                               std::filesystem::perm_options::add);
  std::ofstream(victim, std::ios::in | std::ios::binary).put('x');
  EXPECT_FALSE(write(*store));
  EXPECT_FALSE(std::filesystem::exists(at("bundle")));
}

TEST_F(BundleTest, AnEmptyStoreIsNoBundle) {
  std::unique_ptr<DiskStore> store = open();
  EXPECT_EQ(write(*store).code(), StatusCode::kNotFound);
}

TEST_F(BundleTest, AMissingCpuFeatureIsNamedBeforeAnythingIsWritten) {
  std::unique_ptr<DiskStore> store = open();
  Manifest manifest = entry_of(1, EntryKind::kKernel);
  manifest.cpu_features = {"avx9000"};
  ASSERT_TRUE(store->publish(manifest, {{ObjectKind::kSharedObject, source_of(1)}}));
  ASSERT_TRUE(store->publish(entry_of(0, EntryKind::kNative), {}));
  ASSERT_TRUE(write(*store));
  std::unique_ptr<DiskStore> elsewhere = open_elsewhere();
  const Result<BundleCounts> imported =
      import_bundle(read_bundle(at("bundle"), trusted()).value(), *elsewhere);
  EXPECT_EQ(imported.code(), StatusCode::kIncompatible);
  EXPECT_NE(imported.status().message().find("avx9000"), std::string::npos);
  EXPECT_EQ(elsewhere->find(key_of(0)).code(), StatusCode::kNotFound);
}

// What a test does about time: days of seconds, and rules whose clock says `now`.
constexpr std::int64_t kDay = 24 * 3600;

SigningRules at_time(SigningRules rules, std::int64_t now) {
  rules.now = now;
  return rules;
}

void expect_refused(const Result<Bundle>& bundle, const std::string& text) {
  EXPECT_EQ(bundle.code(), StatusCode::kRefused);
  EXPECT_NE(bundle.status().message().find(text), std::string::npos) << bundle.status().message();
}

TEST_F(BundleTest, ABundleExpiresByThePresentClock) {
  std::unique_ptr<DiskStore> store = filled();
  ASSERT_TRUE(write(*store, "own.pem", {1'700'000'000, 1'700'000'000 + kDay}));
  EXPECT_TRUE(read_bundle(at("bundle"), at_time(trusted(), 1'700'000'000)));
  EXPECT_TRUE(read_bundle(at("bundle"), at_time(trusted(), 1'700'000'000 + kDay - 1)));
  expect_refused(read_bundle(at("bundle"), at_time(trusted(), 1'700'000'000 + kDay)),
                 "expired on 2023-11-15 22:13:20 UTC");
  // A clock that goes back makes it whole again: nothing remembers what it said.
  EXPECT_TRUE(read_bundle(at("bundle"), at_time(trusted(), 1'700'000'000 + 1)));
}

TEST_F(BundleTest, WhatSaysThatItWasMadeInTheFutureIsRefused) {
  std::unique_ptr<DiskStore> store = filled();
  ASSERT_TRUE(write(*store, "own.pem", {1'700'000'000, 0}));
  EXPECT_TRUE(read_bundle(at("bundle"), at_time(trusted(), 1'700'000'000 - kDay)));
  expect_refused(read_bundle(at("bundle"), at_time(trusted(), 1'700'000'000 - kDay - 1)),
                 "set the clock");
}

TEST_F(BundleTest, WhatWouldHaveExpiredWhenItIsMadeIsNotWritten) {
  std::unique_ptr<DiskStore> store = filled();
  EXPECT_EQ(write(*store, "own.pem", {0, 1'700'000'000}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(write(*store, "own.pem", {5, 5}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(write(*store, "own.pem", {5, -5}).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(at("bundle")));
}

TEST_F(BundleTest, ARevokedBundleOrKeyIsRefused) {
  std::unique_ptr<DiskStore> store = filled();
  const Result<BundleCounts> written = write(*store);
  SigningRules rules = trusted();
  const std::string key = rules.trusted.front().hex();
  rules.revoked = Revocations::parse("# lost\n\n" + key + " on a train\n", "list").value();
  expect_refused(read_bundle(at("bundle"), rules), key + ", which is revoked");
  rules.revoked = Revocations::parse(written->digest.hex(), "list").value();
  expect_refused(read_bundle(at("bundle"), rules), "is revoked");
  rules.revoked = Revocations::parse(key_of(1).hex() + "\r\n", "list").value();
  EXPECT_TRUE(read_bundle(at("bundle"), rules)) << "another one is";
}

// What a store does with the entries of a bundle.
class WithdrawalTest : public BundleTest {
 protected:
  // A store elsewhere that heeds a list, and the reasons that it told.
  std::unique_ptr<DiskStore> open_heeding(const std::string& list) {
    StoreOptions other = options();
    other.root = directory_.path() / "elsewhere";
    other.environment = "torch: 2.11.0\ncompiler: none\n";
    other.revoked = Revocations::parse(list, "list").value();
    other.on_withdrawn = [this](const std::string& why) { told_.push_back(why); };
    return StoreTest::open(other);
  }

  std::vector<std::string> told_;
};

TEST_F(WithdrawalTest, EntriesOfARevokedBundleAreMissesThatSaySoOnce) {
  std::unique_ptr<DiskStore> store = filled();
  const Result<BundleCounts> written = write(*store);
  const Bundle bundle = read_bundle(at("bundle"), trusted()).value();
  ASSERT_TRUE(import_bundle(bundle, *open_heeding("")));
  for (const std::string& id : {written->digest.hex(), bundle.signer.hex()}) {
    std::unique_ptr<DiskStore> heeding = open_heeding(id);
    told_.clear();
    for (const std::uint64_t number : {1, 2, 3}) {
      EXPECT_EQ(heeding->find(key_of(number)).code(), StatusCode::kNotFound) << id;
    }
    ASSERT_EQ(told_.size(), 1U);
    EXPECT_NE(told_.front().find(id), std::string::npos);
    EXPECT_EQ(heeding->quarantined(), 0U) << "nothing is damaged";
  }
  EXPECT_TRUE(open_heeding("")->find(key_of(1))) << "the list alone says so";
}

TEST_F(WithdrawalTest, WhatIsMadeHereTakesThePlaceOfWhatIsWithdrawn) {
  std::unique_ptr<DiskStore> store = filled();
  const Result<BundleCounts> written = write(*store);
  ASSERT_TRUE(import_bundle(read_bundle(at("bundle"), trusted()).value(), *open_heeding("")));
  std::unique_ptr<DiskStore> heeding = open_heeding(written->digest.hex());
  ASSERT_TRUE(publish_kernel(*heeding, 1));
  EXPECT_EQ(use(*heeding, 1).value(), 1U);
  EXPECT_EQ(heeding->find(key_of(1)).value().fact("bundle"), "");
  EXPECT_EQ(write_bundle(at("again"), *heeding, "torch: 2.11.0\ncompiler: none\n",
                         SigningKey::read(at("own.pem")).value())
                ->kernels,
            1U)
      << "what is withdrawn is in no bundle";
}

TEST_F(WithdrawalTest, AnExpiryStaysWithTheEntry) {
  Manifest manifest = entry_of(1, EntryKind::kNative);
  note_origin({key_of(7), {}, 500}, &manifest);
  EXPECT_EQ(withdrawal_of(manifest, {}, 499), "");
  EXPECT_NE(withdrawal_of(manifest, {}, 500).find("expired on 1970-01-01 00:08:20"),
            std::string::npos);
  note_origin({key_of(8), {}, 0}, &manifest);
  EXPECT_NE(withdrawal_of(manifest, {}, 500), "") << "signed anew, and no younger";
  note_origin({key_of(9), {}, 300}, &manifest);
  EXPECT_NE(withdrawal_of(manifest, {}, 300), "");
  for (const std::string text : {"", "x", "1e9", "99999999999999999999"}) {
    manifest.facts["expires"] = text;
    EXPECT_NE(withdrawal_of(manifest, {}, 0), "") << text;
  }
}

TEST_F(BundleTest, KeysAreNeverReplacedAndOnlyEd25519IsTaken) {
  EXPECT_FALSE(SigningKey::make(at("own.pem"), at("new.pub")));
  EXPECT_FALSE(SigningKey::make(at("new.pem"), at("own.pub")));
  EXPECT_FALSE(std::filesystem::exists(at("new.pem")));
  EXPECT_EQ(std::filesystem::status(at("own.pem")).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  EXPECT_EQ(SigningKey::read(at("own.pub")).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(read_public_key(at("own.pem")).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(read_public_key(at("nothing")));
  write_bytes(at("no.pem"), "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
  EXPECT_EQ(SigningKey::read(at("no.pem")).code(), StatusCode::kInvalidArgument);
}

TEST(Ed25519, AVectorOfItsSpecification) {
  // RFC 8032, section 7.1, test 2: one byte, 0x72.
  const auto from_hex = [](std::string_view hex, auto& bytes) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] =
          static_cast<std::uint8_t>(std::stoi(std::string(hex.substr(2 * i, 2)), nullptr, 16));
    }
  };
  PublicKey key;
  Signature signature;
  from_hex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c", key.bytes);
  from_hex(
      "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
      "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
      signature.bytes);
  EXPECT_TRUE(is_signed_by(key, signature, "\x72"));
  EXPECT_FALSE(is_signed_by(key, signature, "\x73"));
  signature.bytes[0] ^= 1;
  EXPECT_FALSE(is_signed_by(key, signature, "\x72"));
}

}  // namespace
}  // namespace eagercache
