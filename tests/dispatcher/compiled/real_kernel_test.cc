// Kernels that were compiled, published, verified, loaded and run: make_store.py's store.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "kernel_cache/loading/shared_library.h"
#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

namespace fs = std::filesystem;

// The only environment's text in the store.
std::string environment_of(const fs::path& root) {
  for (const fs::directory_entry& entry : fs::directory_iterator(root / "v1")) {
    std::ifstream file(entry.path() / "ENV");
    if (file) {
      return {std::istreambuf_iterator<char>(file), {}};
    }
  }
  throw std::runtime_error("no environment in " + root.string());
}

class RealKernelTest : public HookTest {
 protected:
  RealKernelTest() {
    open_store(EAGERCACHE_TEST_STORE);
    at::manual_seed(7);
    x_ = at::rand({512, 512});
  }

  static void open_store(const fs::path& root) {
    Policy policy;
    policy.on_miss = OnMiss::kNative;
    policy.choose = Choose::kAlways;
    runtime().set_policy(policy);
    StoreOptions options;
    options.root = root;
    options.environment = environment_of(root);
    Result<std::unique_ptr<DiskStore>> store = DiskStore::open(std::move(options));
    if (!store) {
      throw std::runtime_error(store.status().to_string());
    }
    runtime().set_store(std::move(store).value());
  }

  static at::Tensor var(const at::Tensor& x) {
    return at::var(x, at::IntArrayRef{1}, at::Scalar(1), /*keepdim=*/false);
  }

  // What native answers, hooks or not.
  template <typename Call>
  static auto native(const Call& call) {
    runtime().set_answering(false);
    auto result = call();
    runtime().set_answering(true);
    return result;
  }

  static void expect_like_native(const at::Tensor& result, const at::Tensor& expected) {
    EXPECT_EQ(result.sizes(), expected.sizes());
    EXPECT_EQ(result.strides(), expected.strides());
    EXPECT_EQ(result.dtype(), expected.dtype());
    EXPECT_EQ(result.storage_offset(), expected.storage_offset());
    EXPECT_TRUE(at::allclose(result, expected, 1e-5, 1e-5));
  }

  at::Tensor x_;
};

TEST_F(RealKernelTest, EveryCallOfAKnownKeyIsAHitFromTheFirst) {
  OperatorHook& hooked = hook("aten::var.correction");
  const at::Tensor expected = native([&] { return var(x_); });
  at::Tensor result;
  const CallCounts counts = counted(hooked, [&] {
    for (int i = 0; i < 3; ++i) {
      result = var(x_ + i) * 1;
    }
  });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 3U);
  EXPECT_EQ(total(counts), 3U);
  EXPECT_TRUE(at::allclose(result, expected, 1e-3, 1e-3)) << "the variance of x + 2 is that of x";
  expect_like_native(var(x_), expected);
  EXPECT_GE(SharedLibrary::loaded_count(), 1U);
  const auto verdicts = runtime().verdicts(hooked);
  ASSERT_FALSE(verdicts.empty());
  EXPECT_EQ(verdicts.front().decision, "kernel");
}

TEST_F(RealKernelTest, AKernelOfTwoOutputsAnswersBoth) {
  OperatorHook& aminmax = hook("aten::aminmax");
  const auto call_aminmax = [this] { return at::aminmax(x_, 1, /*keepdim=*/false); };
  const auto [low, high] = native(call_aminmax);
  std::tuple<at::Tensor, at::Tensor> result;
  const CallCounts counts = counted(aminmax, [&] { result = call_aminmax(); });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 1U);
  expect_like_native(std::get<0>(result), low);
  expect_like_native(std::get<1>(result), high);
}

TEST_F(RealKernelTest, AnUnknownShapeStaysNative) {
  OperatorHook& hooked = hook("aten::var.correction");
  const at::Tensor other = x_.slice(0, 0, 100);
  const CallCounts counts =
      counted(hooked, [&] { EXPECT_TRUE(at::equal(var(other), var(other))); });
  EXPECT_EQ(count(counts, CallOutcome::kMiss), 1U);
  EXPECT_EQ(count(counts, CallOutcome::kNative), 1U);
}

TEST_F(RealKernelTest, AHitHasItsGradient) {
  hook("aten::var.correction");
  const auto gradient = [this] {
    const at::Tensor leaf = x_.clone().requires_grad_();
    var(leaf).sum().backward();
    return leaf.grad();
  };
  expect_like_native(gradient(), native(gradient));
}

TEST_F(RealKernelTest, FourThreadsMeetAKernelForTheFirstTimeTogether) {
  OperatorHook& hooked = hook("aten::var.correction");
  const at::Tensor expected = native([&] { return var(x_); });
  constexpr int kCalls = 50;
  const CallCounts counts = counted(hooked, [&] {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int n = 0; n < kCalls; ++n) {
          EXPECT_TRUE(at::allclose(var(x_), expected, 1e-5, 1e-5));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
  EXPECT_EQ(total(counts), 4U * kCalls);
  EXPECT_GE(count(counts, CallOutcome::kHit), 4U * (kCalls - 10));
}

// A process of its own: one that has loaded an object does not read it again.
TEST_F(RealKernelTest, ADamagedKernelIsNeverLoaded) {
  OperatorHook& hooked = hook("aten::var.correction");
  TemporaryDirectory folder;
  const fs::path copy = folder.path() / "store";
  fs::copy(EAGERCACHE_TEST_STORE, copy, fs::copy_options::recursive);
  fs::permissions(copy, fs::perms::owner_all);
  int damaged = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(copy)) {
    if (entry.path().extension() == ".so") {
      fs::permissions(entry.path(), fs::perms::owner_read | fs::perms::owner_write);
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(static_cast<std::streamoff>(entry.file_size() / 2));
      file.put('\x5a').put('\xa5').put('\x5a').put('\xa5');
      ++damaged;
    }
  }
  ASSERT_GE(damaged, 1);
  open_store(copy);
  const std::size_t loaded = SharedLibrary::loaded_count();
  const at::Tensor expected = native([&] { return var(x_); });
  const CallCounts counts = counted(hooked, [&] { EXPECT_TRUE(at::equal(var(x_), expected)); });
  EXPECT_EQ(count(counts, CallOutcome::kHit), 0U);
  EXPECT_EQ(SharedLibrary::loaded_count(), loaded);
  EXPECT_EQ(runtime().store()->quarantined(), 1U);
}

}  // namespace
}  // namespace eagercache
