#include "guards/table/guard_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "guards/key/call_key.h"

namespace eagercache {
namespace {

using Key = std::vector<Word>;

// A key of `size` words, different for every number.
Key key(Word number, std::size_t size = 10) {
  Key words(size, 1);
  words.back() = number;
  return words;
}

class GuardTableTest : public ::testing::Test {
 protected:
  static Found find(const GuardTable& table, const Key& words) {
    return table.find(words, hash_words(words));
  }
  static MissNote note(GuardTable& table, const Key& words) {
    return table.note_miss(words, hash_words(words));
  }
  static void set_kernel(GuardTable& table, const Key& words, const void* kernel) {
    table.set_kernel(words, hash_words(words), kernel);
  }
  static void set_native(GuardTable& table, const Key& words) {
    table.set_native(words, hash_words(words));
  }
  static bool erase(GuardTable& table, const Key& words) {
    return table.erase(words, hash_words(words));
  }
  static EntryState state(const GuardTable& table, const Key& words) {
    const Found found = find(table, words);
    EXPECT_EQ(found.kernel != nullptr, found.state == EntryState::kKernel);
    return found.state;
  }
};

int kernels[5000];

// What the table says of a key that was remembered as `words`.
Found find_again(const GuardTable& table, const RememberedKey& remembered, const Key& words) {
  return table.find_again(remembered, [&](std::span<const Word> found) {
    return std::equal(found.begin(), found.end(), words.begin(), words.end());
  });
}

TEST_F(GuardTableTest, ARememberedKeyIsFoundAgainWithItsVerdictOfNow) {
  GuardTable table;
  RememberedKey remembered;
  EXPECT_EQ(find_again(table, remembered, key(1)).state, EntryState::kAbsent);
  EXPECT_EQ(table.find(key(1), hash_words(key(1)), &remembered).state, EntryState::kAbsent);
  EXPECT_EQ(find_again(table, remembered, key(1)).state, EntryState::kAbsent);
  set_kernel(table, key(1), &kernels[1]);
  EXPECT_EQ(table.find(key(1), hash_words(key(1)), &remembered).kernel, &kernels[1]);
  EXPECT_EQ(find_again(table, remembered, key(1)).kernel, &kernels[1]);
  EXPECT_EQ(find_again(table, remembered, key(2)).state, EntryState::kAbsent);
  set_kernel(table, key(1), &kernels[2]);
  EXPECT_EQ(find_again(table, remembered, key(1)).kernel, &kernels[2]);
  set_native(table, key(1));
  EXPECT_EQ(find_again(table, remembered, key(1)).state, EntryState::kNative);
}

TEST_F(GuardTableTest, APendingKeyThatIsRememberedIsCountedWhereTheCallerAdmitsIt) {
  GuardTable table;
  EXPECT_TRUE(note(table, key(1)).inserted);
  RememberedKey remembered;
  EXPECT_EQ(table.find(key(1), hash_words(key(1)), &remembered).state, EntryState::kPending);
  EXPECT_TRUE(table.note_again(remembered, [](std::uint64_t calls) { return calls == 2; }));
  EXPECT_FALSE(table.note_again(remembered, [](std::uint64_t calls) { return calls != 3; }));
  EXPECT_EQ(note(table, key(1)).calls, 3U);
  // While one asks another one counts: what was asked for is not the number that it would be.
  EXPECT_FALSE(table.note_again(
      remembered, [&](std::uint64_t calls) { return note(table, key(1)).calls == calls; }));
  EXPECT_EQ(note(table, key(1)).calls, 5U);
  const auto any = [](std::uint64_t) { return true; };
  set_native(table, key(1));
  EXPECT_FALSE(table.note_again(remembered, any));
  EXPECT_TRUE(erase(table, key(1)));
  EXPECT_TRUE(note(table, key(1)).inserted);
  EXPECT_FALSE(table.note_again(remembered, any));
  RememberedKey none;
  EXPECT_EQ(table.find(key(2), hash_words(key(2)), &none).state, EntryState::kAbsent);
  EXPECT_FALSE(table.note_again(none, any));
  EXPECT_EQ(note(table, key(1)).calls, 2U);
}

TEST_F(GuardTableTest, OnceAnEntryWasTakenOutNoneIsRemembered) {
  GuardTable table;
  const auto remember = [&](Word number) {
    set_kernel(table, key(number), &kernels[number]);
    RememberedKey remembered;
    table.find(key(number), hash_words(key(number)), &remembered);
    EXPECT_EQ(find_again(table, remembered, key(number)).kernel, &kernels[number]);
    return remembered;
  };
  const RememberedKey first = remember(1);
  RememberedKey second = remember(2);
  EXPECT_EQ(find_again(table, first, key(1)).kernel, &kernels[1]);  // insertions take nothing out
  EXPECT_TRUE(erase(table, key(1)));
  EXPECT_EQ(find_again(table, first, key(1)).state, EntryState::kAbsent);
  EXPECT_EQ(find_again(table, second, key(2)).state, EntryState::kAbsent);
  EXPECT_EQ(find(table, key(2)).kernel, &kernels[2]);
  second = remember(2);
  table.clear();
  EXPECT_EQ(find_again(table, second, key(2)).state, EntryState::kAbsent);
}

TEST_F(GuardTableTest, AnotherTableDoesNotKnowWhatWasRememberedOfOne) {
  GuardTable one;
  GuardTable other;
  set_kernel(one, key(1), &kernels[1]);
  set_kernel(other, key(1), &kernels[2]);
  RememberedKey remembered;
  one.find(key(1), hash_words(key(1)), &remembered);
  EXPECT_EQ(find_again(other, remembered, key(1)).state, EntryState::kAbsent);
  EXPECT_EQ(find_again(one, remembered, key(1)).kernel, &kernels[1]);
}

TEST_F(GuardTableTest, AKeyThatIsFoundAgainCountsAsUsed) {
  GuardTable table(64);
  set_kernel(table, key(1), &kernels[1]);
  for (Word i = 2; i < 1000; ++i) {
    // Evictions make who remembers find the key anew; what is found again is not evicted.
    RememberedKey remembered;
    ASSERT_EQ(table.find(key(1), hash_words(key(1)), &remembered).kernel, &kernels[1]) << i;
    set_kernel(table, key(i), &kernels[i]);
    find_again(table, remembered, key(1));
  }
}

TEST_F(GuardTableTest, AKeyGoesFromAbsentToPendingToAVerdict) {
  GuardTable table;
  EXPECT_EQ(state(table, key(1)), EntryState::kAbsent);
  EXPECT_TRUE(note(table, key(1)).inserted);
  EXPECT_EQ(state(table, key(1)), EntryState::kPending);
  set_kernel(table, key(1), &kernels[1]);
  EXPECT_EQ(find(table, key(1)).kernel, &kernels[1]);
  set_native(table, key(1));
  EXPECT_EQ(state(table, key(1)), EntryState::kNative);
  EXPECT_EQ(table.size(), 1U);
}

TEST_F(GuardTableTest, MissesOfAKeyAreCountedAndInsertItOnce) {
  GuardTable table;
  for (std::uint64_t i = 1; i <= 5; ++i) {
    const MissNote miss = note(table, key(1));
    EXPECT_EQ(miss.inserted, i == 1);
    EXPECT_EQ(miss.calls, i);
    EXPECT_EQ(miss.state, EntryState::kPending);
  }
  set_kernel(table, key(1), &kernels[1]);
  const MissNote late = note(table, key(1));
  EXPECT_EQ(late.state, EntryState::kKernel);
  EXPECT_EQ(late.kernel, &kernels[1]);
  EXPECT_EQ(late.calls, 6U);
}

TEST_F(GuardTableTest, AVerdictMayComeBeforeTheFirstMiss) {
  GuardTable table;
  set_kernel(table, key(1), &kernels[1]);
  set_native(table, key(2));
  EXPECT_EQ(find(table, key(1)).kernel, &kernels[1]);
  EXPECT_EQ(state(table, key(2)), EntryState::kNative);
  EXPECT_FALSE(note(table, key(2)).inserted);
}

TEST_F(GuardTableTest, KernelsNeedNoAlignment) {
  GuardTable table;
  const auto* const bytes = reinterpret_cast<const char*>(kernels);
  for (Word i = 0; i < 8; ++i) set_kernel(table, key(i), bytes + i);
  for (Word i = 0; i < 8; ++i) EXPECT_EQ(find(table, key(i)).kernel, bytes + i);
}

TEST_F(GuardTableTest, KeysOfOneHashAreToldApartByTheirWords) {
  GuardTable table;
  constexpr std::uint64_t kHash = 42;
  for (Word i = 0; i < 200; ++i) table.set_kernel(key(i, 1 + i % 20), kHash, &kernels[i]);
  for (Word i = 0; i < 200; i += 3) EXPECT_TRUE(table.erase(key(i, 1 + i % 20), kHash));
  for (Word i = 0; i < 200; ++i) {
    const Found found = table.find(key(i, 1 + i % 20), kHash);
    EXPECT_EQ(found.kernel, i % 3 == 0 ? nullptr : &kernels[i]) << i;
  }
  EXPECT_EQ(table.find(key(7, 3), kHash).state, EntryState::kAbsent);
}

TEST_F(GuardTableTest, AKeyThatBeginsLikeAnotherIsAnother) {
  GuardTable table;
  set_native(table, Key{1, 2, 3});
  EXPECT_EQ(state(table, Key{1, 2}), EntryState::kAbsent);
  EXPECT_EQ(state(table, Key{1, 2, 3, 0}), EntryState::kAbsent);
  EXPECT_EQ(table.find({}, hash_words({})).state, EntryState::kAbsent);
  table.set_native({}, hash_words({}));
  EXPECT_EQ(table.find({}, hash_words({})).state, EntryState::kNative);
}

TEST_F(GuardTableTest, FindsEveryKeyWhileItGrowsToItsBound) {
  GuardTable table;
  ASSERT_EQ(table.max_entries(), 4096U);
  for (Word i = 0; i < 4096; ++i) {
    set_kernel(table, key(i), &kernels[i]);
    if (!std::has_single_bit(i)) continue;
    for (Word j = 0; j <= i; ++j) ASSERT_EQ(find(table, key(j)).kernel, &kernels[j]);
  }
  EXPECT_EQ(table.size(), 4096U);
}

TEST_F(GuardTableTest, ErasedKeysAreGoneAndTheOthersStay) {
  GuardTable table;
  for (Word i = 0; i < 1000; ++i) set_kernel(table, key(i), &kernels[i]);
  for (Word i = 0; i < 1000; i += 2) EXPECT_TRUE(erase(table, key(i)));
  EXPECT_FALSE(erase(table, key(0)));
  EXPECT_EQ(table.size(), 500U);
  for (Word i = 0; i < 1000; ++i) {
    EXPECT_EQ(find(table, key(i)).kernel, i % 2 == 0 ? nullptr : &kernels[i]);
  }
  for (Word i = 0; i < 1000; i += 2) EXPECT_TRUE(note(table, key(i)).inserted);
  table.clear();
  EXPECT_EQ(table.size(), 0U);
  for (Word i = 0; i < 1000; ++i) EXPECT_EQ(state(table, key(i)), EntryState::kAbsent);
  EXPECT_TRUE(note(table, key(3)).inserted);
}

TEST_F(GuardTableTest, InsertingAndErasingForEverStaysFindable) {
  GuardTable table(64);
  for (Word i = 0; i < 20000; ++i) {
    set_kernel(table, key(i), &kernels[i % 5000]);
    ASSERT_EQ(find(table, key(i)).kernel, &kernels[i % 5000]);
    ASSERT_EQ(erase(table, key(i - 8)), i >= 8);
  }
  EXPECT_EQ(table.size(), 8U);
}

TEST_F(GuardTableTest, ScalarsThatNeverRepeatFillItToItsBoundAndNoFurther) {
  GuardTable table(256);
  for (Word i = 0; i < 10000; ++i) {
    // A NaN with its own payload each time, as a loss that went wrong may give.
    const double nan = std::bit_cast<double>(0x7ff8000000000000 + i);
    ASSERT_TRUE(std::isnan(nan));
    const MissNote miss = note(table, key(std::bit_cast<Word>(nan)));
    ASSERT_TRUE(miss.inserted);
    ASSERT_LE(table.size(), 256U);
  }
  EXPECT_EQ(table.size(), 256U);
}

TEST_F(GuardTableTest, AFloodOfNewKeysLeavesVerdictsThatAreInUse) {
  GuardTable table(256);
  for (Word i = 0; i < 128; ++i) set_kernel(table, key(i), &kernels[i]);
  for (Word flood = 0; flood < 5000; ++flood) {
    note(table, key(100000 + flood));
    ASSERT_EQ(find(table, key(flood % 128)).kernel, &kernels[flood % 128]) << flood;
  }
  EXPECT_EQ(table.size(), 256U);
}

TEST_F(GuardTableTest, PendingKeysAreForgottenBeforeVerdicts) {
  GuardTable table(4);
  set_kernel(table, key(1), &kernels[1]);
  set_native(table, key(2));
  note(table, key(3));
  note(table, key(4));
  note(table, key(5));
  EXPECT_EQ(table.size(), 4U);
  EXPECT_EQ(state(table, key(1)), EntryState::kKernel);
  EXPECT_EQ(state(table, key(2)), EntryState::kNative);
  EXPECT_EQ(state(table, key(3)), EntryState::kAbsent);
  EXPECT_EQ(state(table, key(4)), EntryState::kPending);
  EXPECT_EQ(state(table, key(5)), EntryState::kPending);
}

TEST_F(GuardTableTest, TheLeastRecentlyUsedVerdictGoesFirst) {
  GuardTable table(4);
  for (Word i = 1; i <= 4; ++i) set_kernel(table, key(i), &kernels[i]);
  find(table, key(1));
  find(table, key(3));
  set_kernel(table, key(5), &kernels[5]);
  EXPECT_EQ(state(table, key(2)), EntryState::kAbsent);
  find(table, key(1));
  find(table, key(3));
  set_kernel(table, key(6), &kernels[6]);
  EXPECT_EQ(state(table, key(4)), EntryState::kAbsent);
  EXPECT_EQ(state(table, key(1)), EntryState::kKernel);
  EXPECT_EQ(state(table, key(3)), EntryState::kKernel);
}

TEST_F(GuardTableTest, NewKeysBecomeKnownInATableFullOfVerdicts) {
  GuardTable table(64);
  for (Word i = 0; i < 64; ++i) set_kernel(table, key(i), &kernels[i]);
  // Two new keys in turn must not push each other out for ever.
  std::uint64_t calls = 0;
  for (int round = 0; round < 3; ++round) {
    calls = note(table, key(1000)).calls;
    note(table, key(1001));
  }
  EXPECT_EQ(calls, 3U);
}

TEST_F(GuardTableTest, AKernelFoundStaysUsableAfterItsEntryIsGone) {
  GuardTable table(8);
  const int value = 4711;
  set_kernel(table, key(1), &value);
  const Found found = find(table, key(1));
  for (Word i = 2; i < 500; ++i) set_native(table, key(i));
  EXPECT_EQ(state(table, key(1)), EntryState::kAbsent);
  table.clear();
  EXPECT_EQ(found.state, EntryState::kKernel);
  EXPECT_EQ(*static_cast<const int*>(found.kernel), 4711);
}

TEST_F(GuardTableTest, ATableOfNoEntriesIsTheOffSwitch) {
  GuardTable table(0);
  const MissNote miss = note(table, key(1));
  EXPECT_FALSE(miss.inserted);
  EXPECT_EQ(miss.calls, 0U);
  EXPECT_EQ(miss.state, EntryState::kPending);
  set_kernel(table, key(1), &kernels[1]);
  EXPECT_EQ(state(table, key(1)), EntryState::kAbsent);
  EXPECT_EQ(table.size(), 0U);
  table.clear();
}

TEST_F(GuardTableTest, ATableOfOneEntryKeepsTheLatest) {
  GuardTable table(1);
  for (Word i = 0; i < 100; ++i) {
    set_kernel(table, key(i), &kernels[i]);
    EXPECT_EQ(table.size(), 1U);
    EXPECT_EQ(find(table, key(i)).kernel, &kernels[i]);
  }
}

TEST_F(GuardTableTest, VisitsEveryEntryAndTheVisitorMayChangeTheTable) {
  GuardTable table;
  set_kernel(table, key(1), &kernels[1]);
  set_native(table, key(2, 5));
  note(table, key(3));
  note(table, key(3));
  std::map<Key, std::pair<Found, std::uint64_t>> seen;
  table.for_each([&](std::span<const Word> words, Found found, std::uint64_t calls) {
    seen[Key(words.begin(), words.end())] = {found, calls};
    EXPECT_TRUE(table.erase(words, hash_words(words)));
  });
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen.at(key(1)).first.kernel, &kernels[1]);
  EXPECT_EQ(seen.at(key(2, 5)).first.state, EntryState::kNative);
  EXPECT_EQ(seen.at(key(3)).first.state, EntryState::kPending);
  EXPECT_EQ(seen.at(key(3)).second, 2U);
  EXPECT_EQ(table.size(), 0U);
}

TEST_F(GuardTableTest, ConcurrentMissesOfKnownKeysAreAllCounted) {
  GuardTable table;
  note(table, key(1));
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&table] {
      for (int j = 0; j < 1000; ++j) note(table, key(1));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(note(table, key(1)).calls, 8002U);
}

}  // namespace
}  // namespace eagercache
