// Entries that travel alone: what one store signs another takes in, and what is altered, cut off,
// of another signer, or comes with other objects is refused before anything is in a store.

#include "kernel_cache/store/signed_entry.h"

#include <gtest/gtest.h>

#include <string>

#include "kernel_cache/base/byte_fields.h"
#include "tests/kernel_cache/store_fixture.h"

namespace eagercache {
namespace {

class SignedEntryTest : public StoreTest {
 protected:
  SignedEntryTest() {
    EXPECT_TRUE(SigningKey::make(at("own.pem"), at("own.pub")));
    EXPECT_TRUE(SigningKey::make(at("other.pem"), at("other.pub")));
    store_ = open();
    EXPECT_TRUE(publish_kernel(*store_, 1));
    EXPECT_TRUE(store_->publish(entry_of(3, EntryKind::kNative), {}));
    StoreOptions other = options();
    other.root = directory_.path() / "elsewhere";
    elsewhere_ = StoreTest::open(other);
  }

  std::filesystem::path at(const std::string& name) const { return directory_.path() / name; }
  SigningKey key(const std::string& name = "own.pem") const {
    return std::move(SigningKey::read(at(name)).value());
  }
  PublicKey own() const { return read_public_key(at("own.pub")).value(); }
  SigningRules trusted() const {
    SigningRules rules;
    rules.trusted = {own()};
    return rules;
  }

  std::string signed_bytes(std::uint64_t n, const std::string& by = "own.pem",
                           const Validity& wanted = {}) const {
    const Manifest manifest = store_->find(key_of(n)).value();
    return sign_entry(manifest, options().environment, key(by), wanted).value();
  }

  // A manifest as bytes, signed as it is, whatever it says.
  std::string sign_body(const std::string& environment, const Manifest& manifest) const {
    std::string body;
    put_validity({1, 0}, &body);
    put_text(environment, &body);
    put_text(encode_manifest(manifest).value(), &body);
    std::string entry = "eagercache-entry 1\n";
    put_bytes(key().public_key().bytes, &entry);
    put_bytes(key().sign(digest_message("eagercache-signed-entry-v1", body)).value().bytes, &entry);
    return entry + body;
  }

  std::unique_ptr<DiskStore> store_;
  std::unique_ptr<DiskStore> elsewhere_;
};

TEST_F(SignedEntryTest, AKernelAndADecisionReachAnotherStore) {
  const Result<SignedEntry> kernel = read_entry(signed_bytes(1), trusted());
  ASSERT_TRUE(kernel) << kernel.status().to_string();
  EXPECT_EQ(kernel->environment, options().environment);
  EXPECT_EQ(kernel->signer, own());
  EXPECT_EQ(kernel->manifest.key, key_of(1));
  EXPECT_TRUE(import_entry(kernel.value(), {answer_object(1)}, *elsewhere_).value());
  EXPECT_EQ(use(*elsewhere_, 1).value(), 1U);
  EXPECT_EQ(elsewhere_->find(key_of(1)).value().facts.at("signer"), own().hex());

  const Result<SignedEntry> decision = read_entry(signed_bytes(3), trusted());
  ASSERT_TRUE(decision) << decision.status().to_string();
  EXPECT_TRUE(import_entry(decision.value(), {}, *elsewhere_).value());
  EXPECT_EQ(elsewhere_->find(key_of(3)).value().kind, EntryKind::kNative);
  EXPECT_FALSE(import_entry(decision.value(), {}, *elsewhere_).value());
}

TEST_F(SignedEntryTest, WhatIsUntriedIsAMissUntilItIsPublishedAnew) {
  const SignedEntry kernel = read_entry(signed_bytes(1), trusted()).value();
  ASSERT_TRUE(import_entry(kernel, {answer_object(1)}, *elsewhere_, "values").value());
  EXPECT_EQ(elsewhere_->find(key_of(1)).code(), StatusCode::kNotFound);
  const Manifest untried = elsewhere_->find_untried(key_of(1)).value();
  EXPECT_EQ(untried.fact("untried"), "values");
  EXPECT_NE(elsewhere_->withdrawal(untried), "");
  EXPECT_FALSE(import_entry(kernel, {answer_object(1)}, *elsewhere_, "values").value());
  // It goes on to other machines as it came, and what they are told of it is their own business.
  SignedEntry relayed =
      read_entry(sign_entry(untried, options().environment, key()).value(), trusted()).value();
  EXPECT_EQ(relayed.manifest.fact("untried"), "");
  relayed.manifest.facts["untried"] = "nothing";
  StoreOptions third = options();
  third.root = directory_.path() / "third";
  const std::unique_ptr<DiskStore> own_kind = StoreTest::open(third);
  ASSERT_TRUE(import_entry(relayed, {answer_object(1)}, *own_kind).value());
  EXPECT_EQ(use(*own_kind, 1).value(), 1U);
  EXPECT_FALSE(own_kind->find_untried(key_of(1)));
  // Once it was tried, or made here, it is an entry like others.
  ASSERT_TRUE(publish_kernel(*elsewhere_, 1));
  EXPECT_EQ(use(*elsewhere_, 1).value(), 1U);
  EXPECT_FALSE(elsewhere_->find_untried(key_of(1)));
}

TEST_F(SignedEntryTest, AnUntriedEntryThatHasExpiredIsNotTried) {
  SigningRules rules = trusted();
  rules.now = 1500;
  const SignedEntry entry = read_entry(signed_bytes(1, "own.pem", {1000, 2000}), rules).value();
  ASSERT_TRUE(import_entry(entry, {answer_object(1)}, *elsewhere_, "values").value());
  EXPECT_FALSE(elsewhere_->find_untried(key_of(1))) << "it expired in 1970";
}

TEST_F(SignedEntryTest, EveryAlteredByteIsRefused) {
  const std::string whole = signed_bytes(1);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string altered = whole;
    altered[i] ^= 1;
    EXPECT_FALSE(read_entry(altered, trusted())) << "byte " << i;
  }
}

TEST_F(SignedEntryTest, EveryShorterOrLongerEntryIsRefused) {
  const std::string whole = signed_bytes(1);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(read_entry(whole.substr(0, size), trusted())) << size << " bytes";
  }
  EXPECT_FALSE(read_entry(whole + "x", trusted()));
  EXPECT_EQ(read_entry(std::string(kMaxSignedEntryBytes + 1, 'x'), trusted()).code(),
            StatusCode::kCorrupt);
}

