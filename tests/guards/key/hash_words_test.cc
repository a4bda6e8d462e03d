#include <gtest/gtest.h>

#include <bit>
#include <iostream>
#include <random>
#include <unordered_set>
#include <vector>

#include "guards/key/call_key.h"

namespace eagercache {
namespace {

constexpr std::uint64_t kSeed = 7;

TEST(HashWords, OneFlippedInputBitFlipsAboutHalfOfTheHashInEveryPosition) {
  std::mt19937_64 random(kSeed);
  for (const std::size_t size : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 16, 17, 33}) {
    for (std::size_t at = 0; at < size; ++at) {
      int flipped_bits = 0;
      int samples = 0;
      for (int round = 0; round < 4; ++round) {
        std::vector<Word> words(size);
        for (Word& word : words) word = random();
        const std::uint64_t before = hash_words(words);
        for (unsigned bit = 0; bit < 64; ++bit, ++samples) {
          words[at] ^= Word{1} << bit;
          flipped_bits += std::popcount(before ^ hash_words(words));
          words[at] ^= Word{1} << bit;
        }
      }
      const double mean = static_cast<double>(flipped_bits) / samples;
      EXPECT_NEAR(mean, 32.0, 3.0) << "seed " << kSeed << ", word " << at << " of " << size;
    }
  }
}

TEST(HashWords, SmallStructuredInputsDoNotCollide) {
  // Shapes as they occur: a header, then small numbers. 64-bit hashes of 10^5 keys: a collision has
  // probability 3e-10.
  std::unordered_set<std::uint64_t> all;
  std::unordered_set<std::uint64_t> low_bits;
  std::size_t keys = 0;
  for (Word a = 0; a < 50; ++a) {
    for (Word b = 0; b < 50; ++b) {
      for (Word c = 0; c < 40; ++c, ++keys) {
        const std::uint64_t hash = hash_words(std::vector<Word>{1, 0x30206, a, b, c, b * c, c, 1});
        all.insert(hash);
        low_bits.insert(hash & 0xffff);
      }
    }
  }
  EXPECT_EQ(all.size(), keys);
  // 100,000 balls into 65,536 bins leave 78 % of them filled.
  EXPECT_NEAR(static_cast<double>(low_bits.size()), 65536 * 0.7825, 600);
}

TEST(HashWords, LengthAndOrderCount) {
  std::unordered_set<std::uint64_t> hashes;
  for (std::size_t size = 0; size < 64; ++size)
    hashes.insert(hash_words(std::vector<Word>(size, 0)));
  EXPECT_EQ(hashes.size(), 64U);
  std::vector<Word> words(24);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = i;
  const std::uint64_t straight = hash_words(words);
  for (std::size_t i = 0; i < words.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      std::swap(words[i], words[j]);
      EXPECT_NE(hash_words(words), straight) << i << " and " << j;
      std::swap(words[i], words[j]);
    }
  }
}

TEST(HashWords, DependsOnNothingButTheWords) {
  const std::vector<Word> words = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  std::vector<Word> shifted(words.size() + 1);
  std::copy(words.begin(), words.end(), shifted.begin() + 1);
  EXPECT_EQ(hash_words(words), hash_words(std::span<const Word>(shifted).subspan(1)));
  EXPECT_EQ(hash_words({}), hash_words(std::span<const Word>(shifted).first(0)));
}

}  // namespace
}  // namespace eagercache
