// Artifacts of modules: what was written comes back whole; what is altered, cut off, of another
// signer or malformed is refused, and weights are compared where that was asked for.

#include "kernel_cache/artifact/module_artifact.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <span>
#include <tuple>

#include "kernel_cache/base/byte_fields.h"
#include "tests/kernel_cache/test_objects.h"
#include "tests/support/temporary_directory.h"

namespace eagercache {
namespace {

class ModuleArtifactTest : public testing::Test {
 protected:
  ModuleArtifactTest() {
    EXPECT_TRUE(SigningKey::make(at("own.pem"), at("own.pub")));
    EXPECT_TRUE(SigningKey::make(at("other.pem"), at("other.pub")));
    for (std::size_t i = 0; i < weight_.size(); ++i) weight_[i] = static_cast<float>(i);
    for (const std::uint64_t number : {1, 2}) {
      write_bytes(at("library" + std::to_string(number)), answer_object(number));
    }
  }

  std::filesystem::path at(const std::string& name) const { return directory_.path() / name; }
  std::filesystem::path artifact() const { return at("artifact"); }
  SigningRules trusted() const {
    SigningRules rules;
    rules.trusted = {read_public_key(at("own.pub")).value()};
    return rules;
  }

  ArtifactContents contents() const {
    ArtifactContents contents;
    contents.environment = "torch: 2.11.0\n";
    contents.cpu_features = {"avx2", "fma"};
    contents.facts = {{"program", "{}"}, {"torch", "2.11.0"}};
    contents.libraries = {at("library1"), at("library2")};
    contents.constants = {
        {{"weight", "tied.weight"}, ArtifactConstant::Kind::kParameter, "float32", {10}, {1}, {}},
        {{"bias"}, ArtifactConstant::Kind::kBuffer, "float32", {}, {}, {}}};
    contents.data = {std::as_bytes(std::span(weight_)), std::as_bytes(std::span(bias_))};
    return contents;
  }
  Result<std::uint64_t> write(const std::string& key = "own.pem") const {
    return write_module_artifact(artifact(), contents(), SigningKey::read(at(key)).value());
  }
  Result<std::shared_ptr<const ModuleArtifact>> open() const {
    return ModuleArtifact::open(artifact(), trusted());
  }
  // What becomes of the whole file when all of it is asked for.
  Status check() const {
    const auto opened = open();
    return opened ? opened.value()->verify() : opened.status();
  }

