#include "guards/table/table_budget.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "guards/table/guard_table.h"

namespace eagercache {
namespace {

using Key = std::vector<Word>;

Key key(Word number, std::size_t size = 10) {
  Key words(size, 1);
  words.back() = number;
  return words;
}

void note(GuardTable& table, const Key& words) { table.note_miss(words, hash_words(words)); }
EntryState state(const GuardTable& table, const Key& words) {
  return table.find(words, hash_words(words)).state;
}

std::size_t total(const std::deque<GuardTable>& tables) {
  std::size_t sum = 0;
  for (const GuardTable& table : tables) sum += table.size();
  return sum;
}

int kernels[1000];

void set_kernel(GuardTable& table, Word number) {
  table.set_kernel(key(number), hash_words(key(number)), &kernels[number]);
}

TEST(TableBudget, AllTablesTogetherStayWithinTheirEntries) {
  TableBudget budget(1000, SIZE_MAX);
  std::deque<GuardTable> tables;
  for (int i = 0; i < 40; ++i) tables.emplace_back(4096, budget);
  for (Word number = 0; number < 500; ++number) {
    for (GuardTable& table : tables) {
      note(table, key(number));
      ASSERT_LE(budget.entries(), 1000U);
    }
  }
  EXPECT_EQ(total(tables), budget.entries());
  EXPECT_GT(budget.entries(), 900U) << "no more is forgotten than must be";
}

TEST(TableBudget, AllTablesTogetherStayWithinTheirBytes) {
  constexpr std::size_t kBytes = 1 << 20;
  TableBudget budget(SIZE_MAX, kBytes);
  std::deque<GuardTable> tables;
  for (int i = 0; i < 20; ++i) tables.emplace_back(4096, budget);
  for (Word number = 0; number < 500; ++number) {
    for (GuardTable& table : tables) {
      note(table, key(number, 100));
      ASSERT_LE(budget.bytes(), kBytes);
    }
  }
  EXPECT_GT(budget.bytes(), kBytes / 2);
}

TEST(TableBudget, SlotsOfATableThatWasEmptiedByOthersAreGivenBack) {
  TableBudget budget(3000, SIZE_MAX);
  GuardTable large(4096, budget);
  for (Word number = 0; number < 3000; ++number) note(large, key(number));
  const std::size_t full = budget.bytes();
  GuardTable other(4096, budget);
  for (Word number = 0; number < 3000; ++number) note(other, key(number));
  EXPECT_LT(large.size(), 10U);
  EXPECT_LT(budget.bytes(), full + full / 4);
}

TEST(TableBudget, NothingIsLeftInItWhenItsTablesAreGone) {
  TableBudget budget(100, SIZE_MAX);
  {
    GuardTable table(64, budget);
    for (Word number = 0; number < 1000; ++number) note(table, key(number));
    set_kernel(table, 3);
    table.erase(key(3), hash_words(key(3)));
    table.clear();
    EXPECT_EQ(budget.entries(), 0U);
    note(table, key(1));
  }
  EXPECT_EQ(budget.entries(), 0U);
  EXPECT_EQ(budget.bytes(), 0U);
}

TEST(TableBudget, AFloodInOneTableLeavesWhatOthersUseAndTakesWhatTheyDoNot) {
  TableBudget budget(1000, SIZE_MAX);
  GuardTable used(4096, budget);
  GuardTable unused(4096, budget);
  GuardTable flooded(4096, budget);
  for (Word number = 0; number < 50; ++number) {
    set_kernel(used, number);
    set_kernel(unused, number);
  }
  for (Word number = 0; number < 20'000; ++number) {
    note(flooded, key(number));
    if (number % 50 == 0) {
      for (Word kernel = 0; kernel < 50; ++kernel) {
        ASSERT_EQ(state(used, key(kernel)), EntryState::kKernel) << "after " << number;
      }
    }
  }
  EXPECT_EQ(unused.size(), 0U);
  EXPECT_LE(budget.entries(), 1000U);
}

TEST(TableBudget, TablesOfAnotherBudgetAreLeftAlone) {
  TableBudget small(10, SIZE_MAX);
  TableBudget large(1000, SIZE_MAX);
  GuardTable mine(4096, small);
  GuardTable other(4096, large);
  for (Word number = 0; number < 500; ++number) {
    note(other, key(number));
    note(mine, key(number));
  }
  EXPECT_EQ(other.size(), 500U);
  EXPECT_LE(mine.size(), 10U);
}

TEST(TableBudget, ThreadsThatFillManyTablesGetTrueAnswersAndStayNearTheBound) {
  constexpr std::size_t kBound = 300;
  constexpr int kThreads = 8;
  TableBudget budget(kBound, SIZE_MAX);
  std::deque<GuardTable> tables;
  for (int i = 0; i < 16; ++i) tables.emplace_back(64, budget);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(i);
      for (int step = 0; step < 3000; ++step) {
        GuardTable& table = tables[random() % tables.size()];
        const Word number = random() % 200;
        if (random() % 4 == 0) set_kernel(table, number);
        const Found found = table.find(key(number), hash_words(key(number)));
        if (found.state == EntryState::kKernel) {
          wrong += found.kernel != &kernels[number];
        } else {
          note(table, key(number));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  // Alone, one more insertion after the other brings it back below its bound.
  for (Word number = 300; number < 300 + kBound; ++number) note(tables.front(), key(number));
  EXPECT_LE(budget.entries(), kBound);
  EXPECT_EQ(total(tables), budget.entries());
}

TEST(TableBudget, TheProcessHasOne) {
  EXPECT_EQ(TableBudget::process().max_entries(), 65'536U);
  EXPECT_EQ(TableBudget::process().max_bytes(), std::size_t{64} << 20);
  const std::size_t before = TableBudget::process().entries();
  GuardTable table;
  note(table, key(1));
  EXPECT_EQ(TableBudget::process().entries(), before + 1);
}

}  // namespace
}  // namespace eagercache
