#include "kernel_cache/base/digest.h"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <string>
#include <vector>

namespace eagercache {
namespace {

TEST(DigestTest, KnownAnswersOfFips180) {
  EXPECT_EQ(sha256("").hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc").hex(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256(std::string(1'000'000, 'a')).hex(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(DigestTest, HexRoundTripsAndRefusesOtherSpellings) {
  const Digest digest = sha256("eagercache");
  EXPECT_EQ(Digest::from_hex(digest.hex()), digest);
  std::string text = digest.hex();
  EXPECT_FALSE(Digest::from_hex(text.substr(1)));
  EXPECT_FALSE(Digest::from_hex(text + "0"));
  for (const char bad : {'g', 'A', ' ', '-', '\0'}) {
    text[10] = bad;
    EXPECT_FALSE(Digest::from_hex(text)) << "accepted character " << static_cast<int>(bad);
  }
}

TEST(DigestTest, HasherFollowsItsDocumentedFraming) {
  Hasher hasher("d");
  hasher.add_text("xy");
  const std::array<std::uint64_t, 1> words{0x0102030405060708};
  hasher.add_words(words);
  std::string framed("T\1\0\0\0\0\0\0\0d", 10);
  framed += std::string("T\2\0\0\0\0\0\0\0xy", 11);
  framed += std::string("W\1\0\0\0\0\0\0\0\x8\7\6\5\4\3\2\1", 17);
  EXPECT_EQ(hasher.finish(), sha256(framed));
}

TEST(DigestTest, DifferentFieldSequencesNeverMeet) {
  const auto digest_of = [](const char* domain, const std::vector<std::string>& texts,
                            const std::vector<std::uint64_t>& words) {
    Hasher hasher(domain);
    for (const std::string& text : texts) hasher.add_text(text);
    if (!words.empty()) hasher.add_words(words);
    return hasher.finish();
  };
  const std::set<Digest> digests{
      digest_of("d", {}, {}),          digest_of("d", {""}, {}),
      digest_of("d", {"", ""}, {}),    digest_of("d", {"ab", "c"}, {}),
      digest_of("d", {"a", "bc"}, {}), digest_of("d", {"abc"}, {}),
      digest_of("da", {"bc"}, {}),     digest_of("d", {"abc"}, {0}),
      digest_of("d", {"abc"}, {0, 0}), digest_of("d", {std::string("\0\0\0\0\0\0\0\0", 8)}, {}),
      digest_of("d", {}, {0}),
  };
  EXPECT_EQ(digests.size(), 11U);
}

}  // namespace
}  // namespace eagercache