  const TemporaryDirectory directory_;
  std::array<float, 10> weight_{};
  std::array<float, 1> bias_{2.5F};
};

TEST_F(ModuleArtifactTest, WhatIsWrittenIsReadAgain) {
  const Result<std::uint64_t> written = write();
  ASSERT_TRUE(written) << written.status().to_string();
  EXPECT_EQ(written.value(), std::filesystem::file_size(artifact()));
  EXPECT_TRUE(is_module_artifact(artifact()));
  EXPECT_FALSE(is_module_artifact(at("own.pub")));

  const auto opened = open();
  ASSERT_TRUE(opened) << opened.status().to_string();
  const ArtifactHeader& header = opened.value()->header();
  EXPECT_EQ(header.signer, trusted().trusted.front());
  EXPECT_EQ(header.environment, "torch: 2.11.0\n");
  EXPECT_EQ(header.cpu_features, (std::vector<std::string>{"avx2", "fma"}));
  EXPECT_EQ(header.facts.at("torch"), "2.11.0");
  ASSERT_EQ(header.libraries.size(), 2U);
  ASSERT_EQ(header.constants.size(), 2U);
  EXPECT_EQ(header.constants[0].names, (std::vector<std::string>{"weight", "tied.weight"}));
  EXPECT_EQ(header.constants[0].sizes, std::vector<std::uint64_t>{10});
  EXPECT_EQ(header.constants[1].kind, ArtifactConstant::Kind::kBuffer);
  EXPECT_EQ(header.weights_offset % kArtifactPage, 0U);
  for (const ArtifactConstant& constant : header.constants) {
    EXPECT_EQ(constant.data.offset % kConstantAlignment, 0U);
  }
  EXPECT_TRUE(opened.value()->verify());
}

TEST_F(ModuleArtifactTest, MappedAndCopiedWeightsAreThoseThatWereWritten) {
  ASSERT_TRUE(write());
  const auto opened = open().value();
  for (const auto& memory : {opened->map_weights(false, false), opened->map_weights(true, false),
                             opened->copy_weights()}) {
    ASSERT_TRUE(memory) << memory.status().to_string();
    const auto bytes = opened->bytes_of(*memory.value(), 0);
    ASSERT_EQ(bytes.size(), sizeof(weight_));
    EXPECT_EQ(std::memcmp(bytes.data(), weight_.data(), bytes.size()), 0);
    EXPECT_EQ(opened->bytes_of(*memory.value(), 1).size(), sizeof(float));
  }
}

TEST_F(ModuleArtifactTest, MappedWeightsOutliveTheArtifactAndItsName) {
  ASSERT_TRUE(write());
  auto opened = open().value();
  const auto memory = opened->map_weights(false, false).value();
  const auto bytes = opened->bytes_of(*memory, 0);
  opened.reset();
  weight_[3] = 99;
  ASSERT_TRUE(write()) << "a new file takes the name";
  float third = 0;
  std::memcpy(&third, bytes.data() + 3 * sizeof(float), sizeof third);
  EXPECT_EQ(third, 3.0F);
}

TEST_F(ModuleArtifactTest, LibrariesAreLoadedAfterTheirDigestWasCompared) {
  ASSERT_TRUE(write());
  const auto opened = open().value();
  const auto path = opened->verified_library(1);
  ASSERT_TRUE(path) << path.status().to_string();
  EXPECT_EQ(read_bytes(path.value()), answer_object(2));

  std::string altered = read_bytes(artifact());
  altered[opened->header().libraries[1].offset + 200] ^= 1;
  write_bytes(artifact(), altered);
  const auto again = open();
  ASSERT_TRUE(again) << "the header is as it was";
  EXPECT_EQ(again.value()->verified_library(1).code(), StatusCode::kCorrupt);
}

TEST_F(ModuleArtifactTest, EveryAlteredByteIsFoundByVerify) {
  ASSERT_TRUE(write());
  const std::string whole = read_bytes(artifact());
  const std::uint64_t weights = open().value()->header().weights_offset;
  for (std::size_t i = 0; i < whole.size(); i += (i < 900 || i + 8 >= weights) ? 1 : 997) {
    std::string altered = whole;
    altered[i] ^= 1;
    write_bytes(artifact(), altered);
    EXPECT_FALSE(check()) << "byte " << i;
  }
}

TEST_F(ModuleArtifactTest, AnAlteredWeightIsNamedWhereItIsLookedAt) {
  ASSERT_TRUE(write());
  std::string altered = read_bytes(artifact());
  altered[altered.size() - 1] ^= 1;  // of the last constant
  write_bytes(artifact(), altered);
  const auto opened = open().value();
  EXPECT_TRUE(opened->map_weights(false, false)) << "nothing of them is read";
  for (const auto& memory : {opened->map_weights(true, false), opened->copy_weights()}) {
    ASSERT_EQ(memory.code(), StatusCode::kCorrupt);
    EXPECT_NE(memory.status().message().find("bias"), std::string::npos);
  }
}

TEST_F(ModuleArtifactTest, EveryShorterOrLongerFileIsRefused) {
  ASSERT_TRUE(write());
  const std::string whole = read_bytes(artifact());
  for (std::size_t size = 0; size < whole.size(); size += size < 900 ? 1 : 997) {
    write_bytes(artifact(), whole.substr(0, size));
    EXPECT_FALSE(open()) << size << " bytes";
  }
  write_bytes(artifact(), whole + "x");
  EXPECT_EQ(open().code(), StatusCode::kCorrupt);
}

TEST_F(ModuleArtifactTest, OtherSignersFilesAndVersionsAreToldApart) {
  ASSERT_TRUE(write("other.pem"));
  const auto foreign = open();
  EXPECT_EQ(foreign.code(), StatusCode::kRefused);
  const std::string name = read_public_key(at("other.pub")).value().hex();
  EXPECT_NE(foreign.status().message().find(name), std::string::npos);
  EXPECT_EQ(ModuleArtifact::open(artifact(), SigningRules()).code(), StatusCode::kRefused);

  // The trusted key's name over a signature that it did not make.
  std::string forged = read_bytes(artifact());
  const std::array<std::uint8_t, 32> own = trusted().trusted.front().bytes;
  std::copy(own.begin(), own.end(), forged.begin() + kArtifactFirstLine.size());
  write_bytes(artifact(), forged);
  EXPECT_EQ(open().code(), StatusCode::kRefused);

  write_bytes(artifact(), "eagercache-module 1\n" + forged.substr(kArtifactFirstLine.size()));
  EXPECT_EQ(open().code(), StatusCode::kIncompatible);
  write_bytes(artifact(), "eagercache-bundle 2\n" + forged.substr(kArtifactFirstLine.size()));
  EXPECT_EQ(open().code(), StatusCode::kCorrupt);
  EXPECT_EQ(ModuleArtifact::open(directory_.path(), trusted()).code(), StatusCode::kCorrupt);
  EXPECT_EQ(ModuleArtifact::open(at("nothing"), trusted()).code(), StatusCode::kNotFound);
}

TEST_F(ModuleArtifactTest, APipeOrAFolderInPlaceOfAnArtifactIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(artifact().c_str(), 0600), 0);
  EXPECT_FALSE(is_module_artifact(artifact()));
  EXPECT_EQ(open().status().code(), StatusCode::kCorrupt);
  EXPECT_FALSE(is_module_artifact(directory_.path()));
  EXPECT_EQ(ModuleArtifact::open(directory_.path(), trusted()).status().code(),
            StatusCode::kCorrupt);
}

// A signer may be wrong, or want to harm: what it signed is checked all the same.
TEST_F(ModuleArtifactTest, SignedHeadersThatPointOutsideAreRefused) {
  ASSERT_TRUE(write());
  const std::string whole = read_bytes(artifact());
  const ArtifactHeader good = open().value()->header();
  const SigningKey key = SigningKey::read(at("own.pem")).value();
  const auto refused = [&](const std::function<void(ArtifactHeader&)>& change) {
    ArtifactHeader header = good;
    change(header);
    const std::string text = encode_artifact_header(header);
    std::string file(kArtifactFirstLine);
    put_bytes(key.public_key().bytes, &file);
    put_bytes(key.sign(digest_message(kArtifactDomain, text)).value().bytes, &file);
    put_text(text, &file);
    file += whole.substr(std::min(file.size(), whole.size()));
    write_bytes(artifact(), file);
    return open().code() == StatusCode::kCorrupt;
  };
  EXPECT_FALSE(refused([](ArtifactHeader&) {})) << "the same header passes";
  EXPECT_TRUE(refused([](auto& h) { h.constants[1].data.bytes = ~std::uint64_t{0}; }));
  EXPECT_TRUE(refused([](auto& h) { h.constants[1].data.offset += std::uint64_t{1} << 62; }));
  EXPECT_TRUE(refused([](auto& h) { h.constants[1].data.offset = h.constants[0].data.offset; }));
  EXPECT_TRUE(refused([](auto& h) { h.constants[0].data.offset += 4; })) << "not aligned";
  EXPECT_TRUE(refused([](auto& h) { h.libraries[0].offset = 0; }));
  EXPECT_TRUE(refused([](auto& h) { h.libraries[0].bytes = h.file_bytes; }));
  EXPECT_TRUE(refused([](auto& h) { h.weights_offset += 1; }));
  EXPECT_TRUE(refused([](auto& h) { h.weights_offset = std::uint64_t{1} << 60; }));
  EXPECT_TRUE(refused([](auto& h) { h.file_bytes -= 1; }));
  EXPECT_TRUE(refused([](auto& h) { h.constants[0].names.clear(); }));
  EXPECT_TRUE(refused([](auto& h) { h.constants[0].strides.clear(); }));
  EXPECT_TRUE(refused([](auto& h) { h.validity.created = -1; })) << "no time";
}

TEST_F(ModuleArtifactTest, WhatHasExpiredIsRevokedOrComesFromTheFutureIsRefused) {
  constexpr std::int64_t kMade = 1'700'000'000;
  constexpr std::int64_t kDay = 24 * 3600;
  ArtifactContents dated = contents();
  dated.validity = {kMade, kMade + kDay};
  const SigningKey key = SigningKey::read(at("own.pem")).value();
  ASSERT_TRUE(write_module_artifact(artifact(), dated, key));
  const auto at_time = [&](std::int64_t now, const std::string& revoked = "") {
    SigningRules rules = trusted();
    rules.now = now;
    rules.revoked = Revocations::parse(revoked, "list").value();
    return ModuleArtifact::open(artifact(), rules);
  };
  const auto opened = at_time(kMade);
  ASSERT_TRUE(opened) << opened.status().to_string();
  EXPECT_EQ(opened.value()->header().validity, dated.validity);
  EXPECT_TRUE(at_time(kMade - kDay)) << "clocks differ by hours";
  for (const auto& [now, revoked, text] :
       {std::tuple{kMade + kDay, std::string(), "expired on"},
        std::tuple{kMade - kDay - 1, std::string(), "set the clock"},
        std::tuple{kMade, opened.value()->header().digest.hex(), "is revoked"},
        std::tuple{kMade, key.public_key().hex(), "which is revoked"}}) {
    const auto refused = at_time(now, revoked);
    EXPECT_EQ(refused.code(), StatusCode::kRefused) << text;
    EXPECT_NE(refused.status().message().find(text), std::string::npos);
  }
  dated.validity = {0, kMade};
  EXPECT_EQ(write_module_artifact(artifact(), dated, key).code(), StatusCode::kInvalidArgument);
}

TEST_F(ModuleArtifactTest, MappedWeightsMustBelongToTheUserAlone) {
  ASSERT_TRUE(write());
  ASSERT_EQ(::chmod(artifact().c_str(), 0666), 0);
  const auto opened = open().value();
  EXPECT_EQ(opened->map_weights(false, false).code(), StatusCode::kRefused);
  EXPECT_TRUE(opened->map_weights(false, true));
  EXPECT_TRUE(opened->copy_weights()) << "they are compared as they are read";
}

TEST_F(ModuleArtifactTest, NothingIsLeftOfAWriteThatFails) {
  ArtifactContents missing = contents();
  missing.libraries.push_back(at("nothing"));
  const SigningKey key = SigningKey::read(at("own.pem")).value();
  EXPECT_FALSE(write_module_artifact(artifact(), missing, key));
  EXPECT_FALSE(write_module_artifact(at("no/folder"), contents(), key));
  ArtifactContents uneven = contents();
  uneven.data.pop_back();
  EXPECT_FALSE(write_module_artifact(artifact(), uneven, key));
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(directory_.path())) {
    ++files;
  }
  EXPECT_EQ(files, 6U) << "two pairs of keys, two libraries";
}

}  // namespace
}  // namespace eagercache