TEST_F(SignedEntryTest, AnotherSignerOrVersionIsNamed) {
  EXPECT_EQ(read_entry(signed_bytes(1, "other.pem"), trusted()).code(), StatusCode::kRefused);
  EXPECT_EQ(read_entry(signed_bytes(1), SigningRules{}).code(), StatusCode::kRefused);
  std::string newer = signed_bytes(1);
  newer[std::string_view("eagercache-entry ").size()] = '2';
  EXPECT_EQ(read_entry(newer, trusted()).code(), StatusCode::kIncompatible);
}

TEST_F(SignedEntryTest, WhatIsRevokedOrHasExpiredIsRefusedAndNotUsedAnyMore) {
  const std::string whole = signed_bytes(1, "own.pem", {1000, 2000});
  SigningRules rules = trusted();
  rules.now = 1999;
  const SignedEntry entry = read_entry(whole, rules).value();
  EXPECT_EQ(entry.validity.expires, 2000);
  rules.now = 2000;
  EXPECT_EQ(read_entry(whole, rules).code(), StatusCode::kRefused);
  rules.now = 1000 - 25 * 3600;  // it was made tomorrow
  EXPECT_EQ(read_entry(whole, rules).code(), StatusCode::kRefused);
  for (const std::string& id : {entry.digest.hex(), own().hex()}) {
    SigningRules without = trusted();
    without.now = 1999;
    without.revoked = Revocations::parse(id + " left the team\n", "a list").value();
    const Status status = read_entry(whole, without).status();
    EXPECT_EQ(status.code(), StatusCode::kRefused);
    EXPECT_NE(status.message().find("revoked"), std::string::npos) << status.message();
  }
  // In a store it ends with its time, too.
  ASSERT_TRUE(import_entry(entry, {answer_object(1)}, *elsewhere_).value());
  EXPECT_EQ(elsewhere_->find(key_of(1)).code(), StatusCode::kNotFound);
}

TEST_F(SignedEntryTest, WhatATrustedKeySignedMustStillBeAnEntry) {
  Manifest manifest = store_->find(key_of(1)).value();
  EXPECT_TRUE(read_entry(sign_body(options().environment, manifest), trusted()));
  EXPECT_EQ(read_entry(sign_body("torch: 1\n", manifest), trusted()).code(), StatusCode::kCorrupt);
  EXPECT_EQ(sign_entry(manifest, "torch: 1\n", key()).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(store_->publish(entry_of(4, EntryKind::kFailed), {}));
  manifest = store_->find(key_of(4)).value();
  EXPECT_EQ(read_entry(sign_body(options().environment, manifest), trusted()).code(),
            StatusCode::kCorrupt);
  EXPECT_EQ(sign_entry(manifest, options().environment, key()).code(),
            StatusCode::kInvalidArgument);
}

TEST_F(SignedEntryTest, OtherObjectsThanTheNamedOnesAreRefusedBeforeAnythingIsWritten) {
  const SignedEntry entry = read_entry(signed_bytes(1), trusted()).value();
  std::string altered = answer_object(1);
  altered.back() ^= 1;
  const std::string longer = answer_object(1) + "x";
  for (const std::vector<std::string>& objects : std::vector<std::vector<std::string>>{
           {}, {altered}, {longer}, {answer_object(2)}, {answer_object(1), answer_object(1)}}) {
    EXPECT_EQ(import_entry(entry, objects, *elsewhere_).code(), StatusCode::kCorrupt);
  }
  EXPECT_EQ(elsewhere_->find(key_of(1)).code(), StatusCode::kNotFound);
  EXPECT_EQ(count_files(elsewhere_->root() / kVersionDirectory / "o"), 0U);
}

TEST_F(SignedEntryTest, AKernelForAnotherProcessorIsRefused) {
  Manifest manifest = entry_of(5, EntryKind::kKernel);
  manifest.cpu_features = {"no_such_feature"};
  ASSERT_TRUE(store_->publish(manifest, {{ObjectKind::kSharedObject, source_of(5)}}));
  const SignedEntry entry = read_entry(signed_bytes(5), trusted()).value();
  EXPECT_EQ(import_entry(entry, {answer_object(5)}, *elsewhere_).code(), StatusCode::kIncompatible);
}

}  // namespace
}  // namespace eagercache
