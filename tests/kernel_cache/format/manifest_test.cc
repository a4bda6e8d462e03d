#include "kernel_cache/format/manifest.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>

namespace eagercache {
namespace {

Manifest kernel_manifest() {
  Manifest manifest;
  manifest.key = sha256("a key");
  manifest.kind = EntryKind::kKernel;
  manifest.created = 1'700'000'000;
  manifest.objects = {{ObjectKind::kSharedObject, sha256("one"), 350'000},
                      {ObjectKind::kCubin, sha256("two"), 0}};
  manifest.cpu_features = {"avx2", "fma"};
  manifest.facts = {{"op", "aten::add.Tensor"},
                    {"reason", "line one\nline two\twith \\ and \x01\x7f"},
                    {"empty", ""},
                    {"unicode", "na\xc3\xafve \xf0\x9f\x98\x80"},
                    {"nul", std::string("a\0b", 3)}};
  return manifest;
}

Manifest failed_manifest() {
  Manifest manifest;
  manifest.key = sha256("another key");
  manifest.kind = EntryKind::kFailed;
  manifest.failure = FailureClass::kTransient;
  manifest.retry_after = std::numeric_limits<std::int64_t>::max();
  manifest.created = -5;
  return manifest;
}

// The text with its last line made right again, so that only the body's meaning is judged.
std::string sealed(const std::string& body) { return body + "digest " + sha256(body).hex() + "\n"; }

std::string body_of(const std::string& text) { return text.substr(0, text.rfind("digest ")); }

std::string encode(const Manifest& manifest) {
  auto text = encode_manifest(manifest);
  EXPECT_TRUE(text) << text.status().to_string();
  return text ? std::move(text).value() : std::string();
}

TEST(ManifestTest, RoundTripsEveryKind) {
  for (const Manifest& manifest : {kernel_manifest(), failed_manifest(), Manifest{}}) {
    const std::string text = encode(manifest);
    const auto decoded = decode_manifest(text);
    ASSERT_TRUE(decoded) << decoded.status().to_string();
    EXPECT_EQ(decoded.value(), manifest);
    EXPECT_EQ(encode(decoded.value()), text);
  }
}

TEST(ManifestTest, EveryBitFlipIsRejected) {
  for (const Manifest& manifest : {kernel_manifest(), failed_manifest()}) {
    const std::string text = encode(manifest);
    for (std::size_t byte = 0; byte < text.size(); ++byte) {
      for (int bit = 0; bit < 8; ++bit) {
        std::string damaged = text;
        damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << bit));
        EXPECT_EQ(decode_manifest(damaged).code(), StatusCode::kCorrupt)
            << "byte " << byte << " bit " << bit;
      }
    }
  }
}

TEST(ManifestTest, EveryTruncationAndExtensionIsRejected) {
  const std::string text = encode(kernel_manifest());
  for (std::size_t length = 0; length < text.size(); ++length) {
    EXPECT_EQ(decode_manifest(text.substr(0, length)).code(), StatusCode::kCorrupt) << length;
  }
  EXPECT_EQ(decode_manifest(text + "\n").code(), StatusCode::kCorrupt);
  EXPECT_EQ(decode_manifest(text + text).code(), StatusCode::kCorrupt);
}

TEST(ManifestTest, OnlyTheCanonicalSpellingIsAccepted) {
  const std::string body = body_of(encode(kernel_manifest()));
  ASSERT_TRUE(decode_manifest(sealed(body)));
  const auto edited = [&](const std::string& from, const std::string& to) {
    std::string text = body;
    const std::size_t place = text.find(from);
    EXPECT_NE(place, std::string::npos) << from;
    return sealed(text.replace(place, from.size(), to));
  };
  for (const std::string& text :
       {edited(" 350000\n", " 0350000\n"), edited(" 350000\n", " +350000\n"),
        edited(" 350000\n", " 350000 \n"), edited(" 350000\n", " 99999999999999999999\n"),
        edited("kind kernel\n", "kind Kernel\n"), edited("kind kernel\n", "kind native\n"),
        edited("kind kernel\n", "kind kernel\nkind kernel\n"), edited("kind kernel\n", ""),
        edited("created 1700000000\n", "created -0\n"), edited("cpu avx2\n", "cpu \n"),
        edited("cpu avx2\n", "cpu AVX2\n"), edited("cpu avx2\n", "\ncpu avx2\n"),
        edited("cpu avx2\n", "colour red\n"), edited("fact op ", "fact Op "),
        edited("fact op ", "fact zz "), edited("\\x0a", "\\x0A"), edited("\\x0a", "\\n"),
        edited("\\x0a", "\\x41"), edited("na\xc3\xaf", "na\xc3")}) {
    EXPECT_FALSE(decode_manifest(text)) << text;
  }
}

TEST(ManifestTest, AnIntactManifestOfAnotherVersionIsIncompatibleAndNotCorrupt) {
  std::string body = body_of(encode(kernel_manifest()));
  const std::string first = "eagercache-manifest 2\n";
  body.replace(0, first.size(), "eagercache-manifest 3\n");
  EXPECT_EQ(decode_manifest(sealed(body)).code(), StatusCode::kIncompatible);
  EXPECT_EQ(decode_manifest(body + "digest " + sha256("x").hex() + "\n").code(),
            StatusCode::kCorrupt);
}

TEST(ManifestTest, MeaninglessManifestsAreNotWritten) {
  const auto code_of = [](auto edit, Manifest manifest) {
    edit(manifest);
    return encode_manifest(manifest).code();
  };
  const auto refused = StatusCode::kInvalidArgument;
  EXPECT_EQ(code_of([](Manifest& m) { m.objects.clear(); }, kernel_manifest()), refused);
  EXPECT_EQ(code_of([](Manifest& m) { m.kind = EntryKind::kNative; }, kernel_manifest()), refused);
  EXPECT_EQ(code_of([](Manifest& m) { m.retry_after = 1; }, kernel_manifest()), refused);
  EXPECT_EQ(code_of([](Manifest& m) { m.failure = FailureClass::kTransient; }, kernel_manifest()),
            refused);
  EXPECT_EQ(
      code_of([](Manifest& m) { m.failure = FailureClass::kDeterministic; }, failed_manifest()),
      refused);
  EXPECT_EQ(code_of([](Manifest& m) { m.facts["Upper"] = ""; }, Manifest{}), refused);
  EXPECT_EQ(code_of([](Manifest& m) { m.facts[""] = ""; }, Manifest{}), refused);
  EXPECT_EQ(code_of([](Manifest& m) { m.facts["a"] = "\xff"; }, Manifest{}), refused);
  EXPECT_EQ(code_of([](Manifest& m) { m.facts["a"] = "\xed\xa0\x80"; }, Manifest{}), refused);
  EXPECT_EQ(code_of([](Manifest& m) { m.facts["a"] = "\xc0\x80"; }, Manifest{}), refused);
  EXPECT_EQ(code_of([](Manifest& m) { m.cpu_features = {"a b"}; }, Manifest{}), refused);
}

TEST(ManifestTest, TheSizeCapHoldsBothWays) {
  Manifest manifest;
  manifest.facts["text"] = std::string(kMaxManifestBytes - 1000, 'x');
  const std::string text = encode(manifest);
  EXPECT_TRUE(decode_manifest(text));
  manifest.facts["text"] = std::string(kMaxManifestBytes, 'x');
  EXPECT_EQ(encode_manifest(manifest).code(), StatusCode::kInvalidArgument);
  // Short enough as a value, too long once escaped.
  manifest.facts["text"] = std::string(kMaxManifestBytes / 3, '\n');
  EXPECT_EQ(encode_manifest(manifest).code(), StatusCode::kInvalidArgument);
  const std::string huge = body_of(text) + "fact zz " + std::string(5000, 'y') + "\n";
  EXPECT_EQ(decode_manifest(sealed(huge)).code(), StatusCode::kCorrupt);
}

// Bodies made of the format's own words, sealed correctly, so that the reader behind the digest is
// reached: whatever it accepts must be canonical.
TEST(ManifestTest, RandomBodiesAreRejectedOrCanonical) {
  constexpr unsigned int kSeed = 20240607;
  std::mt19937_64 random(kSeed);
  const std::string original = body_of(encode(kernel_manifest()));
  int accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string body = original;
    const int edits = 1 + static_cast<int>(random() % 4);
    for (int edit = 0; edit < edits && !body.empty(); ++edit) {
      const std::size_t place = random() % body.size();
      const std::size_t length = random() % 24;
      switch (random() % 4) {
        case 0:
          body[place] = static_cast<char>(random());
          break;
        case 1:
          body.erase(place, length);
          break;
        case 2:
          body.insert(place, original.substr(random() % original.size(), length));
          break;
        default:
          body.insert(place, 1, "\n \\x0:-+"[random() % 8]);
      }
    }
    const std::string text = sealed(body);
    const auto decoded = decode_manifest(text);
    if (!decoded) continue;
    ++accepted;
    EXPECT_EQ(encode(decoded.value()), text) << "seed " << kSeed << " round " << round;
  }
  EXPECT_GT(accepted, 0) << "no edit survived, so the reader was not reached; seed " << kSeed;
}

}  // namespace
}  // namespace eagercache
