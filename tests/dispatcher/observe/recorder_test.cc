// What is recorded of calls: all of them, by key, whatever answered, from every thread.

#include "dispatcher/observe/recorder.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

class RecorderTest : public HookTest {
 protected:
  RecorderTest() {
    forget_recorded_calls();
    set_recording(true);
  }
  ~RecorderTest() override {
    set_recording(false);
    forget_recorded_calls();
  }

  // Of the operator, the key with this many elements.
  static RecordedCall recorded(const OperatorHook& hook, std::int64_t numel) {
    for (const RecordedCall& call : recorded_calls()) {
      DecodedCall decoded;
      EXPECT_TRUE(decode_call(call.words, &decoded));
      if (call.hook == &hook && decoded.arguments.at(0).sizes == std::vector{numel}) {
        return call;
      }
    }
    return {};
  }

  OperatorHook& sin_ = hook("aten::sin");
};

TEST_F(RecorderTest, EveryEligibleCallIsCountedUnderItsKeyWhateverAnswers) {
  const at::Tensor kernel_answers = at::ones({3});
  const at::Tensor native_answers = at::ones({5});
  install(sin_, {kernel_answers}, filling_kernel(42));
  for (int i = 0; i < 7; ++i) {
    (void)at::sin(kernel_answers);
  }
  for (int i = 0; i < 40; ++i) {
    (void)at::sin(native_answers);  // a miss, then decided
  }
  (void)at::sin(at::zeros({0}));  // steps aside: has no key
  EXPECT_EQ(recorded(sin_, 3).calls, 7U);
  EXPECT_EQ(recorded(sin_, 3).hits, 7U);
  EXPECT_EQ(recorded(sin_, 3).native_ns, 0U);
  EXPECT_EQ(recorded(sin_, 5).calls, 40U);
  EXPECT_EQ(recorded(sin_, 5).hits, 0U);
  EXPECT_GT(recorded(sin_, 5).native_ns, 0U);
  EXPECT_EQ(recorded_calls().size(), 2U);
}

TEST_F(RecorderTest, CallsOfThreadsThatHaveEndedAreKept) {
  const at::Tensor x = at::ones({3});
  constexpr int kThreads = 4;
  constexpr int kCalls = 100;
  for (int round = 0; round < 2; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&x] {
        for (int call = 0; call < kCalls; ++call) {
          (void)at::sin(x);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  // A thread whose number of threads is another one has another key.
  std::uint64_t calls = 0;
  for (const RecordedCall& call : recorded_calls()) {
    calls += call.calls;
  }
  EXPECT_EQ(calls, 2U * kThreads * kCalls);
  EXPECT_EQ(lost_calls(), 0U);
}

TEST_F(RecorderTest, CountsOutliveTheTable) {
  const at::Tensor x = at::ones({3});
  (void)at::sin(x);
  sin_.table().clear();
  (void)at::sin(x);
  EXPECT_EQ(recorded(sin_, 3).calls, 2U);
}

TEST_F(RecorderTest, NothingIsRecordedUnlessAskedFor) {
  set_recording(false);
  (void)at::sin(at::ones({3}));
  EXPECT_TRUE(recorded_calls().empty());
}

TEST_F(RecorderTest, CallsThatStepAsideAreCountedByRuleAndAQuarterOfThemIsTimed) {
  const OperatorHook& divide = hook("aten::floor_divide");
  const at::Tensor empty = at::zeros({0});
  const at::Tensor integers = at::ones({100'000}, at::kInt);
  constexpr int kRounds = 400;
  for (int i = 0; i < kRounds; ++i) {
    (void)at::floor_divide(integers, integers);
    for (int j = 0; j < 3; ++j) {  // a loop of four calls, each of which is timed now and then
      (void)at::sin(empty);
    }
  }
  RecordedAside small;
  RecordedAside large;
  for (const RecordedAside& aside : recorded_asides()) {
    if (aside.hook == &divide) {
      large = aside;
    } else if (aside.hook == &sin_) {
      small = aside;
    }
  }
  EXPECT_EQ(small.reason, AsideReason::kEmptyTensor);
  EXPECT_EQ(large.reason, AsideReason::kIntegerDivision);
  EXPECT_EQ(small.calls, 3U * kRounds);
  EXPECT_EQ(large.calls, 1U * kRounds);
  for (const RecordedAside& aside : {small, large}) {
    EXPECT_GT(aside.timed, aside.calls / 6);
    EXPECT_LT(aside.timed, aside.calls / 3);
  }
  EXPECT_GT(large.native_ns, small.native_ns);
  forget_recorded_calls();
  EXPECT_TRUE(recorded_asides().empty());
}

TEST_F(RecorderTest, ACallThatNativeRefusesIsNotRecorded) {
  (void)hook("eagercache_test::refuse");
  EXPECT_ANY_THROW(call("eagercache_test::refuse", at::ones({3})));
  EXPECT_TRUE(recorded_calls().empty());
}

}  // namespace
}  // namespace eagercache
