// Memory that threads keep is used again, is bounded, and is like the one that PyTorch gives.

#include "dispatcher/memory/large_blocks.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "dispatcher/memory/output_allocation.h"

namespace eagercache {
namespace {

constexpr std::size_t kMega = std::size_t{1} << 20;
constexpr std::size_t kSmallest = 10 << 10;  // of all blocks that are kept

// A test begins with nothing kept by its thread.
class LargeBlocks : public ::testing::Test {
 protected:
  LargeBlocks() { const WithoutKeptBlocks none; }
};

void use(const c10::DataPtr& memory, std::size_t bytes) { std::memset(memory.get(), 0x5A, bytes); }

TEST_F(LargeBlocks, AreUsedAgainForWhatIsAboutAsLarge) {
  for (const std::size_t bytes : {kSmallest, std::size_t{112'000}, kMega, kMostLargeBlock}) {
    void* const first = allocate_block(bytes).get();
    EXPECT_EQ(allocate_block(bytes).get(), first) << bytes;
    EXPECT_EQ(allocate_block(bytes - bytes / 16).get(), first) << bytes;
    const c10::DataPtr held = allocate_block(bytes);
    EXPECT_NE(allocate_block(bytes).get(), held.get()) << bytes;
  }
}

TEST_F(LargeBlocks, HoldWhatIsAskedForAndAreAligned) {
  // Around the ends of all sizes, so that a block is taken that another size left behind.
  for (std::size_t power = kLeastLargeBlock; power <= kMostLargeBlock; power *= 2) {
    for (std::size_t quarter = 4; quarter < 8; ++quarter) {
      for (const std::size_t bytes : {power / 4 * quarter - 1, power / 4 * quarter,
                                      power / 4 * quarter + 1, power / 4 * quarter - 1}) {
        const c10::DataPtr memory = allocate_block(bytes);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 64, 0U) << bytes;
        EXPECT_EQ(memory.get(), memory.get_context());
        use(memory, bytes);
      }
    }
  }
}

TEST_F(LargeBlocks, OfSmallerAndLargerSizesAreNotKept) {
  for (const std::size_t bytes : {std::size_t{1}, kLeastLargeBlock, kMostLargeBlock + 1}) {
    use(allocate_block(bytes), bytes);
  }
  EXPECT_EQ(kept_by_thread(), 0U);
}

TEST_F(LargeBlocks, KeptByAThreadAreBounded) {
  for (const std::size_t bytes : {kSmallest, kMega, 3 * kMega, kMostLargeBlock}) {
    std::vector<c10::DataPtr> many;
    for (int i = 0; i < 40; ++i) {
      many.push_back(allocate_block(bytes));
      use(many.back(), bytes);
    }
    many.clear();
    EXPECT_LE(kept_by_thread(), kMostKeptByThread);
    EXPECT_GE(kept_by_thread(), 16 * kSmallest);
  }
  void* last = nullptr;
  {
    const c10::DataPtr memory = allocate_block(kMega);
    last = memory.get();
  }
  EXPECT_EQ(allocate_block(kMega).get(), last);  // what was dropped first goes first
}

TEST_F(LargeBlocks, KeptByAllThreadsAreBoundedAndFreedWhenThreadsEnd) {
  const std::size_t before = kept_by_process();
  std::vector<std::thread> threads;
  std::atomic<std::size_t> kept{0};
  std::atomic<int> filled{0};
  constexpr int kThreads = 8;  // which could keep twice the bound
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      {
        std::vector<c10::DataPtr> many;
        for (int n = 0; n < 16; ++n) {
          many.push_back(allocate_block(kMega));
        }
      }
      kept += kept_by_thread();
      ++filled;
      while (filled < kThreads) {
        std::this_thread::yield();
      }
      EXPECT_LE(kept_by_process(), kMostKeptByProcess);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_LE(kept + before, kMostKeptByProcess);
  EXPECT_GE(kept + before, kMostKeptByProcess - kMega);
  EXPECT_EQ(kept_by_process(), before);
}

TEST_F(LargeBlocks, MayBeDroppedByAnotherThreadAndAfterTheirOwn) {
  c10::DataPtr memory;
  std::thread([&] { memory = allocate_block(kMega); }).join();
  use(memory, kMega);
  std::thread([&] {
    memory.clear();  // by a thread that never took one
    EXPECT_EQ(kept_by_thread(), 0U);
    thread_local c10::DataPtr late;  // dies behind what the thread keeps
    late = allocate_block(kMega);
  }).join();
  EXPECT_EQ(kept_by_thread(), 0U);
}

TEST_F(LargeBlocks, AreNotKeptWhileKernelsAreTimed) {
  allocate_block(kMega).clear();
  EXPECT_EQ(kept_by_thread(), kMega);
  {
    const WithoutKeptBlocks outer;
    EXPECT_EQ(kept_by_thread(), 0U);
    { const WithoutKeptBlocks inner; }
    allocate_block(kMega).clear();
    EXPECT_EQ(kept_by_thread(), 0U);
  }
  allocate_block(kMega).clear();
  EXPECT_EQ(kept_by_thread(), kMega);
}

TEST_F(LargeBlocks, OfOutputsAndOfScratchAreTheSame) {
  void* first = nullptr;
  {
    const at::Tensor output = OutputSpec(at::kFloat, {512, 512}, {512, 1}).allocate();
    first = output.data_ptr();
  }
  EXPECT_EQ(allocate_block(kMega).get(), first);
  const at::Tensor other = allocate_output(at::kDouble, {256, 512}, {1, 256});
  EXPECT_EQ(other.data_ptr(), first);
  EXPECT_EQ(other.strides(), at::IntArrayRef({1, 256}));
}

// What the profiler is told of.
class Reported final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*memory*/, std::int64_t bytes, std::size_t /*allocated*/,
                         std::size_t /*reserved*/, c10::Device /*device*/) override {
    sum += bytes;
    ++reports;
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t sum = 0;
  int reports = 0;
};

TEST_F(LargeBlocks, ArePyTorchsOwnWhileMemoryIsProfiled) {
  allocate_block(kMega).clear();
  const auto reported = std::make_shared<Reported>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reported);
  c10::DataPtr memory = allocate_block(kMega);
  EXPECT_EQ(reported->sum, static_cast<std::int64_t>(kMega));
  memory.clear();
  EXPECT_EQ(reported->sum, 0);
  EXPECT_EQ(reported->reports, 2);
  EXPECT_EQ(kept_by_thread(), kMega);
}

TEST_F(LargeBlocks, AreGivenBackWhenThereIsNoMemoryForAnother) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        {
          std::vector<c10::DataPtr> many;
          for (int i = 0; i < 16; ++i) {
            many.push_back(allocate_block(kMega));
            use(many.back(), kMega);
          }
        }
        std::uint64_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        struct rlimit all {};
        ::getrlimit(RLIMIT_AS, &all);
        all.rlim_cur = pages * static_cast<std::uint64_t>(::getpagesize());
        ::setrlimit(RLIMIT_AS, &all);
        // The heap may hold one or two; then there is no other memory than what is kept.
        std::vector<c10::DataPtr> more;
        while (kept_by_thread() != 0) {
          more.push_back(allocate_block(kMostLargeBlock));
        }
        use(more.back(), kMostLargeBlock);
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace eagercache
