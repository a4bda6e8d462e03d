// Outputs that take their memory from the thread's own blocks are like the ones that native makes.

#include "dispatcher/memory/output_allocation.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace eagercache {
namespace {

constexpr std::size_t kMostKept = 32 * 8;

OutputSpec floats(std::int64_t n) { return {at::kFloat, {n}, {1}}; }

TEST(OutputAllocation, GivesWhatEmptyStridedGives) {
  for (const bool inference : {false, true}) {
    const c10::InferenceMode mode(inference);
    for (const std::int64_t n : {1, 8, 16, 17, 100, 2048, 2049, 100000}) {
      const at::Tensor mine = OutputSpec(at::kFloat, {2, n}, {1, 2}).allocate();
      const at::Tensor native = at::empty_strided({2, n}, {1, 2}, at::kFloat);
      EXPECT_EQ(mine.sizes(), native.sizes());
      EXPECT_EQ(mine.strides(), native.strides());
      EXPECT_EQ(mine.dtype(), native.dtype());
      EXPECT_EQ(mine.device(), native.device());
      EXPECT_EQ(mine.is_inference(), inference);
      EXPECT_EQ(mine.key_set(), native.key_set());
      EXPECT_EQ(mine.is_non_overlapping_and_dense(), native.is_non_overlapping_and_dense());
      EXPECT_EQ(mine.storage().nbytes(), native.storage().nbytes());
      EXPECT_EQ(mine.storage().allocator(), native.storage().allocator());
      EXPECT_TRUE(mine.storage().resizable());
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mine.data_ptr()) % 64, 0U) << n;
    }
  }
}

TEST(OutputAllocation, KnowsOfItsLayoutWhatSizesAndStridesTell) {
  const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> layouts{
      {{}, {}},
      {{8}, {1}},
      {{4, 3}, {1, 4}},
      {{4, 3}, {6, 2}},
      {{4, 3}, {0, 1}},
      {{2, 3, 4}, {12, 4, 1}},
      {{2, 3, 4, 5}, {60, 20, 5, 1}},
      {{2, 3, 4, 5}, {60, 1, 15, 3}},
      {{2, 3, 4, 5, 6}, {360, 120, 30, 6, 1}},
      {{2, 3, 4, 5, 6}, {360, 1, 90, 18, 3}},
      {{2, 1, 2, 1, 2, 1, 3}, {12, 12, 6, 6, 3, 3, 1}},
  };
  for (const auto& [sizes, strides] : layouts) {
    const at::Tensor mine = OutputSpec(at::kDouble, sizes, strides).allocate();
    const at::Tensor native = at::empty_strided(sizes, strides, at::kDouble);
    EXPECT_EQ(mine.sizes(), native.sizes());
    EXPECT_EQ(mine.strides(), native.strides());
    EXPECT_EQ(mine.numel(), native.numel());
    EXPECT_EQ(mine.storage().nbytes(), native.storage().nbytes());
    EXPECT_EQ(mine.suggest_memory_format(), native.suggest_memory_format());
    EXPECT_EQ(mine.is_non_overlapping_and_dense(), native.is_non_overlapping_and_dense());
    for (const at::MemoryFormat format :
         {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast,
          at::MemoryFormat::ChannelsLast3d}) {
      EXPECT_EQ(mine.is_contiguous(format), native.is_contiguous(format)) << mine.sizes();
      EXPECT_EQ(mine.unsafeGetTensorImpl()->is_strides_like(format),
                native.unsafeGetTensorImpl()->is_strides_like(format));
    }
  }
}

TEST(OutputAllocation, WhatIsMadeOfAnOutputOutlivesIt) {
  at::Tensor tensor = floats(8).allocate();
  tensor.fill_(3);
  const at::Tensor view = tensor.slice(0, 2, 6);
  const at::Tensor detached = tensor.detach();
  tensor.reset();
  for (int i = 0; i < 100; ++i) {
    floats(8).allocate().fill_(5);
  }
  EXPECT_TRUE(at::equal(view, at::full({4}, 3.0F)));
  EXPECT_TRUE(at::equal(detached, at::full({8}, 3.0F)));
}

TEST(OutputAllocation, WeakReferencesSeeThatAnOutputIsGone) {
  at::Tensor tensor = floats(8).allocate();
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(tensor.getIntrusivePtr());
  const auto storage = tensor.storage().getWeakStorageImpl();
  EXPECT_TRUE(weak.lock().defined());
  tensor.reset();
  EXPECT_TRUE(weak.expired());
  EXPECT_TRUE(storage.expired());
  // Their objects are not used again before the last weak reference is gone.
  const at::Tensor other = floats(8).allocate();
  EXPECT_TRUE(weak.expired());
  EXPECT_NE(other.unsafeGetTensorImpl(), weak._unsafe_get_target());
}

