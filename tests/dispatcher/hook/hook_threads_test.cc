// Many threads inside the same hooks.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "tests/dispatcher/hook_fixture.h"
#include "tests/support/child_process.h"

namespace eagercache {
namespace {

class HookThreadsTest : public HookTest {
 protected:
  // Runs `body` (given the thread's number) on four threads.
  static void on_threads(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back(body, i);
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  OperatorHook& sin_ = hook("aten::sin");
};

TEST_F(HookThreadsTest, HitsAndNativeAnswersDoNotMixAndEveryCallIsCounted) {
  constexpr int kCalls = 300;
  const at::Tensor hit = at::zeros({16});
  const at::Tensor native = at::zeros({17});
  FakeKernel& fake = filling_kernel(42);
  install(sin_, {hit}, fake);
  const CallCounts counts = counted(sin_, [&] {
    on_threads([&](int) {
      for (int i = 0; i < kCalls; ++i) {
        EXPECT_EQ(at::sin(hit)[0].item<double>(), 42.0);
        EXPECT_EQ(at::sin(native)[0].item<double>(), 0.0);
      }
    });
  });
  EXPECT_EQ(fake.runs(), 4 * kCalls);
  EXPECT_EQ(count(counts, CallOutcome::kHit), 4U * kCalls);
  EXPECT_EQ(count(counts, CallOutcome::kMiss), 1U);
  EXPECT_EQ(total(counts), 8U * kCalls);
}

TEST_F(HookThreadsTest, CallsOfAThreadsDyingObjectsAreAnsweredToo) {
  const at::Tensor x = at::zeros({16});
  install(sin_, {x}, filling_kernel(42));
  struct Late {
    at::Tensor x;
    std::atomic<int>* right = nullptr;
    ~Late() {
      for (int i = 0; right != nullptr && i < 10; ++i) {
        *right += at::sin(x)[0].item<double>() == 42.0 ? 1 : 0;
      }
    }
  };
  std::atomic<int> right{0};
  const CallCounts counts = counted(sin_, [&] {
    on_threads([&](int) {
      thread_local Late late;  // made before the thread's first call, and so destroyed after
      late.x = x;
      late.right = &right;
      at::sin(x);
    });
  });
  EXPECT_EQ(right.load(), 4 * 10);
  EXPECT_GT(count(counts, CallOutcome::kHit), 4U);
  EXPECT_EQ(count(counts, CallOutcome::kMiss), 0U);
}

TEST_F(HookThreadsTest, VerdictsAndPoliciesThatChangeUnderCallsNeverGiveAThirdAnswer) {
  const at::Tensor x = at::zeros({16});
  FakeKernel& fake = filling_kernel(42);
  std::atomic<bool> stop{false};
  std::thread changing([&] {
    while (!stop.load()) {
      install(sin_, {x}, fake);
      set_on_miss(OnMiss::kNative);
      runtime().set_answering(false);
      runtime().set_answering(true);
    }
  });
  on_threads([&](int) {
    for (int i = 0; i < 500; ++i) {
      const auto value = at::sin(x)[0].item<double>();
      EXPECT_TRUE(value == 42.0 || value == 0.0) << value;
    }
  });
  stop = true;
  changing.join();
}

TEST_F(HookThreadsTest, OperatorsMayBeRegisteredWhileOthersAreCalled) {
  const at::Tensor x = at::zeros({16});
  install(sin_, {x}, filling_kernel(42));
  std::atomic<bool> stop{false};
  std::thread calling([&] {
    while (!stop.load()) {
      EXPECT_EQ(at::sin(x)[0].item<double>(), 42.0);
      EXPECT_EQ(at::cos(x)[0].item<double>(), 1.0);
    }
  });
  on_threads([](int number) {
    static constexpr const char* kNames[] = {"aten::cos", "aten::exp", "aten::cos", "aten::tanh"};
    hook(kNames[number]);
  });
  stop = true;
  calling.join();
  EXPECT_EQ(at::cos(x)[0].item<double>(), 1.0);
}

TEST_F(HookThreadsTest, AForkedChildStaysNative) {
  const at::Tensor x = at::zeros({16});
  install(sin_, {x}, filling_kernel(42));
  ASSERT_EQ(at::sin(x)[0].item<double>(), 42.0);
  const int code = run_in_child([&] {
    const bool refused = !runtime().set_answering(true) && runtime().forked();
    return refused && at::sin(x)[0].item<double>() == 0.0 ? 0 : 1;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(at::sin(x)[0].item<double>(), 42.0) << "the parent goes on";
}

}  // namespace
}  // namespace eagercache