TEST(OutputAllocation, AnEmptyTensorIsPyTorchsOwn) {
  const at::Tensor empty = OutputSpec(at::kFloat, {0, 4}, {4, 1}).allocate();
  EXPECT_EQ(empty.numel(), 0);
  EXPECT_EQ(empty.sizes(), (at::IntArrayRef{0, 4}));
}

TEST(OutputAllocation, AResizedTensorKeepsItsData) {
  at::Tensor tensor = floats(8).allocate();
  tensor.fill_(3);
  tensor.resize_({5000});
  EXPECT_TRUE(at::equal(tensor.slice(0, 0, 8), at::full({8}, 3.0F)));
  tensor.fill_(4);
}

TEST(OutputAllocation, MemoryIsUsedAgainAndNoMoreThanSoMuchIsKept) {
  void* first = nullptr;
  {
    const at::Tensor tensor = floats(8).allocate();
    first = tensor.data_ptr();
  }
  EXPECT_EQ(floats(9).allocate().data_ptr(), first);  // what died last is taken first
  for (const std::int64_t n : {1, 20, 40, 80, 160, 320, 640, 2048}) {
    std::vector<at::Tensor> many;
    for (int i = 0; i < 200; ++i) {
      many.push_back(floats(n).allocate());
      many.back().fill_(i);
    }
    for (int i = 0; i < 200; ++i) {
      EXPECT_EQ(many[static_cast<std::size_t>(i)][0].item<float>(), static_cast<float>(i));
    }
  }
  EXPECT_LE(kept_blocks(), kMostKept);
}

TEST(OutputAllocation, ATensorMayOutliveItsThreadAndDieInAnother) {
  at::Tensor tensor;
  std::thread([&] {
    at::Tensor other = floats(8).allocate();
    tensor = floats(8).allocate();
    tensor.fill_(7);
  }).join();
  EXPECT_TRUE(at::equal(tensor, at::full({8}, 7.0F)));
  tensor.reset();
}

TEST(OutputAllocation, TensorsThatDieAfterTheirThreadsBlocksAreFreedAtOnce) {
  std::thread([] {
    // Made first, so that it dies last.
    thread_local at::Tensor late;
    late = at::empty({});
    late = floats(8).allocate();
  }).join();
}

TEST(OutputAllocation, AnotherAllocatorIsAsked) {
  class Counting final : public c10::Allocator {
   public:
    c10::DataPtr allocate(std::size_t n) override {
      ++calls;
      return c10::GetDefaultCPUAllocator()->allocate(n);
    }
    void copy_data(void* to, const void* from, std::size_t n) const override {
      default_copy_data(to, from, n);
    }
    int calls = 0;
  };
  static Counting counting;
  c10::SetCPUAllocator(&counting, 1);
  const at::Tensor tensor = floats(8).allocate();
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 1);
  EXPECT_EQ(counting.calls, 1);
  EXPECT_EQ(tensor.storage().allocator(), &counting);
}

// Tensors go from two threads that make them to two that drop them.
TEST(OutputAllocation, ThreadsHandTensorsOn) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<at::Tensor> queue;
  int makers = 2;
  std::vector<std::thread> threads;
  for (int maker = 0; maker < 2; ++maker) {
    threads.emplace_back([&, maker] {
      for (int i = 0; i < 20000; ++i) {
        at::Tensor tensor = floats(1 + i % 600).allocate();
        tensor.data_ptr<float>()[0] = static_cast<float>(maker);
        const std::lock_guard lock(mutex);
        queue.push_back(std::move(tensor));
        changed.notify_one();
      }
      const std::lock_guard lock(mutex);
      --makers;
      changed.notify_all();
    });
  }
  std::atomic<int> dropped{0};
  for (int dropper = 0; dropper < 2; ++dropper) {
    threads.emplace_back([&] {
      for (;;) {
        std::vector<at::Tensor> mine;
        {
          std::unique_lock lock(mutex);
          changed.wait(lock, [&] { return !queue.empty() || makers == 0; });
          if (queue.empty()) {
            return;
          }
          mine.swap(queue);
        }
        dropped += static_cast<int>(mine.size());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(dropped.load(), 40000);
}

}  // namespace
}  // namespace eagercache
